"""The configurations of the workloads: each makes its environment, and the one for GPUs is of the same task."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from libra.config import load_config
from libra.envs import make_environment

NEEDED = {"search": "bm25s", "gymnasium": "gymnasium", "textarena": "textarena"}


@pytest.mark.parametrize("workload", ["repair", "search", "code_tests", "games", "mcp_tools", "verifiers"])
def test_two_cores_and_gpus_have_a_configuration_each(workload: str, repository: Path) -> None:
    small, large = (load_config(repository / "configs" / f"{workload}{end}.yaml") for end in ("", "_qwen3_4b"))
    assert large.model.path == "Qwen/Qwen3-4B"
    assert large.trainer.layout == "fsdp2"
    assert (small.environment.name == large.environment.name) or workload == "games"
    assert small.environment.tools == large.environment.tools
    assert small.agent.function == large.agent.function
    for config in (small, large):
        name = config.environment.name
        if name in NEEDED:
            pytest.importorskip(NEEDED[name])
        args = dict(config.environment.args) | ({"isolation": "best"} if name in ("repair", "python_tests") else {})
        prompts = [make_environment(name, args, 0).prompt("train", index) for index in range(3)]
        assert len({prompt.messages[-1]["content"] for prompt in prompts}) > (name not in ("gymnasium", "textarena"))


@pytest.mark.parametrize(
    "workflow", ["software_repair", "corpus_search", "code_tests", "games", "mcp_tools", "verifiers_agent"]
)
def test_a_workflow_names_configurations_that_exist(workflow: str, repository: Path) -> None:
    module = importlib.import_module(workflow)
    assert module.CONFIG.is_file()
    assert f"{module.CONFIG.stem}_qwen3_4b.yaml" in (module.__doc__ or "") + module.CONFIG.read_text()

"""The configurations of the workloads: each makes its environment, and the one for GPUs is of the same task."""

import pytest

from libra.config import load_config
from libra.envs import make_environment

NEEDED = {"gymnasium_text": "gymnasium", "textarena_game": "textarena", "corpus": "bm25s"}


EXAMPLES = ("repair", "search", "games")
SANDBOXED = ("repair", "code_tests")
WORKLOADS = [
    *(pytest.param(name, marks=pytest.mark.live) for name in SANDBOXED), "search", "games", "mcp_tools", "verifiers",
]  # fmt: skip


@pytest.mark.parametrize("workload", WORKLOADS)
def test_two_cores_and_gpus_have_a_configuration_each(workload, repository, request):
    if workload in SANDBOXED:
        request.getfixturevalue("needs_sandbox")
    folder = repository / ("examples" if workload in EXAMPLES else "configs")
    small = load_config(folder / f"{workload}.yaml")
    large = load_config(folder / f"{workload}.yaml", [str(repository / "configs" / "qwen3_4b.yaml")])
    assert large.model.path == "Qwen/Qwen3-4B"
    assert large.trainer.layout == "fsdp2"
    assert (small.environment.name == large.environment.name) or workload == "games"
    assert small.environment.tools == large.environment.tools
    assert small.agent.function == large.agent.function
    for config in (small, large):
        name = config.environment.name
        module = name.partition(":")[0].rpartition(".")[2]
        if module in NEEDED:
            pytest.importorskip(NEEDED[module])
        args = dict(config.environment.args)
        environment = make_environment(name, args, 0)
        held_out = environment.num_prompts("eval")
        assert held_out is None or 0 < config.evaluation.prompts <= held_out, "a run would be refused"
        prompts = [environment.prompt("train", index) for index in range(3)]
        assert all(prompt.messages[-1]["content"] for prompt in prompts)
        if workload != "games":  # games may begin alike
            assert len({prompt.messages[-1]["content"] for prompt in prompts}) > 1

"""The workflow math_tools around a run that is replaced: engine, model, what it prints and its exit codes."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from libra.config import load_config
from libra.errors import ConfigError


@pytest.fixture
def workflow(repository: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("math_tools", repository / "workflows" / "math_tools.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def ran(workflow: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[dict[str, Any]]:
    """Arguments of each ``libra.train``, which is replaced; the model is there already."""
    calls: list[dict[str, Any]] = []

    def train(model: str, **settings: Any) -> SimpleNamespace:
        calls.append({"model": model, **settings})
        values = {"reward": 0.5, "groups_without_signal": 1.0, "turns": 60, "mismatch_max_abs": 0.25}
        return SimpleNamespace(iterations=[values], directory=tmp_path)

    monkeypatch.setattr(workflow, "libra", SimpleNamespace(train=train))
    monkeypatch.setattr(workflow, "make_ready", lambda model: None)
    return calls


def test_a_run_has_the_engine_and_settings_asked_for(workflow, ran, capsys):
    assert workflow.main(["--engine", "transformers", "run.iterations=3", "trainer.prompts=2"]) == 0
    (call,) = ran
    assert (call["model"], call["rollout__engine"], call["run__iterations"]) == ("smollm2-135m", "transformers", 3)
    assert "50%" in capsys.readouterr().out  # one of two groups has rewards that differ


def test_numbers_are_written_as_for_libra_run(workflow, ran):
    workflow.main(["--engine", "transformers", "trainer.lr=1e-3", "environment.args.examples=1"])
    assert (ran[0]["trainer__lr"], ran[0]["environment__args"]["examples"]) == (1e-3, 1)


def test_no_group_to_learn_from_is_a_failure(workflow, ran):
    assert workflow.main(["--engine", "transformers", "trainer.prompts=1"]) == 1


def test_without_vllm_it_says_how_to_install_it_and_goes_on(workflow, ran, capsys, monkeypatch):
    monkeypatch.setattr(workflow.importlib.util, "find_spec", lambda name: None)
    workflow.main([])
    assert ran[0]["rollout__engine"] == "transformers"
    assert "make setup-vllm" in capsys.readouterr().out
    monkeypatch.setattr(workflow.importlib.util, "find_spec", lambda name: object())
    workflow.main([])
    assert ran[1]["rollout__engine"] == "vllm"


def test_an_error_of_the_run_is_a_message(workflow, ran, capsys, monkeypatch):
    def fails(*args: Any, **settings: Any) -> None:
        raise ConfigError("trainer.lr: got -1")

    monkeypatch.setattr(workflow.libra, "train", fails)
    assert workflow.main(["--engine", "transformers"]) == 2
    assert "math_tools: trainer.lr: got -1" in capsys.readouterr().err


def test_the_gpu_configuration_is_a_delta_of_the_same_task(repository):
    small, large = (load_config(repository / "configs" / f"math_tools{end}.yaml") for end in ("", "_qwen3_4b"))
    assert (small.model.path, large.model.path) == ("smollm2-135m", "Qwen/Qwen3-4B")
    assert small.environment.name == large.environment.name == "reasoning_gym"
    assert small.model.dtype == large.model.dtype == "bfloat16"
    assert small.model.master_dtype == large.model.master_dtype == "float32"

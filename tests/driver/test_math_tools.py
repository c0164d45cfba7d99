"""The workflow math_tools around a run that is replaced: its settings, exit codes and configurations."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from libra.config import load_config
from libra.errors import ConfigError


def test_a_run_has_the_settings_asked_for_and_what_came_of_it_is_the_exit_code(
    repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[dict[str, Any]] = []

    def train(model: str, **settings: Any) -> SimpleNamespace:
        calls.append({"model": model, **settings})
        if settings["trainer__lr"] < 0:
            raise ConfigError("trainer.lr: got -1")
        values = {"reward": 0.5, "groups_without_signal": 1.0, "turns": 60, "mismatch_max_abs": 0.25}
        return SimpleNamespace(iterations=[values], directory=tmp_path)

    main = runpy.run_path(str(repository / "workflows" / "math_tools.py"))["main"]
    main.__globals__.update(libra=SimpleNamespace(train=train), make_ready=lambda model: None)
    given = ["--engine", "transformers", "environment.args.examples=1"]
    assert main([*given, "trainer.prompts=2", "trainer.lr=1e-3"]) == 0
    assert (calls[0]["model"], calls[0]["rollout__engine"]) == ("smollm2-135m", "transformers")
    assert (calls[0]["trainer__lr"], calls[0]["environment__args"]["examples"]) == (1e-3, 1)
    assert main([*given, "trainer.prompts=1", "trainer.lr=1e-3"]) == 1  # no group to learn from
    assert main([*given, "trainer.lr=-1"]) == 2 and "trainer.lr" in capsys.readouterr().err


def test_the_gpu_configuration_is_a_delta_of_the_same_task(repository: Path) -> None:
    small, large = (load_config(repository / "configs" / f"math_tools{end}.yaml") for end in ("", "_qwen3_4b"))
    assert (small.model.path, large.model.path) == ("smollm2-135m", "Qwen/Qwen3-4B")
    assert small.environment.name == large.environment.name == "reasoning_gym"
    assert {c.model.dtype for c in (small, large)} == {"bfloat16"}
    assert {c.model.master_dtype for c in (small, large)} == {"float32"}

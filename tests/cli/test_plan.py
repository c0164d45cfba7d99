"""``libra plan`` says what to do, as words and as JSON, and refuses what cannot be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from libra.cli.main import cli
from libra.cli.plan import fixed_by, read_trace
from libra.config import load_config
from libra.errors import ConfigError, PlanError
from libra.planner.configured import snapshot_of

GIVEN = ("model.path=Qwen/Qwen3-4B", "planner.num_gpus=16", "trainer.prompts=8", "trainer.group_size=4")


def _run(repository: Path, *arguments: str) -> str:
    config = str(repository / "configs/qwen3_4b_gpu.yaml")
    result = CliRunner().invoke(cli, ["plan", config, *GIVEN, *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_json_has_the_whole_plan_and_words_do_too(repository: Path) -> None:
    values = json.loads(_run(repository, "--json", "--what-if", "--why", "train=4", "--why", "tp=2"))
    assert values["num_gpus"] == 16
    assert values["training"]["gpus"] + values["rollout_gpus"] + values["spare_gpus"] == 16
    assert [why["choice"] for why in values["why"]] == ["train=4", "tp=2"]
    assert values["why"][0]["train_gpus"] == 4
    words = _run(repository, "--what-if")
    assert "bottleneck" in words
    assert "Next best, and why not" in words


def test_only_what_the_engine_runs_is_planned_unless_asked(repository: Path) -> None:
    values = json.loads(_run(repository, "--json"))
    assert {bucket["tp"] for bucket in values["buckets"]} == {1}
    assert "--what-if" in values["left_out"]["engine"]
    assert "Without TP 2, 4, 8" in _run(repository)


def test_a_trace_sets_the_lengths(repository: Path, tmp_path: Path) -> None:
    trace = tmp_path / "turns.csv"
    rows = [f"task{i},0,0,100,{200 + i},0.5" for i in range(40)]
    trace.write_text("\n".join(["task,sample,turn,prompt_tokens,completion_tokens,tool_s", *rows]))
    values = json.loads(_run(repository, "--json", "--trace", str(trace)))
    assert values["num_trajectories"] == 32
    assert values["bounds"]["longest_s"] < json.loads(_run(repository, "--json"))["bounds"]["longest_s"]


def test_choices_that_cannot_be_say_what_to_type(repository: Path) -> None:
    config = load_config(str(repository / "configs/qwen3_4b_gpu.yaml"), GIVEN)
    snapshot, _ = snapshot_of(config, None, what_if=True)
    assert fixed_by(snapshot, "engines.2=3").fixed_engines == {2: 3}
    for wrong in ("train", "train=x", "dp=4", "engines=3"):
        with pytest.raises(ConfigError, match="--why train=16"):
            fixed_by(snapshot, wrong)
    with pytest.raises(PlanError, match="--what-if"):
        snapshot_of(load_config(str(repository / "configs/qwen3_4b_gpu.yaml"), (*GIVEN, "planner.tp=[8]")), None, False)
    with pytest.raises(PlanError, match="--trace FILE"):
        read_trace(Path("missing.csv"), 1.0)
    with pytest.raises(ConfigError, match=r"planner\.generated_p99_tokens=4000"):
        load_config(
            str(repository / "configs/qwen3_4b_gpu.yaml"),
            ("planner.generated_p50_tokens=1000", "planner.generated_p99_tokens=10"),
        )

"""The setting of `benchmarks.pipeline_live`: its engines, its tail, and what its figures compare. Runs are not timed here."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import pipeline_live, tailed_engines
from benchmarks.pipeline_live import GROUP, PROMPTS, SIDES, TURNS, Sides, configured
from benchmarks.pipeline_predicted import HybridsTurn, RunSeen, WaveSeen, measured, seen
from benchmarks.streamed_gradients import Apart
from benchmarks.tailed_engines import PacedEngine, TailedEngine, num_tokens
from libra.config.model_paths import resolve_model
from libra.config.streaming import most_waves, turns
from libra.policy.turning import OpenStep, Turned, TurningEngine
from libra.types import StopReason, TurnRequest


def test_a_rollout_has_a_long_tail() -> None:
    names = [f"train-1-{group}-{sample}" for group in range(PROMPTS) for sample in range(GROUP)]
    totals = sorted(sum(num_tokens(name, turn) for turn in range(TURNS)) for name in names)
    assert totals[-1] > 3 * totals[len(totals) // 2]
    assert len({num_tokens(names[0], turn) for turn in range(TURNS)}) > 1


def test_the_engine_takes_emulated_seconds_and_declares_them(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    async def generated() -> None:
        engine = PacedEngine(Path(resolve_model("libra/tiny-arithmetic")), slots=2, max_context_tokens=64, version=3)
        await engine.start()
        with monkeypatch.context() as patched:
            patched.setattr(tailed_engines.asyncio, "sleep", sleep)
            output = await engine.generate(TurnRequest("train-0-1-2", 1, np.zeros(4, np.int32), 60, seed=5))
        assert len(output.token_ids) == min(60, num_tokens("train-0-1-2", 1))
        assert slept == [len(output.token_ids) * tailed_engines.TOKEN_S]
        steps = engine.capacity().steps
        assert steps is not None and steps.step_s(1, 0) == steps.step_s(2, 64) == tailed_engines.TOKEN_S
        await engine.close()

    asyncio.run(generated())


def test_an_engine_that_computes_has_the_same_lengths_and_log_probabilities_of_its_own() -> None:
    async def generated() -> None:
        engine = TailedEngine(Path(resolve_model("libra/tiny-arithmetic")), slots=2, max_context_tokens=128, version=3)
        await engine.start()
        output = await engine.generate(TurnRequest("train-0-1-2", 1, np.arange(4, dtype=np.int32), 60, seed=5))
        assert len(output.token_ids) == num_tokens("train-0-1-2", 1) and output.stop_reason is StopReason.LENGTH
        assert len(set(output.logprobs.tolist())) > 1 and output.busy_s > 0
        await engine.close()

    asyncio.run(generated())


def test_one_side_is_not_streamed_one_is_and_one_turns(tmp_path: Path) -> None:
    configs = {side: configured(tmp_path, tmp_path, "a", side, 2) for side in SIDES}
    assert {side: (most_waves(each) > 0, turns(each)) for side, each in configs.items()} == {
        "off": (False, False),
        "streaming": (True, False),
        "turning": (True, True),
    }
    real = configured(tmp_path, tmp_path, "a", "off", 2, real=True)
    assert real.rollout.engine.endswith(":TailedEngine") and real.rollout.ignore_eos


def seconds(*each: float) -> RunSeen:
    """A run whose iterations took so long, after a first one of 20 seconds."""
    published = [0.0, 20.0]
    for more in each:
        published.append(published[-1] + more)
    return RunSeen(tuple(published), {}, (), ())


def test_ratios_are_those_of_iterations_and_have_a_goal_if_there_are_enough() -> None:
    sides = Sides(Path(), Path(), None, 3)  # type: ignore[arg-type]
    sides.seen = {
        "off": [seconds(9.0, 8.0, 9.0)],
        "streaming": [seconds(6.0, 6.0, 6.0)],
        "turning": [seconds(5.0, 4.0, 5.0)],
    }
    row = {"train_s": 2.0, "streamed_frac": 0.5, "waves": 4, "grad_norm": 1.0}
    sides.rows, sides.turned = {side: [row] for side in SIDES}, 1
    simulated = {"off": 9.0, "streaming": 6.0, "turning": 4.0}
    part = sides.figures(simulated, {})
    assert part["streaming_ratio"].value == pytest.approx(1.5) and part["turning_ratio"].value == pytest.approx(1.2)
    assert part["streaming_ratio"].goal is None and "gradients_equal" not in part
    sides.seen = {side: runs * 2 for side, runs in sides.seen.items()}
    again = {"streaming": Apart(1e-15, 1e-14, 4, 1.0), "turning": Apart(1e-15, 1e-11, 5, 2.0)}
    found = sides.figures(simulated, again)
    assert found["streaming_ratio"].reached and found["turns"].value == 1
    assert found["simulated_turning_ratio"].value == pytest.approx(1.5)
    assert found["live_over_simulated"].value == pytest.approx(1.25) and not found["live_over_simulated"].reached
    assert found["gradients_equal"].value == 0.5 and not found["gradients_equal"].reached
    assert found["turning_live_norm_apart"].value == 0.5


def test_with_partial_the_last_line_has_the_rounds_that_are_done(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    class Cut(Sides):
        """Runs that take no time; the third is cut off."""

        def run(self, side: str) -> None:
            if side == "off" and len(self.seen[side]) == 2:
                raise KeyboardInterrupt
            self.seen[side].append(seconds(6.0, 6.0))
            self.rows[side].append({"train_s": 2.0, "streamed_frac": 0.5, "waves": 4})

        def simulated_s(self) -> dict[str, float]:
            return dict.fromkeys(SIDES, 6.0)

    class Nothing:
        def __init__(self, *_: Any) -> None:
            pass

        def __enter__(self) -> Nothing:
            return self

        def __exit__(self, *_: Any) -> None:
            pass

    monkeypatch.setattr(pipeline_live, "Sides", Cut)
    monkeypatch.setattr(pipeline_live, "local_cluster", Nothing)
    monkeypatch.setattr(pipeline_live, "Client", Nothing)
    monkeypatch.setattr(pipeline_live, "made_model", lambda directory: tmp_path)
    with pytest.raises(KeyboardInterrupt):
        pipeline_live.main(["--json", "--partial", "--rounds", "3", "--iterations", "2"])
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert [(each["rounds"], each["of"]) for each in printed] == [(1, 3), (2, 3)]
    assert printed[-1]["figures"]["streaming_ratio"]["value"] == 1.0
    with pytest.raises(SystemExit):
        pipeline_live.main(["--rounds", "2", "--iterations", "2"])
    assert "type --rounds 3" in capsys.readouterr().err


LOG: list[dict[str, Any]] = [
    {"name": "version_published", "t_s": 1.0, "version": 0},
    {"name": "wave_opened", "t_s": 2.0, "batch": 0, "wave": 0, "members": [[0, 1]]},
    {"name": "wave_trained", "t_s": 5.0, "batch": 0, "wave": 0, "hybrids": 1},
    {"name": "role_changed", "t_s": 5.0, "to_role": "train", "stage_s": {"draining": 9.0, "sleeping": 0.5, "taking_up": 0.25}},
    {"name": "wave_opened", "t_s": 5.5, "batch": 0, "wave": 1, "members": []},
    {"name": "batch_opened", "t_s": 5.5, "batch": 0},
    {"name": "version_published", "t_s": 6.0, "version": 1},
    {"name": "batch_opened", "t_s": 8.0, "batch": 1},
    {"name": "version_published", "t_s": 8.5, "version": 2},
]  # fmt: skip


def test_a_log_shows_waves_what_follows_them_and_changes() -> None:
    found = seen([event for event in LOG if event["name"] != "batch_opened" or event["batch"]])
    assert found == RunSeen(
        (1.0, 6.0, 8.5), {0: 1.0, 1: 0.5}, (WaveSeen(0, 3.0, ((0, 1),), 1),), (("train", 0.75, 9.0),)
    )
    assert found.iterations_s() == [2.5]


def test_prices_are_those_that_the_runs_measured() -> None:
    tokens = {(0, 0): 10, (0, 1): 10, (1, 0): 100, (1, 1): 300}
    runs = {
        "off": [RunSeen((0.0,), {0: 99.0, 1: 5.0}, (), ())],
        "streaming": [RunSeen((0.0,), {1: 0.75}, (WaveSeen(0, 9.0, ((0, 0),), 0), WaveSeen(1, 1.5, ((1, 0),), 0)), ())],
        "turning": [RunSeen((0.0,), {1: 1.0}, (WaveSeen(1, 1.75, ((1, 1),), 1),), (("train", 0.75, 9.0),))],
    }
    prices = measured(runs, [4.0, 4.0], tokens, 2.0)
    assert prices._asdict() == pytest.approx({
        "token_s": 0.01, "whole_s": 1.0, "close_s": 0.75, "merge_s": 0.25, "alone_s": 0.5, "shared_s": 0.25,
        "to_training_s": 0.75, "to_rollout_s": 1.0, "drain_s": 9.0,
    })  # fmt: skip


def test_only_hybrids_turn() -> None:
    engines = [TurningEngine(name, 1, Turned.ROLLOUT, 3) for name in ("rollout-0", "rollout-1")]
    turned = HybridsTurn(min_gain_s=0.0, hybrids=frozenset({"rollout-1"})).turns(
        engines, 0, OpenStep(90.0, 1, True, False)
    )
    assert [turn.worker for turn in turned] == ["rollout-1"]

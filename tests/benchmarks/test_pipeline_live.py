"""The setting of `benchmarks.pipeline_live`: its engine, its tail, and what its figures compare. Runs are not timed here."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from benchmarks import pipeline_live
from benchmarks.pipeline_live import GROUP, PROMPTS, SIDES, TURNS, PacedEngine, Sides, configured, num_tokens
from benchmarks.pipeline_predicted import HybridsTurn, measured
from libra.config.model_paths import resolve_model
from libra.config.streaming import most_waves, turns
from libra.policy.turning import OpenStep, Turned, TurningEngine
from libra.types import TurnRequest


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
            patched.setattr(pipeline_live.asyncio, "sleep", sleep)
            output = await engine.generate(TurnRequest("train-0-1-2", 1, np.zeros(4, np.int32), 60, seed=5))
        assert len(output.token_ids) == min(60, num_tokens("train-0-1-2", 1))
        assert slept == [len(output.token_ids) * pipeline_live.TOKEN_S]
        steps = engine.capacity().steps
        assert steps is not None and steps.step_s(1, 0) == steps.step_s(2, 64) == pipeline_live.TOKEN_S
        await engine.close()

    asyncio.run(generated())


def test_one_side_is_not_streamed_one_is_and_one_turns(tmp_path: Path) -> None:
    configs = {side: configured(tmp_path, tmp_path, "a", side, 2) for side in SIDES}
    assert {side: (most_waves(each) > 0, turns(each)) for side, each in configs.items()} == {
        "off": (False, False),
        "streaming": (True, False),
        "turning": (True, True),
    }


def test_ratios_are_those_of_the_rounds() -> None:
    sides = Sides(Path(), Path(), None, 2)  # type: ignore[arg-type]
    sides.seconds = {"off": [9.0, 8.0, 9.0, 9.0, 9.0], "streaming": [6.0] * 5, "turning": [5.0, 4.0, 5.0, 5.0, 5.0]}
    sides.rows = {side: [{"train_s": 2.0, "streamed_frac": 0.5, "waves": 4}] for side in SIDES}
    sides.turned = 1
    found = sides.figures({"off": 9.0, "streaming": 6.0, "turning": 4.0})
    assert found["streaming_ratio"].value == pytest.approx(1.5) and found["turning_ratio"].value == pytest.approx(1.2)
    assert found["streaming_ratio"].reached and found["turns"].value == 1
    assert found["simulated_turning_ratio"].value == pytest.approx(1.5)
    assert found["live_over_simulated"].value == pytest.approx(1.25) and not found["live_over_simulated"].reached


def test_prices_are_those_that_the_runs_measured_and_only_hybrids_turn() -> None:
    rows = {
        "off": [{"train_s": 5.0, "forwarded_tokens": 1000}, {"train_s": 3.0, "forwarded_tokens": 500}],
        "streaming": [{"train_s": 4.5, "wave_s": 4.0}],
    }
    changed = [{"to_role": "train", "stage_s": {"draining": 9.0, "sleeping": 0.5, "taking_up": 0.25}}]
    assert measured(rows, changed, 2.0) == pytest.approx((7.0 / 1500, 0.5, 0.75, 1.0))
    engines = [TurningEngine(name, 1, Turned.ROLLOUT, 3) for name in ("rollout-0", "rollout-1")]
    turned = HybridsTurn(min_gain_s=0.0, hybrids=frozenset({"rollout-1"})).turns(
        engines, 0, OpenStep(90.0, 1, True, False)
    )
    assert [turn.worker for turn in turned] == ["rollout-1"]

"""What bounds a step, in a number and in words; closed forms beside the simulator."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from libra.hardware import load_gpu, load_shape
from libra.planner.build_plan import plan
from libra.planner.cost import Layout, TrajectoryTotals
from libra.planner.plan import Plan
from libra.planner.regime import regime
from libra.planner.snapshot import PlanningSnapshot
from libra.sim.disciplines import DISCIPLINES
from libra.sim.tuning import Cell, Setting, play, step_s
from libra.sim.workload import Trace, TurnPlan
from libra.types import NO_TOOL

ROLLOUT_S, TRAIN_S, UPDATE_S = 300.0, 160.0, 10.0


@pytest.fixture(scope="module")
def made() -> Plan:
    """16 GPUs, of which 8 train; the numbers of the plan are replaced by round ones."""
    tokens = np.random.default_rng(0).lognormal(8.5, 0.7, 96).clip(200, 30_000)
    totals = TrajectoryTotals.of(1000.0, tokens, observation_tokens=3000.0, num_turns=8.0, tool_wait_s=4.0)
    found = plan(PlanningSnapshot(load_gpu("A800-80G"), load_shape("Qwen3-8B"), 16, totals, training=Layout(), eta=0))
    return replace(
        found, rollout_s=ROLLOUT_S, train_s=TRAIN_S, update_s=UPDATE_S, step_s=ROLLOUT_S + TRAIN_S + UPDATE_S,
        training=replace(found.training, gpus=8),
        bounds=replace(found.bounds, longest_s=100.0, throughput_s=280.0, training_s=TRAIN_S),
    )  # fmt: skip


def test_the_forms_of_a_synchronous_step(made: Plan) -> None:
    found = regime(made, changes_s=18.8)
    work_s = (280.0 * 8 + TRAIN_S * 8) / 16
    assert found.path_over_work == pytest.approx((100.0 + UPDATE_S) / work_s)
    assert found.step_s == pytest.approx(
        {
            "split": 470.0,
            "streaming": ROLLOUT_S + TRAIN_S / 2 + UPDATE_S,
            "colocated": 140.0 + 20.0 + 80.0 + UPDATE_S + 18.8,
            "turning": max(work_s, 160.0 + 40.0) + UPDATE_S + 18.8,
        }
    )
    assert found.words.startswith("work-bound") and "would save about 47 %" in found.words
    assert "trainer.streaming=on alone 17 %" in found.words
    assert found.choice == "turning" and found.settings == {"trainer.streaming": "on", "trainer.turning": "auto"}


def test_roles_change_only_where_that_is_short_against_a_step(made: Plan) -> None:
    assert set(regime(made, changes_s=60.0).step_s) == {"split", "streaming"}
    assert set(regime(replace(made, eta=1, step_s=300.0)).step_s) == {"split", "streaming"}
    assert set(regime(made, streams=False).step_s) == {"split", "colocated"}
    assert "trainer.streaming=on would save" not in regime(made, streams=False, changes_s=60.0).words


def test_one_long_trajectory_is_told_as_such(made: Plan) -> None:
    slow = replace(made, bounds=replace(made.bounds, longest_s=900.0), rollout_s=900.0, step_s=1070.0)
    found = regime(slow)
    assert (
        found.path_over_work > 3 and found.words.startswith("latency-bound") and "larger run.eta (now 0)" in found.words
    )
    assert found.choice == "streaming" and "trainer.streaming=on would save about 7 %" in found.words
    later = replace(slow, eta=4, step_s=900.0)
    assert regime(later).path_over_work == pytest.approx(found.path_over_work / 5)
    even = replace(made, eta=1, train_s=20.0, step_s=290.0)
    nothing = regime(even)
    assert "change nothing: no other way to take a step would save 5 %" in nothing.words
    assert nothing.choice == "split" and not nothing.settings


def test_the_forms_and_the_simulator_agree_on_turning_over_split() -> None:
    rng, last = np.random.default_rng(3), TurnPlan(400, "", NO_TOOL, 0, 0.0)
    turns = [[TurnPlan(max(1, int(n)), "tool", "ok", 200, 1.0) for n in rng.lognormal(6.0, 0.5, 7)] for _ in range(64)]
    traces = tuple(Trace(str(index), 1000, (*each, last)) for index, each in enumerate(turns))
    cell = Cell(traces, 8, 0.0, 24, 16, 0, model="Qwen3-8B")
    seconds = {
        name: step_s(cell, play(cell, DISCIPLINES[name], Setting(core, 4, 4.0), 0))
        for name, core in (("split", 8), ("streaming", 8), ("colocated", 0), ("turning", 0))
    }
    plans = cell.workload(0).trajectories[: 24 * 8]
    totals = TrajectoryTotals.of(
        np.array([float(plan.prompt_tokens) for plan in plans]), np.array([float(plan.new_tokens) for plan in plans]),
        observation_tokens=1400.0, num_turns=8.0, tool_wait_s=7.0,
    )  # fmt: skip
    snapshot = PlanningSnapshot(
        load_gpu("A800-80G"), load_shape("Qwen3-8B"), 16, totals, training=Layout(), update_s=11.0, eta=0,
        fixed_train_gpus=8, tp=(4,),
    )  # fmt: skip
    forms = regime(plan(snapshot), changes_s=18.0).step_s
    for name in ("streaming", "colocated", "turning"):
        assert forms[name] / forms["split"] == pytest.approx(seconds[name] / seconds["split"], rel=0.2), (
            forms,
            seconds,
        )

"""A change is made when it pays, not when it seems to: weighed from measurement, moved both ways by a drift, and out of the
way of memory in time."""

import dataclasses
import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from deployments import planned_deployment
from hypothesis import given
from hypothesis import strategies as st

from libra.config import config_from_dict
from libra.hardware import engine_seconds, load_gpu, load_shape
from libra.hardware.run_calibration import EngineOfRun, RunCalibration
from libra.planner.arrangement_forecast import EndedIteration, RunFacts, ratio_of, run_facts
from libra.planner.arrangements import REBUCKET, ROLES, SLOTS, Seat, arranged
from libra.planner.build_plan import plan
from libra.planner.cost import TrajectoryTotals
from libra.planner.replan import MAX_DEMAND, ArrangementLoop, ContextTrend, Replanner
from libra.planner.snapshot import PlanningSnapshot
from libra.planner.step_forecast import Batch, StepForecast, Taken
from libra.types import EngineCapacity, StepSeconds

TOKENS_S = 100.0
LONG, HEAVY = Batch(3000.0, 3500.0), Batch(300.0, 30000.0)
STEPS = StepSeconds(0.02, 0.001, 1e-6, 1e-5, 500, 0.02)
MODEL = "Qwen3-0.6B"


def small_snapshot(num=24, factor=1.0):
    tokens = np.linspace(200, 2000, num) * factor
    return PlanningSnapshot(
        load_gpu("A800-80G"), load_shape("Qwen3-0.6B"), 8, TrajectoryTotals.of(256.0, tokens), tp=(1, 2)
    )


@pytest.fixture(scope="module")
def some_plan():
    return plan(small_snapshot())


def consider(replanner, iteration, current_s, plan, remaining, kinds=(ROLES,)):
    return replanner.weigh(iteration, current_s, planned_deployment(plan), plan.step_s, remaining, kinds=kinds)


@given(
    noise=st.lists(st.floats(-0.2, 0.2), min_size=30, max_size=60), drift=st.floats(-0.01, 0.01),
    confirmations=st.integers(1, 4), rest=st.integers(0, 6),
)  # fmt: skip
def test_drifting_noise_never_flaps_beyond_the_bound(noise, drift, confirmations, rest, some_plan):
    replanner = Replanner(confirmations=confirmations, rest_iterations=rest, first_cost_s=0.0)
    changes = []
    for iteration, value in enumerate(noise):
        # The proposal is always another layout, and looks better by noise on a drifting level.
        current_s = some_plan.step_s * math.exp(value + drift * iteration)
        if consider(replanner, iteration, current_s, some_plan, 1000).accepted:
            changes.append(iteration)
    assert len(changes) <= 1 + len(noise) / max(confirmations, rest)
    assert all(b - a > rest for a, b in pairwise(changes))
    assert not changes or changes[0] >= confirmations - 1


@given(noise=st.lists(st.floats(-0.04, 0.04), min_size=20, max_size=50))
def test_noise_below_the_least_gain_changes_nothing(noise, some_plan):
    replanner = Replanner(first_cost_s=0.0)
    for iteration, value in enumerate(noise):
        assert not consider(replanner, iteration, some_plan.step_s * (1 + value), some_plan, 10**6).accepted


def test_a_gain_is_weighed_against_what_changes_cost_over_the_iterations_that_remain(some_plan):
    current_s = some_plan.step_s * 1.5
    gain_s = current_s - some_plan.step_s
    for remaining, cost_s, accepted in ((10, 9 * gain_s, True), (10, 11 * gain_s, False), (1, 0.5 * gain_s, True)):
        replanner = Replanner(confirmations=1, cost_factor=1.0)
        replanner.changed(cost_s)
        considered = consider(replanner, 5, current_s, some_plan, remaining)
        assert considered.accepted is accepted
        assert considered.gain_s == pytest.approx(remaining * gain_s)
        assert (considered.cost_s, considered.num_changes) == (pytest.approx(cost_s), 1)


def test_the_present_layout_is_no_change(some_plan):
    replanner = Replanner(confirmations=1, first_cost_s=0.0)
    assert consider(replanner, 1, some_plan.step_s * 2, some_plan, 10, kinds=()).reason == "this is what runs"


def test_a_factor_scales_training():
    slow = plan(dataclasses.replace(small_snapshot(), training_factor=2.0, fixed_train_gpus=4))
    assert slow.train_s == pytest.approx(2 * plan(dataclasses.replace(small_snapshot(), fixed_train_gpus=4)).train_s)


def run(engine="vllm", ratio=0.8, **changes):
    why = "" if engine == "vllm" else "rollout.engine=vllm"
    values = {"core_trainers": 1, "overlap_steps": 0, "batch_trajectories": 16, "max_context_tokens": 4096} | changes
    found = None if ratio is None else (ratio, "the cost model of X")
    return RunFacts(**values, may_have=lambda _, tp: why, ratio=lambda *_: found)


def seat(name, *, tp=1, slots=8, kv=0, steps=None, **more):
    declared = {tp: EngineCapacity(kv, kv * 100, 100, slots, tp, steps)} if kv else {}
    return Seat(
        name, "node", "vllm", f"vllm-tp{tp}-threads1", tp, slots, declared=declared, **{"may_change": True, **more}
    )


def train_s(batch, replicas):
    return 0.2 + batch.trained_tokens / replicas / 1000.0


class MadeUpRun:
    """A run of exact speeds, of one engine that stays and hybrids; ``history`` is how many hybrids trained in each iteration."""

    def __init__(self, replanner=None, hybrids=2):
        self.loop, self.forecast = (
            ArrangementLoop(run("transformers"), replanner or Replanner(first_cost_s=0.1, rest_iterations=1)),
            StepForecast(),
        )
        self.seats = {f"rollout-{k}": seat(f"rollout-{k}", may_change=k < hybrids) for k in range(hybrids + 1)}
        self.history = []

    def iteration(self, k, batch, overlap=False):
        now = arranged(self.seats.values())
        self.history.append(len(now.training))
        rollout_s = batch.generated_tokens / len(now.engines) / TOKENS_S
        training_s = train_s(batch, 1 + len(now.training))
        step_s = max(rollout_s, training_s) if overlap else rollout_s + training_s
        taken = Taken(rollout_s, training_s, 0.0, step_s, {now.engines[0].kind: int(batch.generated_tokens)}, [])
        self.forecast = self.forecast.after(taken, now.by_kind)
        ended = EndedIteration(k, list(self.seats.values()), batch, None, step_s, 50, overlap)
        self.loop.learn(ended, 1 + len(now.training), training_s)
        weighed = self.loop.weigh(self.forecast, ended)
        if weighed.kinds:
            assert weighed.kinds == (ROLES,)
            self.loop.replanner.changed(0.1)
            training = weighed.chosen.arrangement.training
            self.seats = {n: replace(s, role="train" if n in training else "rollout") for n, s in self.seats.items()}


@pytest.mark.parametrize("overlap", [False, True])
def test_a_drift_moves_workers_both_ways(overlap):
    made_up = MadeUpRun()
    for k in range(36):
        made_up.iteration(k, HEAVY if 12 <= k < 24 else LONG, overlap=overlap)
    assert made_up.history[11] == 0
    assert made_up.history[23] >= 1
    assert made_up.history[35] == 0


@given(batches=st.lists(st.builds(Batch, st.floats(10, 5000), st.floats(10, 50000)), min_size=8, max_size=40))
def test_whatever_comes_changes_are_rare_and_some_engine_stays(batches):
    made_up = MadeUpRun(Replanner(first_cost_s=0.0, confirmations=2, rest_iterations=3))
    for k, batch in enumerate(batches):
        made_up.iteration(k, batch)
    assert sum(a != b for a, b in zip(made_up.history, made_up.history[1:], strict=False)) <= 1 + len(batches) / 3
    assert all(0 <= training <= 2 for training in made_up.history)


def lengths(context, number=16):
    return TrajectoryTotals.of(np.full(number, 0.5 * context), np.full(number, 0.5 * context))


def measured(seats, tokens=2000.0, rollout_s=4.0):
    now, forecast = arranged(seats), StepForecast()
    each = {kind: int(tokens * count / len(now.engines)) for kind, count in now.by_kind.items()}
    for _ in range(4):
        forecast = forecast.after(Taken(rollout_s, 1.0, 0.0, rollout_s + 1.0, each, []), now.by_kind)
    return forecast


def weighed_after(loop, seats, contexts):
    found, forecast = [], measured(seats)
    for k, context in enumerate(contexts):
        loop.learn_contexts(k, lengths(context))
        ended = EndedIteration(k, seats, Batch(2000.0, 2000.0), lengths(context), 5.0, 20, False)
        found.append(loop.weigh(forecast, ended))
    return found


def test_fewer_slots_are_taken_before_the_iteration_that_would_run_out():
    seats = [seat(f"rollout-{k}", kv=1000, steps=STEPS, may_change=False) for k in range(2)]
    loop = ArrangementLoop(run(batch_trajectories=64), Replanner(first_cost_s=1e9))
    contexts = [60.0, 75.0, 90.0, 105.0, 120.0]
    found = weighed_after(loop, seats, contexts)
    assert [bool(weighed.kinds) for weighed in found] == [False, False, True, True, True]
    first = found[2]
    assert first.context_tokens == pytest.approx(120.0)  # two iterations on: what begins now is under way already
    assert 8 * contexts[2] <= MAX_DEMAND * 1000 < 8 * first.context_tokens
    assert {engine.slots for engine in first.chosen.arrangement.engines} == {7}
    assert first.kinds == (SLOTS,)
    assert first.considered.accepted and first.considered.gain_s <= 0


@pytest.mark.parametrize(("ratio", "kinds"), [(0.8, (REBUCKET,)), (6.0, (SLOTS,))])
def test_the_quickest_of_those_that_hold_it_is_taken(ratio, kinds):
    """One engine of two workers holds three contexts where each of two engines holds one: it depends on how fast it is."""
    seats = [seat("rollout-0", slots=2, kv=384, steps=STEPS), seat("rollout-1", slots=2, kv=384, steps=STEPS)]
    loop = ArrangementLoop(run(ratio=ratio), Replanner(first_cost_s=1e9))
    weighed = weighed_after(loop, seats, [150.0, 175.0, 200.0])[-1]
    assert weighed.now.kv_demand > MAX_DEMAND >= weighed.chosen.kv_demand
    assert weighed.kinds == kinds
    if REBUCKET in kinds:
        (engine,) = weighed.chosen.arrangement.engines
        assert (engine.workers, engine.tp, engine.slots) == (("rollout-0", "rollout-1"), 2, 2)
        assert "the cost model of X" in weighed.considered.reason


def test_a_trend_is_never_below_what_was_and_rises_as_the_line_does():
    trend = ContextTrend()
    assert trend.expected(3) == 0.0
    for k, mean in enumerate([100.0, 120.0, 140.0]):
        trend = trend.after(k, mean)
    assert trend.expected(4) == pytest.approx(180.0)
    assert trend.after(3, 60.0).expected(5) >= 60.0


def test_slots_come_back_when_contexts_shrink_but_not_at_the_edge():
    tight = replace(seat("rollout-0", kv=1000, steps=STEPS, may_change=False), limits={1: 2})
    loop = ArrangementLoop(run(batch_trajectories=64), Replanner(first_cost_s=0.01, rest_iterations=0))
    near = weighed_after(loop, [tight], [400.0] * 4)  # 2 x 400 of 1000: a third would be too many
    assert not any(weighed.kinds for weighed in near)
    far = weighed_after(
        ArrangementLoop(run(batch_trajectories=64), Replanner(first_cost_s=0.01, rest_iterations=0)),
        [tight],
        [90.0] * 4,
    )
    raised = [weighed for weighed in far if weighed.kinds]
    assert raised and raised[0].kinds == (SLOTS,)
    assert raised[0].chosen.arrangement.engines[0].slots > 2
    assert raised[0].chosen.kv_demand <= 0.75


def test_boundaries_share_out_the_tokens_by_what_degrees_generate():
    lead = replace(
        seat("rollout-0", slots=4, kv=9000, steps=STEPS), bond=frozenset({"rollout-1"}),
        declared={1: EngineCapacity(9000, 1, 1, 4, 1, STEPS), 2: EngineCapacity(18000, 1, 1, 8, 2, STEPS)},
    )  # fmt: skip
    lent = replace(seat("rollout-1", slots=4), role="lent", bond=frozenset({"rollout-0"}))
    third = seat("rollout-2", slots=4, kv=9000, steps=STEPS, may_change=False)
    loop = ArrangementLoop(run(), Replanner(first_cost_s=1e9))
    spread = TrajectoryTotals.of(np.full(20, 10.0), np.arange(1, 21) * 10.0)
    loop.learn_contexts(0, spread)
    seats = [lead, lent, third]
    weighed = loop.weigh(measured(seats), EndedIteration(0, seats, LONG, spread, 5.0, 5, False))
    (end,) = weighed.boundaries_tokens.values()
    assert list(weighed.boundaries_tokens) == ["tp1"]
    short = spread.generated_tokens[spread.generated_tokens <= end].sum() / spread.generated_tokens.sum()
    pass_1, pass_2 = STEPS.step_s(4, 4 * weighed.context_tokens), STEPS.step_s(8, 8 * weighed.context_tokens)
    assert short == pytest.approx((4 / pass_1) / (4 / pass_1 + 8 / pass_2), abs=0.1)


def calibration(path, seconds, model=MODEL):
    engines = tuple(
        EngineOfRun(
            f"rollout-{tp}", "vllm", f"tp{tp}", tp, 8, 10_000, StepSeconds(s, 0.0, 0.0, 0.0, 100, 0.0)
        )
        for tp, s in seconds.items()
    )  # fmt: skip
    path.write_text(RunCalibration(model, "", engines, None).to_json())
    return path


def advised(**planner):
    return config_from_dict(
        {"model": {"path": MODEL}, "rollout": {"engine": "vllm"}, "planner": {"replan": "advise", **planner}}
    )


def modelled(gpu):
    one, two = (engine_seconds(gpu, MODEL, tp).decode_step_s(4, 400.0) for tp in (1, 2))
    return two / one


def test_a_calibration_is_asked_before_the_tables_of_a_gpu(tmp_path):
    path = calibration(tmp_path / "c.json", {1: 0.02, 2: 0.05})
    ratio = ratio_of(advised(calibration=str(path), gpu="H100-80G"), "A100-80G")
    assert ratio(1, 2, 4.0, 100.0) == (pytest.approx(2.5), f"what {path} measured")
    found = ratio(1, 4, 4.0, 100.0)  # it did not measure TP 4
    assert found is not None and found[1] == "the cost model of H100-80G"


@pytest.mark.parametrize(
    ("named", "workers", "used"),
    [("H100-80G", "A100-80G", "H100-80G"), (None, "H100-80G", "H100-80G"), (None, "cpu", "A800-80G")],
)
def test_the_configured_gpu_is_asked_before_the_workers_own(named, workers, used):
    found = ratio_of(advised(gpu=named), workers)(1, 2, 4.0, 100.0)
    assert found == (pytest.approx(modelled(used)), f"the cost model of {used}")


def test_degrees_that_cannot_be_are_named_with_the_setting():
    facts = run_facts(advised(tp=[1, 2]))
    assert facts.may_have("vllm", 2) == ""
    assert "rollout.engine=vllm" in facts.may_have("transformers", 2)
    assert "planner.tp with 4" in facts.may_have("vllm", 4)
    assert facts.ratio(1, 3, 4.0, 100.0) is None  # no heads divide by 3

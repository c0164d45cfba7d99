"""Systems whose groups begin by themselves: over-sampling, long rounds, groups over age, and what throwing away costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from libra.errors import ConfigError
from libra.hardware.host_kv import HostPool
from libra.hardware.virtual_engine import EngineTables, Request, VirtualEngine
from libra.policy import CommittedGroup, Fifo
from libra.policy.turning import TurningRule
from libra.sim import EngineSpec, Workload, synthetic
from libra.sim.disciplines import DISCIPLINES, Discipline, OverAge, Unfinished
from libra.sim.gpu_seconds import Cause
from libra.sim.open_groups import OpenGroups
from libra.sim.pipeline import Pipeline
from libra.sim.pipeline_options import PipelineOptions
from libra.sim.pipeline_result import PipelineResult
from libra.sim.repacking_pipeline import RepackingPipeline
from libra.sim.training_gpus import GroupWork, group_work
from libra.sim.tuning import Cell
from libra.sim.workload import Trace, TurnPlan, draw
from libra.types import NO_TOOL

Engines = Callable[..., tuple[EngineSpec, ...]]
Workloads = Callable[..., Workload]

QUICK = TurningRule(trajectories_per_gpu=2.0, min_gain_s=1.0, to_training_s=0.5, to_rollout_s=0.5)
OPTIONS = PipelineOptions(
    core_gpus=1, update_s=1.0, close_s=0.0, merge_s=0.5, load_s=0.25, rule=QUICK, host=HostPool(10**9, 0.3, 1e-6)
)
BY_GROUP = sorted(name for name, each in DISCIPLINES.items() if each.by_group)


def trained(
    workload: Workload,
    engines: tuple[EngineSpec, ...],
    discipline: Discipline,
    sample_s: float,
    options: PipelineOptions,
) -> tuple[Pipeline, PipelineResult]:
    """A run in which the gradients of each trajectory take ``sample_s`` GPU-seconds."""
    each_s = {plan[:3]: sample_s for plan in workload.trajectories}
    kept = {place: seconds for place, seconds in each_s.items() if place[2] < (options.samples or 1 << 30)}
    kind = RepackingPipeline if discipline.own_versions else Pipeline
    pipeline = kind(workload, engines, Fifo(), discipline, group_work(kept), options, sample_s=each_s)
    return pipeline, pipeline.train()


def test_groups_that_are_late_make_a_long_round() -> None:
    groups = OpenGroups([(0, i) for i in range(20)], 4, most_open=5, unfinished=Unfinished.DEFERRED)
    late = []
    for batch in range(4):
        assert not groups.version_published(batch) and not groups.long_round
        begun = groups.begins()
        assert begun == tuple((0, 5 * batch + i) for i in range(5))
        for place in begun[1:]:
            assert groups.group_committed(CommittedGroup(*place, batch)) == (place,)
        assert groups.is_full and groups.left_over() == begun[:1]
        late.append(begun[0])
    groups.version_published(4)
    assert groups.begins() == tuple(late) and groups.long_round  # and no more than a batch
    for place in late:
        assert groups.group_committed(CommittedGroup(*place, 4)) == (place,)
    assert groups.is_full and groups.left_over() == ()
    groups.version_published(5)
    with pytest.raises(ValueError, match="batch 5 has 0 of 4 groups"):
        groups.version_published(6)


def test_groups_over_age_are_dropped_and_others_begin() -> None:
    groups = OpenGroups([(0, i) for i in range(6)], 2, most_open=4, eta=1, over_age=OverAge.DROPPED)
    groups.version_published(0)
    assert groups.begins() == ((0, 0), (0, 1), (0, 2), (0, 3))
    for index in range(4):
        groups.generation_started(0, index, 0)
    assert groups.group_committed(CommittedGroup(0, 1, 0)) == ((0, 1),)
    assert groups.group_committed(CommittedGroup(0, 2, 0)) == ((0, 2),)
    assert groups.too_old(1) == () and groups.version_published(1) == ()
    assert groups.begins() == ((0, 4), (0, 5))
    for index in (4, 5):
        groups.generation_started(0, index, 1)
        assert groups.group_committed(CommittedGroup(0, index, 1)) == ((0, index),)
    assert groups.too_old(2) == ((0, 0), (0, 3))  # begun with version 0, they can be in batch 1 at the latest
    groups.version_published(2)
    assert groups.begins() == ((0, 0), (0, 3))  # no other prompts are left


def test_what_is_abandoned_costs_the_seconds_that_it_took(engines: Engines, workload: Workloads) -> None:
    work = workload([(100, 0.0)], [(1000, 0.0)], iterations=3)
    _, found = trained(
        work, engines(4, slots=1), DISCIPLINES["abandoning"], 1.0, replace(OPTIONS, samples=1, num_steps=1)
    )
    short_s = 0.1 + 100 * 0.01015
    assert found.gpu_s[Cause.THROWN_AWAY] == pytest.approx(
        2 * short_s, rel=0.01
    )  # the two long ones, alone on a GPU each
    assert found.gpu_s[Cause.GENERATING] == pytest.approx(2 * short_s, rel=0.01)
    assert found.gpu_s[Cause.TRAINING] == pytest.approx(2.0)
    assert found.lags == (0, 0)


def test_requests_of_one_engine_share_its_seconds(engines: Engines, workload: Workloads) -> None:
    work = workload([(100, 0.0)], [(1000, 0.0)], iterations=3)
    _, found = trained(
        work, engines(1, slots=4), DISCIPLINES["abandoning"], 1.0, replace(OPTIONS, samples=1, num_steps=1)
    )
    # Four prompts, then 100 steps of four requests: half of both for the two that are thrown away.
    assert found.gpu_s[Cause.THROWN_AWAY] == pytest.approx(found.gpu_s[Cause.GENERATING], rel=0.01)
    assert found.gpu_s[Cause.THROWN_AWAY] == pytest.approx((4 * 0.1 + 100 * 0.0106) / 2, rel=0.02)


def test_the_samples_that_end_first_are_trained_on(engines: Engines, workload: Workloads) -> None:
    lengths = [(100, 0.0)], [(800, 0.0)], [(120, 0.0)]
    work = workload(*lengths, group_size=3, iterations=2)
    each_s = {plan[:3]: 1.0 + plan.new_tokens for plan in work.trajectories}
    pipeline = Pipeline(
        work, engines(3, slots=1), Fifo(), DISCIPLINES["long_rounds"],
        {(iteration, 0): GroupWork(902.0, 801.0) for iteration in range(2)},
        replace(OPTIONS, samples=2, num_steps=1), sample_s=each_s,
    )  # fmt: skip
    found = pipeline.train()
    assert found.gpu_s[Cause.TRAINING] == pytest.approx(101.0 + 121.0)
    assert found.trained_frac == pytest.approx(222.0 / 902.0)
    assert found.gpu_s[Cause.THROWN_AWAY] == pytest.approx(0.1 + 120 * 0.01016, rel=0.02)


def test_the_trainer_wakes_for_a_part_of_a_batch(engines: Engines, workload: Workloads) -> None:
    work = workload(*([(100 * (k + 1), 0.0)] for k in range(4)), iterations=4)
    options = replace(OPTIONS, eta=1, num_steps=1, load_s=0.0)
    verl = replace(DISCIPLINES["verl_async"], open_batches=1.0)
    parts, found = trained(work, engines(4, slots=1), verl, 0.5, options)
    _, whole = trained(work, engines(4, slots=1), replace(verl, parts=1), 0.5, options)
    last_s = max(parts.record.ended_s.values())
    assert found.published_s == pytest.approx([last_s + 0.5 + 1.0])
    assert whole.published_s == pytest.approx([last_s + 4 * 0.5 + 1.0])
    _, halves = trained(work, engines(4, slots=1), replace(verl, parts=2), 0.5, options)
    assert halves.published_s == pytest.approx([last_s + 2 * 0.5 + 1.0])


@given(
    name=st.sampled_from(BY_GROUP), eta=st.integers(0, 2), seed=st.integers(0, 1000), count=st.integers(1, 4),
    slots=st.integers(1, 4), core=st.integers(1, 3), sample_s=st.one_of(st.just(0.0), st.floats(0.01, 30.0)),
)  # fmt: skip
@settings(deadline=None, max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_batches_are_full_and_gpu_seconds_add_up(
    engines: Engines, name: str, eta: int, seed: int, count: int, slots: int, core: int, sample_s: float
) -> None:
    discipline = DISCIPLINES[name]
    eta = eta if eta in discipline.etas else discipline.etas[0]
    samples = 4 if discipline.samples == 1.0 else 3
    work = synthetic(16, turns=3, seed=seed, iterations=14, group_size=4)
    options = replace(OPTIONS, eta=eta, core_gpus=core, samples=samples, num_steps=6)
    pipeline, found = trained(work, engines(count, slots=slots, kv=60_000), discipline, sample_s, options)
    assert len(found.published_s) == 6 and list(found.published_s) == sorted(found.published_s)
    assert len(found.lags) >= 6 * 4
    assert found.gpu_s[Cause.TRAINING] >= 6 * 4 * samples * sample_s - 1e-6
    if discipline.over_age is not OverAge.TRAINED:
        assert max(found.lags) <= eta
    gpus = count + (core if discipline.core_trainers else 0)
    assert sum(found.gpu_s.values()) == pytest.approx(gpus * found.published_s[-1])
    assert all(seconds >= -1e-6 for seconds in found.gpu_s.values()), found.gpu_s
    if discipline.unfinished is not Unfinished.CONTINUES:
        assert found.gpu_s[Cause.THROWN_AWAY] > 0.0
    again, same = trained(work, engines(count, slots=slots, kv=60_000), discipline, sample_s, options)
    assert same == found and again.record.ended_s == pipeline.record.ended_s


def test_a_cancelled_request_leaves_the_seconds_and_the_memory_of_the_others(
    tables: Callable[..., EngineTables],
) -> None:
    engine = VirtualEngine("e", tables(kv=1000), residuals=None, rng=np.random.default_rng(0))
    engine.own_gpu_s = {}
    for key in ("stays", "goes"):
        engine.submit(0.0, Request(key, key, 100, 100, 200), ())
    assert engine.next_finish_s() is not None
    assert engine.cancel(1.2, "goes") and not engine.cancel(1.2, "goes")
    assert engine.own_gpu_s["goes"] == pytest.approx(0.1 + 1.0 / 2)  # its prompt, and half of a second for two
    assert engine.kv_tokens == 300 and engine.is_running
    end_s = engine.next_finish_s()
    assert end_s is not None and [request.key for request in engine.finished(end_s)] == ["stays"]
    assert engine.own_gpu_s["stays"] == pytest.approx(0.1 + 1.0 / 2 + (end_s - 1.2))
    assert sum(engine.own_gpu_s.values()) == pytest.approx(engine.counters.busy_s)
    engine.submit(end_s, Request("early", "early", 500, 500, 10), ())
    assert engine.next_finish_s() is not None and engine.cancel(end_s + 0.2, "early")  # of 0.5 s for its prompt
    assert engine.own_gpu_s["early"] == pytest.approx(0.2)


def test_spare_samples_leave_the_others_as_they_are() -> None:
    turns = [(TurnPlan(10 * k + 10, "", NO_TOOL, 0, 0.0),) for k in range(12)]
    apart = [Trace(str(k), 100, each) for k, each in enumerate(turns)]
    like = [Trace(str(k // 4), 100, each) for k, each in enumerate(turns)]
    for traces, kinship in ((apart, 0.0), (apart, 0.5), (like, 0.0)):
        plain = draw(traces, num_groups=3, group_size=4, seed=1, iterations=2, kinship=kinship)
        more = draw(traces, num_groups=3, group_size=4, seed=1, iterations=2, kinship=kinship, spare=2)
        assert len(more.trajectories) == len(plain.trajectories) // 4 * 6
        assert tuple(plan for plan in more.trajectories if plan.sample < 4) == plain.trajectories
        if traces is like:  # spare ones are of the same task
            by_task = {each: k // 4 for k, each in enumerate(turns)}
            groups: dict[tuple[int, int], set[int]] = {}
            for plan in more.trajectories:
                groups.setdefault((plan.iteration, plan.group), set()).add(by_task[plan.turns])
            assert len(groups) == 6 and all(len(each) == 1 for each in groups.values())


def test_long_rounds_are_scored_over_whole_periods() -> None:
    traces = tuple(Trace(str(plan.sample), 1000, plan.turns) for plan in synthetic(8, turns=2, seed=3).trajectories)
    cell = Cell(traces, 4, 0.5, 8, 8, 0)
    work, steps = cell.drawn_for(DISCIPLINES["long_rounds"], 0)
    assert steps == 1 + 5  # four short rounds and a long one, after the first step
    assert max(plan.sample for plan in work.trajectories) == 4  # five for four
    assert cell.drawn_for(DISCIPLINES["colocated"], 0) == (cell.workload(0), 5)


def test_rules_that_do_not_go_together_are_refused(engines: Engines, workload: Workloads) -> None:
    with pytest.raises(ConfigError, match="by_group: got False"):
        Discipline("", (1,), over_age=OverAge.DROPPED)
    with pytest.raises(ConfigError, match=r"unfinished: got abandoned with etas \(1,\)"):
        Discipline("", (1,), by_group=True, unfinished=Unfinished.ABANDONED)
    with pytest.raises(ConfigError, match="over_age: got waits with by_group"):
        Discipline("", (1,), by_group=True)
    with pytest.raises(ConfigError, match="own_versions: got True; type roles split"):
        replace(DISCIPLINES["dropping"], own_versions=True)
    work = workload([(10, 0.0)])
    with pytest.raises(ConfigError, match="samples, sample_s: got None"):
        Pipeline(work, engines(1), Fifo(), DISCIPLINES["long_rounds"], {(0, 0): GroupWork(1.0, 1.0)}, OPTIONS)

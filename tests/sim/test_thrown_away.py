"""Systems whose groups begin by themselves: over-sampling, long rounds, groups over age, and what throwing away costs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from libra.hardware.host_kv import HostPool
from libra.hardware.virtual_engine import Request, VirtualEngine
from libra.policy import CommittedGroup, Fifo
from libra.policy.turning import TurningRule
from libra.sim import synthetic
from libra.sim.disciplines import DISCIPLINES, OverAge, Unfinished
from libra.sim.gpu_seconds import Cause
from libra.sim.open_groups import OpenGroups
from libra.sim.pipeline import Pipeline
from libra.sim.pipeline_options import PipelineOptions
from libra.sim.repacking_pipeline import RepackingPipeline
from libra.sim.training_gpus import group_work

QUICK = TurningRule(trajectories_per_gpu=2.0, min_gain_s=1.0, to_training_s=0.5, to_rollout_s=0.5)
OPTIONS = PipelineOptions(
    core_gpus=1, update_s=1.0, close_s=0.0, merge_s=0.5, load_s=0.25, rule=QUICK, host=HostPool(10**9, 0.3, 1e-6)
)
BY_GROUP = sorted(name for name, each in DISCIPLINES.items() if each.by_group)


def trained(workload, engines, discipline, sample_s, options):
    """A run in which the gradients of each trajectory take ``sample_s`` GPU-seconds."""
    each_s = {plan[:3]: sample_s for plan in workload.trajectories}
    kept = {place: seconds for place, seconds in each_s.items() if place[2] < (options.samples or 1 << 30)}
    kind = RepackingPipeline if discipline.own_versions else Pipeline
    pipeline = kind(workload, engines, Fifo(), discipline, group_work(kept), options, sample_s=each_s)
    return pipeline, pipeline.train()


def test_groups_over_age_are_dropped_and_others_begin():
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


def test_what_is_abandoned_costs_the_seconds_that_it_took(engines, workload):
    work = workload([(100, 0.0)], [(1000, 0.0)], iterations=3)
    _, found = trained(
        work, engines(4, slots=1), DISCIPLINES["abandoning"], 1.0, replace(OPTIONS, samples=1, num_steps=1)
    )
    short_s = 0.1 + 100 * 0.01015
    assert found.gpu_s[Cause.THROWN_AWAY] == pytest.approx(2 * short_s, rel=0.01)  # two long ones, alone on a GPU each
    assert found.gpu_s[Cause.GENERATING] == pytest.approx(2 * short_s, rel=0.01)
    assert found.gpu_s[Cause.TRAINING] == pytest.approx(2.0)
    assert found.lags == (0, 0)


@given(
    name=st.sampled_from(BY_GROUP), eta=st.integers(0, 2), seed=st.integers(0, 1000), count=st.integers(1, 4),
    slots=st.integers(1, 4), core=st.integers(1, 3), sample_s=st.one_of(st.just(0.0), st.floats(0.01, 30.0)),
)  # fmt: skip
@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_batches_are_full_and_gpu_seconds_add_up(engines, name, eta, seed, count, slots, core, sample_s):
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


def test_a_cancelled_request_leaves_the_seconds_and_the_memory_of_the_others(tables):
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

"""Systems whose groups begin by themselves: over-sampling, long rounds, groups over age, and what throwing away costs."""

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.draws import synthetic
from benchmarks.systems.disciplines import DISCIPLINES, OverAge, Unfinished
from benchmarks.systems.gpu_seconds import Cause
from benchmarks.systems.pipeline import Pipeline
from benchmarks.systems.pipeline_options import PipelineOptions
from benchmarks.systems.repacking_pipeline import RepackingPipeline
from benchmarks.systems.training_gpus import group_work
from libra.hardware.engine_tables import HostPool
from libra.policy import Fifo
from libra.policy.turning import TurningRule

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

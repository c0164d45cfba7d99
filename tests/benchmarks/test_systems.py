"""A training run whose trainer has GPUs, in virtual time: everything trained on once, GPU-seconds
that add up, turns that pay."""

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from synthetic_workload import synthetic

from benchmarks.systems.against import compare
from benchmarks.systems.disciplines import DISCIPLINES, disciplines
from benchmarks.systems.gpu_seconds import Cause
from benchmarks.systems.training_gpus import GroupWork, PipelineOptions, WavePrices
from benchmarks.systems.training_run import Pipeline
from benchmarks.systems.tuning import Cell, lower_bound_s, play, step_s
from libra.errors import ConfigError
from libra.facts import Turned
from libra.hardware.engine_tables import HostPool
from libra.policy import Fifo
from libra.policy.tail import TurningRule
from libra.sim.workload import Trace

QUICK = TurningRule(trajectories_per_gpu=2.0, min_gain_s=1.0, to_training_s=0.5, to_rollout_s=0.5)
OPTIONS = PipelineOptions(core_gpus=1, update_s=1.0, close_s=0.0, merge_s=0.5, load_s=0.0, rule=QUICK)

HOST = HostPool(100_000, 0.01, 1e-6)


def trained(workload, engines, name, group_s, options=OPTIONS):
    """A run in which every group takes ``group_s`` GPU-seconds, half of it its longest sequence."""
    work = {(plan.iteration, plan.group): GroupWork(group_s, group_s / 2) for plan in workload.trajectories}
    pipeline = Pipeline(workload, engines, Fifo(), DISCIPLINES[name], work, options)
    return pipeline, pipeline.train()


def test_a_split_step_is_rollout_then_gradients_then_update(engines, workload):
    two = workload([(100, 0.0)], [(300, 0.0)])
    pipeline, found = trained(two, engines(2, slots=1), "split", 4.0)
    rollout_s = max(pipeline.record.ended_s.values())
    assert found.published_s == pytest.approx([rollout_s + 2 * 4.0 + 1.0])
    assert found.gpu_s[Cause.TRAINING] == pytest.approx(8.0)


def test_in_waves_a_group_waits_for_the_wave_before_and_each_costs_its_own_seconds(engines, workload):
    three = workload([(100, 0.0)], [(200, 0.0)], [(300, 0.0)])
    options = replace(OPTIONS, waves=WavePrices(3, alone_s=0.25))
    pipeline, found = trained(three, engines(3, slots=1), "streaming", 40.0, options)
    first_s, second_s, last_s = sorted(pipeline.record.ended_s.values())
    assert second_s - first_s < last_s - first_s < 40.0
    assert found.published_s == pytest.approx([first_s + 40.25 + 80.25 + 1.0])  # the others are one wave
    whole = replace(options, waves=WavePrices(1, alone_s=0.25))
    assert trained(three, engines(3, slots=1), "streaming", 40.0, whole)[1].published_s == pytest.approx(
        [last_s + 120.25 + 1.0]
    )
    split = trained(three, engines(3, slots=1), "split", 40.0, options)[1]
    assert split.published_s == pytest.approx([last_s + 120.0 + 1.0])


def test_the_thin_end_turns_hands_over_what_it_has_and_returns(engines, workload):
    turns = [[(100, 0.0)], [(100, 0.0)], [(900, 0.0)], [(1000, 0.0)]]
    work = workload(*turns, iterations=2)
    pipeline, found = trained(work, engines(2, slots=2), "turning", 30.0)
    split, still = trained(work, engines(2, slots=2), "streaming", 30.0)
    turned = [turn for turn in found.turns if turn.to is Turned.TRAINING]
    assert turned and any(turn.to is Turned.ROLLOUT for turn in found.turns)
    assert found.published_s[-1] < 0.9 * still.published_s[-1]
    assert len(pipeline.record.ended_s) == len(split.record.ended_s) == 8
    generated = sum(counters.generated_tokens for _, counters in pipeline._all_counters())
    assert generated == sum(plan.new_tokens for plan in work.trajectories)  # nothing was generated twice


@given(
    name=st.sampled_from(
        sorted(
            name
            for name in DISCIPLINES
            if name not in ("turning_oracle", "turning_cmlfq", "paper")
        )
    ),
    eta=st.integers(0, 2), seed=st.integers(0, 1000), count=st.integers(1, 4), slots=st.integers(1, 4),
    core=st.integers(1, 3), group_s=st.one_of(st.just(0.0), st.floats(0.01, 100.0)), per_gpu=st.floats(0.5, 8.0),
    waves=st.sampled_from([None, WavePrices(1), WavePrices(3, 2, 2)]),
)  # fmt: skip
@settings(deadline=None, max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_group_is_trained_on_once_and_gpu_seconds_add_up(
    engines, name, eta, seed, count, slots, core, group_s, per_gpu, waves
):
    discipline = DISCIPLINES[name]
    if eta not in discipline.etas:
        return
    work = synthetic(12, turns=3, seed=seed, iterations=4, group_size=4)
    fleet = engines(count, slots=slots, kv=60_000)
    options = replace(OPTIONS, eta=eta, core_gpus=core, host=HOST, rule=replace(QUICK, trajectories_per_gpu=per_gpu))
    options = replace(options, waves=waves)
    pipeline, found = trained(work, fleet, name, group_s, options)
    assert len(found.published_s) == 4 and len(pipeline.record.ended_s) == 48
    assert list(found.published_s) == sorted(found.published_s)
    assert found.gpu_s[Cause.TRAINING] == pytest.approx(4 * 3 * group_s)
    gpus = count + (core if discipline.core_trainers else 0)
    assert sum(found.gpu_s.values()) == pytest.approx(gpus * found.published_s[-1])
    assert all(seconds >= -1e-6 for seconds in found.gpu_s.values()), found.gpu_s
    assert trained(work, fleet, name, group_s, options)[1] == found


TRACES = tuple(Trace(str(plan.sample), 1000, plan.turns) for plan in synthetic(32, turns=4, seed=3).trajectories)


def test_systems_are_tuned_on_a_seed_that_is_not_scored_and_no_one_beats_the_bound():
    cell, seen = Cell(TRACES, 4, 0.5, 6, 8, 0), dict[str, set[int]]()

    def seconds(system, tried, limit_s):
        seen.setdefault(system, set()).update(seed for _, seed in tried)
        return [step_s(cell, play(cell, DISCIPLINES[system], setting, seed, limit_s)) for setting, seed in tried]

    found = compare(cell, list(disciplines(["colocated", "split", "turning"], 0)), 2, seconds)
    assert seen == {"colocated": {0, 1, 101}, "split": {0, 1, 101}, "turning": {0, 1, 101}}
    assert found.bound_s == (lower_bound_s(cell, 0) + lower_bound_s(cell, 1)) / 2 and all(
        each > lower_bound_s(cell, seed) for one in found.scored for seed, each in enumerate(one.step_s)
    )
    assert found.ours.system == "turning" and found.ratio > 1.0
    knowing = found.scored[-1]._replace(system="turning_oracle", tuning_s=0.0)
    assert found._replace(scored=(*found.scored, knowing)).ours.system == "turning"
    assert len(found.lines()) == 4 and found.static.system in found.lines()[0]
    with pytest.raises(ConfigError, match="yardstick"):
        compare(cell, ["turning"], 2, seconds)


def test_idle_time_has_its_cause(engines, workload):
    two = workload([(100, 7.0), (100, 0.0)], [(1000, 0.0)], iterations=2)
    _, found = trained(two, engines(2, slots=1), "split", 4.0, replace(OPTIONS, load_s=0.25))
    whole_s = found.published_s[-1]
    assert found.gpu_s[Cause.TOOLS] == pytest.approx(2 * 7.0, rel=0.01)
    assert found.gpu_s[Cause.STEP] == pytest.approx(2 * 2 * 8.0)  # two engines wait for the gradients of two groups
    # Both engines and the trainer wait for the weights twice; then the engines load them, with a request to run.
    assert found.gpu_s[Cause.UPDATE] == pytest.approx(2 * 3 * 1.0 + 2 * 0.25)
    assert found.gpu_s[Cause.TRAINING] == pytest.approx(16.0)
    assert found.gpu_s[Cause.ROLES] == found.gpu_s[Cause.AGAIN] == 0.0
    assert sum(found.gpu_frac().values()) == pytest.approx(1.0)
    assert sum(found.gpu_s.values()) == pytest.approx(3 * whole_s)

"""Where worker time went: states by cause from hand-made and arbitrary logs, at once and event by event."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_events import (
    CHECK,
    an_iteration,
    at,
    capacity,
    dispatched,
    ended,
    finished,
    parked,
    published,
    started,
    timeline_of,
    worker_times,
)

from libra import facts
from libra.observe.timeline.states import STATES


def test_each_second_of_an_iteration_has_its_cause():
    times = worker_times(an_iteration(), ("train-0",)).times()
    seconds = {worker.worker: dict(worker.seconds) for worker in times.workers}
    expected = {"starting": 10, "generating": 6, "tools": 3, "dispatch": 1, "grading": 1, "version": 9}
    assert seconds["rollout-0"] == pytest.approx(expected | {"moving": 1.5, "nothing": 8.5})
    assert seconds["train-0"] == pytest.approx(
        {"starting": 9, "nothing": 11, "trajectories": 10, "grading": 1, "batch": 2, "training": 6, "moving": 1}
    )
    assert seconds["tool-0"] == pytest.approx({"starting": 9, "acting": 3, "no_calls": 28})
    assert times.busy_frac == pytest.approx((6 + 1.5 + 6 + 1) / 80)  # the tool worker does not count
    used = {worker.worker: worker.slots_used_frac for worker in times.workers}
    assert used["rollout-0"] == pytest.approx(6 / 80)
    assert used["tool-0"] == pytest.approx(3 / 40)
    assert used["train-0"] is None


def test_a_trainer_trains_in_waves_while_it_waits_for_trajectories():
    log = [
        started(), capacity(0.0, "a", rollout=2), published(0.0, 0),
        at(0.0, facts.VersionServed(0, "a", 0.0)), at(0.0, facts.GateParked(0)), at(0.0, facts.WaveParked(0, 0)),
        at(0.0, facts.WaveParked(0, 1)), at(0.0, facts.OpenGate(0, "")), parked(0.0, 0), parked(0.0, 1),
        dispatched(0.0, 0, "a"), dispatched(0.0, 1, "a"), finished(4.0, 0, "a", end="answered"),
        ended(4.0, 0), at(4.0, facts.OpenWave(0, 0, ((0, 0),), "")),
        at(7.0, facts.WaveTrained(0, 0, 1, 1, 3.0)), finished(10.0, 1, "a", end="answered"),
        ended(10.0, 1), at(10.0, facts.OpenWave(0, 1, ((0, 1),), "")),
        at(10.0, facts.BatchParked(0)), at(10.0, facts.OpenBatch(0, ((0, 0), (0, 1)), "")),
        at(12.0, facts.WaveTrained(0, 1, 1, 0, 2.0)), at(13.0, facts.StepFinished(0, 0.5, 6.0)),
        published(13.0, 1),
    ]  # fmt: skip
    by_name = {worker.worker: worker.seconds for worker in worker_times(log, ("train-0",)).times().workers}
    assert by_name["train-0"] == pytest.approx({"training": 3 + 3, "trajectories": 4 + 3})
    assert by_name["a"] == pytest.approx({"generating": 10, "version": 3})


def a_turn():
    """Engine a turns to training, trains in one wave, and returns; engine b has the tail. Round numbers."""
    change = {"a": {"role": "train", "tp": 1}}
    return [
        started(), capacity(0.0, "a", rollout=2), capacity(0.0, "b", rollout=2), published(0.0, 0),
        at(0.0, facts.VersionServed(0, "a", 0.0)), at(0.0, facts.VersionServed(0, "b", 0.0)),
        at(0.0, facts.WaveParked(0, 0)), at(0.0, facts.WaveParked(0, 1)), parked(0.0, 0), parked(0.0, 1),
        dispatched(0.0, 0, "a"), dispatched(0.0, 1, "b"),
        at(2.0, facts.Turn("a", "training", "why")), at(2.0, facts.RoleChangeStarted(1, change, "", None)),
        at(2.0, facts.WorkerWithdrawn("a")), finished(4.0, 0, "a", end="answered"),
        ended(4.0, 0), at(5.0, facts.OpenWave(0, 0, ((0, 0),), "")),
        at(9.0, facts.RoleChanged("a", 1, "rollout", "train", 1, 1, {}, 7.0)), at(9.5, facts.RoleStage("a", 1, "state", 0.5)),
        at(10.0, facts.WaveTrained(0, 0, 1, 1, 4.0)), finished(12.0, 1, "b", end="answered"),
        ended(12.0, 1), at(12.0, facts.OpenWave(0, 1, ((0, 1),), "")),
        at(12.0, facts.BatchParked(0)), at(12.0, facts.OpenBatch(0, ((0, 0), (0, 1)), "")),
        at(18.0, facts.WaveTrained(0, 1, 1, 0, 5.0, 1)), at(19.0, facts.StepFinished(0, 0.5, 9.0)),
        published(20.0, 1), at(21.0, facts.Turn("a", "rollout", "why")),
        at(21.0, facts.RoleChangeStarted(2, {"a": {"role": "rollout", "tp": 1}}, "", None)),
        at(24.0, facts.RoleChanged("a", 2, "train", "rollout", 1, 1, {}, 3.0)), capacity(24.0, "a", rollout=2),
        at(25.0, facts.IterationFinished(0, 0.5, 0.0)),
    ]  # fmt: skip


def test_the_change_of_an_engine_that_turns_its_waves_and_its_return_are_causes_of_their_own():
    times = worker_times(a_turn(), ("train-0",))
    by_name = {worker.worker: worker.seconds for worker in times.times().workers}
    # What ran when it turned went on until 4; it came too late for the first wave.
    turned = {"generating": 4, "turning": 5, "wave": 4 + 3, "turned": 5, "returning": 3, "nothing": 1}
    core = {"trajectories": 5 + 2, "batch": 1 + 1, "training": 4 + 5 + 1, "moving": 1, "nothing": 5}
    assert by_name["a"] == pytest.approx(turned) and by_name["train-0"] == pytest.approx(core)
    assert times.training_split(9.0, 20.0) == pytest.approx({"trajectories": 2, "batch": 1, "training": 7, "moving": 1})


def test_a_worker_in_an_open_wave_trains_before_its_end_is_known():
    during = [event for event in a_turn() if event.t_s <= 12.0]
    assert worker_times(during, ("train-0",)).states() == {"a": "turned", "b": "version", "train-0": "training"}


def test_an_engine_is_idle_because_the_last_trajectories_are_on_another_one():
    log = [
        started(), capacity(0.0, "a", rollout=1), capacity(0.0, "b", rollout=1), published(0.0, 0),
        at(0.0, facts.VersionServed(0, "a", 0.0)), at(0.0, facts.VersionServed(0, "b", 0.0)),
        parked(0.0, 0), dispatched(0.0, 0, "a"), finished(8.0, 0, "a", end="answered"),
        ended(8.0, 0),
    ]  # fmt: skip
    by_name = {worker.worker: worker.seconds for worker in worker_times(log).times().workers}
    assert by_name["a"] == pytest.approx({"generating": 8})
    assert by_name["b"] == pytest.approx({"tail": 8})


def test_time_of_absence_and_between_two_starts_counts_nowhere():
    log = [
        *an_iteration(), at(41.0, facts.WorkerWithdrawn("rollout-0")), capacity(47.0, "rollout-0", rollout=2),
        started(0.0, epoch=1), capacity(5.0, "rollout-0", rollout=2), published(6.0, 1),
    ]  # fmt: skip
    times = worker_times(log, ("train-0",))
    by_name = {worker.worker: worker for worker in times.times().workers}
    assert times.now_s == pytest.approx(53.0)
    assert by_name["rollout-0"].total_s == pytest.approx(41 + 1)  # away from 41 to 47, and until it is there again
    assert by_name["train-0"].total_s == pytest.approx(53.0)


def test_a_lent_worker_needs_no_gpu_of_its_own():
    log = [
        started(), capacity(0.0, "a", rollout=1), capacity(0.0, "b", rollout=1),
        at(10.0, facts.RoleChanged("b", 1, "rollout", "lent", 1, 1, {}, 1.0)),
        at(10.0, facts.RoleChanged("a", 1, "rollout", "rollout", 1, 2, {}, 1.0)),
        published(20.0, 0),
    ]  # fmt: skip
    times = worker_times(log).times()
    by_name = {worker.worker: worker for worker in times.workers}
    assert by_name["b"].seconds["lent"] == pytest.approx(10)
    assert sum(by_name["b"].gpu_s.values()) == pytest.approx(10)
    assert sum(by_name["a"].gpu_s.values()) == pytest.approx(10 + 2 * 10)


WORKERS = st.sampled_from(["a", "b", "c"])
KEYS = st.integers(0, 3)
PHASES = st.sampled_from(["ROLLOUT", "TOOL"])
NUMBERS = st.integers(0, 3)
SECONDS = st.floats(0, 5)
STEPS = st.one_of(
    st.builds(lambda k, p: lambda t: parked(t, k, p), KEYS, PHASES),
    st.builds(lambda k, w, p: lambda t: dispatched(t, k, w, p), KEYS, WORKERS, PHASES),
    st.builds(lambda k, w, p: lambda t: finished(t, k, w, p), KEYS, WORKERS, PHASES),
    st.builds(lambda k: lambda t: ended(t, k), KEYS),
    st.builds(lambda w, r, n: lambda t: capacity(t, w, r, n), WORKERS, NUMBERS, NUMBERS),
    st.builds(lambda w: lambda t: at(t, facts.WorkerWithdrawn(w)), WORKERS),
    st.builds(lambda w: lambda t: at(t, facts.WorkerJoined(w, "tcp://h:1")), WORKERS),
    st.builds(lambda w: lambda t: at(t, facts.WorkerLost("tcp://h:1", w)), WORKERS),
    st.builds(lambda n: lambda t: published(t, n), NUMBERS),
    st.builds(lambda w, n, s: lambda t: at(t, facts.VersionServed(n, w, s)), WORKERS, NUMBERS, SECONDS),
    st.builds(lambda w, s: lambda t: at(t, facts.VersionChecked(0, w, **CHECK, stopped_s=s)), WORKERS, SECONDS),
    st.builds(lambda n: lambda t: at(t, facts.GateParked(n)), NUMBERS),
    st.builds(lambda n: lambda t: at(t, facts.OpenGate(n, "")), NUMBERS),
    st.builds(lambda n: lambda t: at(t, facts.BatchParked(n)), NUMBERS),
    st.builds(lambda n: lambda t: at(t, facts.OpenBatch(n, (), "")), NUMBERS),
    st.builds(lambda n, s: lambda t: at(t, facts.StepFinished(n, 0.0, s)), NUMBERS, SECONDS),
    st.builds(lambda w: lambda t: at(t, facts.GangFormed(1, (w,), 0)), WORKERS),
    st.builds(lambda w: lambda t: at(t, facts.GangLost(1, w, "")), WORKERS),
    st.builds(
        lambda w, r: lambda t: at(t, facts.RoleChangeStarted(1, {w: {"role": r}}, "", None)),
        WORKERS, st.sampled_from(["rollout", "train"]),
    ),
    st.builds(lambda w, r: lambda t: at(t, facts.Turn(w, r, "")), WORKERS, st.sampled_from(["rollout", "training"])),
    st.builds(lambda w: lambda t: at(t, facts.TurnRefused(w, "")), WORKERS),
    st.builds(lambda w: lambda t: at(t, facts.RoleStage(w, 1, "state", 0.0)), WORKERS),
    st.builds(lambda: lambda t: at(t, facts.RoleChangeFailed(1, ""))),
    st.builds(lambda n, k: lambda t: at(t, facts.OpenWave(n, k, ((n, 0),), "")), NUMBERS, NUMBERS),
    st.builds(
        lambda n, k, h, s: lambda t: at(t, facts.WaveTrained(n, k, 1, 0, s, h)), NUMBERS, NUMBERS, NUMBERS, SECONDS
    ),
    st.builds(
        lambda w, r, n: lambda t: at(t, facts.RoleChanged(w, 1, "rollout", r, 1, n + 1, {}, 1.0)),
        WORKERS, st.sampled_from(["rollout", "train", "lent"]), NUMBERS,
    ),
    st.builds(lambda: lambda t: started(t)),
)  # fmt: skip


@given(st.lists(st.tuples(st.floats(0, 3), STEPS), max_size=60))
def test_shares_sum_to_one_and_folding_or_stopping_midway_changes_nothing(steps):
    log, t_s = [started()], 0.0
    for elapsed, make in steps:
        event = make(t_s + elapsed)
        t_s = 0.0 if isinstance(event, facts.RunStarted) else t_s + elapsed
        log.append(event if t_s else started())
    whole, folded = worker_times(log, ("c",)), timeline_of(log, ("c",), keep=2).workers
    for worker, other in zip(whole.times().workers, folded.times().workers, strict=True):
        if worker.total_s > 0:
            assert sum(worker.shares.values()) == pytest.approx(1.0)
            assert set(worker.shares) <= STATES.keys()
        assert all(value >= 0 for value in (*worker.seconds.values(), *worker.gpu_s.values()))
        assert worker.slots_used_frac is None or 0 <= worker.slots_used_frac <= 1
        assert other.total_s == pytest.approx(worker.total_s)
        assert other.slots_used_frac == worker.slots_used_frac
    for name, found in whole.segments().items():
        assert all(before[1] <= after[0] + 1e-9 for before, after in itertools.pairwise(found)), name
        assert all(0 <= start < stop <= whole.now_s + 1e-9 for start, stop, _ in found)
    shares = whole.times().shares
    assert not shares or sum(shares.values()) == pytest.approx(1.0)

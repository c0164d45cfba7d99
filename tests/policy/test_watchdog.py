"""When a run counts as stalled, and who is to blame."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from libra.policy.stall import Picture, RunningTask, Waiting, Watchdog

SLOT = Waiting("trajectory-train-0-0-0-e0-demo", "a slot of ROLLOUT", "ROLLOUT")


def running(key: str, since_s: float, stage: str = "trajectory, TOOL") -> RunningTask:
    return RunningTask(key, stage, "tool-0", "tcp://127.0.0.1:1", since_s)


def picture(*tasks: RunningTask | Waiting, **supply: float) -> Picture:
    return Picture(
        tuple(task for task in tasks if isinstance(task, RunningTask)),
        tuple(task for task in tasks if isinstance(task, Waiting)),
        supply,
    )


def not_looked() -> Picture:
    raise AssertionError("nothing was due, so nobody had to look")


def test_nobody_looks_before_the_time_is_up() -> None:
    watchdog = Watchdog(10.0, 0.0)
    assert watchdog.check(9.9, not_looked) is None
    watchdog.progressed(9.9)
    assert watchdog.check(19.8, not_looked) is None


def test_the_culprit_gave_no_sign_the_longest() -> None:
    watchdog = Watchdog(10.0, 0.0)
    watchdog.progressed(5.0)
    tasks = (running("b", 4.0), running("a", 3.0), running("c", 4.5), SLOT)
    stall = watchdog.check(15.0, lambda: picture(*tasks))
    assert stall is not None and stall.culprit is tasks[1]
    assert (stall.idle_s, stall.held_s, stall.waiting) == (10.0, 12.0, 1)
    assert "a (trajectory, TOOL) has been on worker tool-0 at tcp://127.0.0.1:1 for 12 s" in stall.detail
    assert "2 others run, 1 are parked" in stall.detail


def test_a_stall_is_told_again_after_as_long_again_and_not_before() -> None:
    watchdog = Watchdog(10.0, 0.0)
    look = lambda: picture(running("a", 0.0))  # noqa: E731
    told = [t_s for t_s in range(60) if watchdog.check(float(t_s), look) is not None]
    assert told == [10, 20, 30, 40, 50]
    assert watchdog.check(60.0, look).idle_s == 60.0  # type: ignore[union-attr]
    assert not watchdog.moved_since(50.0)
    watchdog.progressed(61.0)
    assert watchdog.moved_since(60.0)
    assert watchdog.check(70.9, not_looked) is None


def test_what_was_done_about_a_stall_gets_as_long_again() -> None:
    watchdog = Watchdog(10.0, 0.0)
    assert watchdog.check(10.0, lambda: picture(running("a", 0.0))) is not None
    watchdog.granted(14.0)
    assert watchdog.check(23.9, not_looked) is None
    stall = watchdog.check(24.0, lambda: picture(running("a", 0.0)))
    assert stall is not None and stall.idle_s == 24.0


def test_where_nothing_runs_the_missing_resource_is_named() -> None:
    gate = Waiting("gate-train-3-e0-demo", "version 3 (published is 2)", "")
    stall = Watchdog(10.0, 0.0).check(10.0, lambda: picture(SLOT, SLOT, gate, TOOL=4))
    assert stall is not None and stall.culprit is None
    assert (stall.missing, stall.waiting) == (("ROLLOUT",), 3)
    assert stall.detail == (
        "nothing runs, 3 are parked, waiting: 2 for a slot of ROLLOUT, which no worker declares; 1 for version 3 (published is 2)"
    )
    declared = Watchdog(10.0, 0.0).check(10.0, lambda: picture(SLOT, ROLLOUT=4))
    assert declared is not None and declared.missing == () and "no worker declares" not in declared.detail


def test_a_run_that_was_asked_for_nothing_is_idle() -> None:
    watchdog = Watchdog(10.0, 0.0)
    assert watchdog.check(50.0, picture) is None
    assert watchdog.check(59.0, not_looked) is None  # idle until 50, so not yet due
    assert watchdog.check(60.0, lambda: picture(SLOT)) is not None


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.floats(0.0, 7.0)), max_size=60))
def test_a_stall_is_never_told_within_the_timeout_of_an_edge(steps: list[tuple[bool, float]]) -> None:
    watchdog, t_s, edge_s, told_s = Watchdog(10.0, 0.0), 0.0, 0.0, 0.0
    for moves, passed_s in steps:
        t_s += passed_s
        if moves:
            watchdog.progressed(t_s)
            edge_s = told_s = t_s
        stall = watchdog.check(t_s, lambda: picture(running("a", 0.0)))
        assert (stall is not None) == (t_s - told_s >= 10.0)
        if stall is not None:
            assert stall.idle_s == t_s - edge_s
            told_s = t_s

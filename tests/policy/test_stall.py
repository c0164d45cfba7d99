"""When a run counts as stalled, and who is to blame."""

from hypothesis import given
from hypothesis import strategies as st

from libra.policy.stall import FLOOR_S, START_S, Limits, Picture, RunningTask, Waiting, Watchdog

SLOT = Waiting("trajectory-train-0-0-0-e0-demo", "a slot of ROLLOUT", "ROLLOUT")


def running(key, since_s, stage="trajectory, TOOL"):
    return RunningTask(key, stage, "tool-0", "tcp://127.0.0.1:1", since_s)


def picture(*tasks, **supply):
    return Picture(
        tuple(task for task in tasks if isinstance(task, RunningTask)),
        tuple(task for task in tasks if isinstance(task, Waiting)),
        supply,
    )


def not_looked():
    raise AssertionError("nothing was due, so nobody had to look")


def test_the_culprit_gave_no_sign_the_longest():
    watchdog = Watchdog(Limits(fixed_s=10.0), 0.0)
    watchdog.progressed(5.0)
    tasks = (running("b", 4.0), running("a", 3.0), running("c", 4.5), SLOT)
    stall = watchdog.check(15.0, lambda: picture(*tasks))
    assert stall is not None and stall.culprit is tasks[1]
    assert (stall.idle_s, stall.held_s, stall.waiting) == (10.0, 12.0, 1)
    assert "tool-0 at tcp://127.0.0.1:1" in stall.detail


def test_what_was_done_about_a_stall_gets_as_long_again():
    watchdog = Watchdog(Limits(fixed_s=10.0), 0.0)
    assert watchdog.check(10.0, lambda: picture(running("a", 0.0))) is not None
    watchdog.granted(14.0)
    assert watchdog.check(23.9, not_looked) is None
    stall = watchdog.check(24.0, lambda: picture(running("a", 0.0)))
    assert stall is not None and stall.idle_s == 24.0


def test_where_nothing_runs_the_missing_resource_is_named():
    gate = Waiting("gate-train-3-e0-demo", "version 3 (published is 2)", "")
    stall = Watchdog(Limits(fixed_s=10.0), 0.0).check(10.0, lambda: picture(SLOT, SLOT, gate, TOOL=4))
    assert stall is not None and stall.culprit is None
    assert (stall.missing, stall.waiting) == (("ROLLOUT",), 3)
    assert "2 for a slot of ROLLOUT" in stall.detail and "1 for version 3 (published is 2)" in stall.detail
    declared = Watchdog(Limits(fixed_s=10.0), 0.0).check(10.0, lambda: picture(SLOT, ROLLOUT=4))
    assert declared is not None and declared.missing == ()


def test_a_run_that_was_asked_for_nothing_is_idle():
    watchdog = Watchdog(Limits(fixed_s=10.0), 0.0)
    assert watchdog.check(50.0, picture) is None
    assert watchdog.check(59.0, not_looked) is None  # idle until 50, so not yet due
    assert watchdog.check(60.0, lambda: picture(SLOT)) is not None


@given(st.lists(st.tuples(st.booleans(), st.floats(0.0, 7.0)), max_size=60))
def test_a_stall_is_never_told_within_the_timeout_of_an_edge(steps):
    watchdog, t_s, edge_s, told_s = Watchdog(Limits(fixed_s=10.0), 0.0), 0.0, 0.0, 0.0
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


def measured(**seconds):
    lengths = Limits({"tool": 90.0})
    for kind, length_s in seconds.items():
        for _ in range(100):
            lengths.took(kind, length_s)
    return lengths


def test_a_limit_follows_what_tasks_of_its_kind_take_above_a_floor():
    lengths = measured(step=20.0, generate=0.5, tool=1.0)
    assert [lengths.limit_s(kind) for kind in ("step", "generate", "tool", "batch")] == [200.0, FLOOR_S, 90.0, START_S]
    assert lengths.longest_s() == 200.0 and Limits().longest_s() == START_S
    for _ in range(4):  # of 104: too few to matter
        lengths.took("step", 1000.0)
    assert lengths.limit_s("step") == 200.0
    for _ in range(200):
        lengths.took("step", 40.0)
    assert lengths.limit_s("step") == 400.0
    lengths.took("batch", 1.0)
    assert lengths.limit_s("batch") == START_S  # the first ones load and connect


def test_what_takes_its_usual_time_is_no_stall_and_what_exceeds_it_most_is_to_blame():
    watchdog = Watchdog(measured(step=20.0, generate=0.5), 0.0)
    step, generation = running("step", 0.0, "step"), running("generation", 10.0, "generate")
    assert watchdog.check(59.0, not_looked) is None
    assert watchdog.check(150.0, lambda: picture(step)) is None
    stall = watchdog.check(150.0, lambda: picture(step, generation))
    assert stall is not None and stall.culprit == generation and "limit 60 s" in stall.detail
    assert watchdog.check(205.0, not_looked) is None  # it was reported; its limit passes anew
    watchdog.progressed(205.0)
    stall = watchdog.check(270.0, lambda: picture(step))
    assert stall is not None and stall.culprit == step  # 60 s without progress of anybody, and it is past its limit
    assert watchdog.check(469.0, lambda: picture(step)) is None
    assert watchdog.check(470.0, lambda: picture(step)) is not None

"""Slots of an engine are changed in mid-run: nothing is restarted or lost, and no more run at once than may."""

import pytest
from whole_run import WIDE, events_of, kill, named

from libra.cli.replay import replay_run
from libra.cluster.connection import present_workers
from libra.driver.run_session import Session
from libra.errors import ClusterError


def most_at_once(events, worker):
    """Generations that one engine ran at once at most."""
    running = set()
    most = 0
    for event in events:
        name = event["name"]
        began = name == "quantum_continued" or (name == "quantum_dispatched" and event["phase"] == "ROLLOUT")
        if began and event["worker"] == worker:
            running.add(event["key"])
        elif name in ("quantum_finished", "quantum_lost", "quantum_given_back", "trajectory_ended"):
            running.discard(event["key"])
        most = max(most, len(running))
    return most


def test_limits_of_slots_hold_at_once_and_outlive_a_change_of_roles_and_a_death(make_config, client_wide, until):
    def supplied(name, slots):
        return lambda it: [ws.resources.get("ROLLOUT") for ws in it.workers.values() if ws.name == name] == [slots]

    trainer = {"prompts": 4, "group_size": 4}
    config = make_config(run={"iterations": 6}, trainer=trainer, cluster=WIDE, checkpoint={"every": 1})
    with Session(config, client=client_wide) as session:

        def supplies():
            return {row["worker"]: row["supplies"] for row in session.scheduler.engines()}

        iterations = session.iterations()
        next(iterations)
        for wrong in ({"rollout-0": 2, "rollout-1": 9}, {"tool-0": 1}):
            with pytest.raises(ClusterError):
                session.scheduler.limit_slots(wrong)
        assert supplies() == {"rollout-0": 8, "rollout-1": 8}
        session.scheduler.limit_slots({"rollout-0": 1, "rollout-1": 2}, "a test")
        assert supplies() == {"rollout-0": 1, "rollout-1": 2}
        next(iterations)
        assert session.scheduler.wait_for_roles(session.scheduler.change_roles({"rollout-0": "train"}))
        until(client_wide.cluster, supplied("rollout-0", 0))
        session.scheduler.limit_slots({"rollout-0": 3})  # for when it generates again
        until(client_wide.cluster, supplied("rollout-0", 0))
        next(iterations)
        assert session.scheduler.wait_for_roles(session.scheduler.change_roles({"rollout-0": "rollout"}))
        until(client_wide.cluster, supplied("rollout-0", 3))
        killed = kill(client_wide, "rollout-1", until)
        until(client_wide.cluster, supplied("rollout-1", 2))
        list(iterations)
    events = events_of(session.directory)
    marks = [n for n, event in enumerate(events) if event["name"] == "slots_set"]
    assert [(events[n]["worker"], events[n]["slots"], events[n]["of_slots"], events[n]["reason"]) for n in marks] == [
        ("rollout-0", 1, 8, "a test"), ("rollout-1", 2, 8, "a test"), ("rollout-0", 3, 8, "requested"),
    ]  # fmt: skip
    first, limited = events[: marks[0]], events[marks[1] : marks[2]]
    assert most_at_once(first, "rollout-0") > 1 and most_at_once(first, "rollout-1") > 2
    assert (most_at_once(limited, "rollout-0"), most_at_once(limited, "rollout-1")) == (1, 2)
    lost = next(n for n, event in enumerate(events) if event["name"] == "worker_lost")
    assert {event["address"] for event in named(events, "quantum_lost")} <= {killed}
    assert most_at_once(events[lost:], "rollout-0") <= 3 and most_at_once(events[lost:], "rollout-1") <= 2
    assert replay_run(session.directory, from_snapshot=False, keys=(), decisions=(), as_json=True)
    found = {worker["name"]: worker["resources"].get("ROLLOUT") for worker in present_workers(client_wide).values()}
    assert (found["rollout-0"], found["rollout-1"]) == (8, 8), "the next run has what the workers were started with"

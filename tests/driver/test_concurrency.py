"""Slots of an engine are changed in mid-run: nothing is restarted, nothing lost, and no more run at once than may."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from distributed import Client, Scheduler

from libra.cli.replay import replay_run
from libra.cluster.local import local_cluster
from libra.cluster.present_workers import present_workers
from libra.config import RunConfig, config_from_dict
from libra.driver.session import Session
from libra.errors import ClusterError
from libra.store.event_log import read_events

pytestmark = pytest.mark.timeout(600)

Config = Callable[..., RunConfig]


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    """A client of rollout-0, which can change roles, rollout-1, tool-0 and train-0."""
    cluster = {"rollout_workers": 2, "hybrid_workers": 1, "threads": 1, "dashboard_port": 0}
    config = config_from_dict({"cluster": cluster, "rollout": {"slots": 4}})
    with local_cluster(config) as started, Client(started) as connected:
        yield connected


def events_of(session: Session) -> list[dict[str, Any]]:
    return list(read_events(session.directory / "events.jsonl").events)


def most_at_once(events: list[dict[str, Any]], worker: str) -> int:
    """Generations that one engine ran at once at most, from the log."""
    running: set[str] = set()
    most = 0
    for event in events:
        began = event["name"] == "quantum_continued" or (
            event["name"] == "quantum_dispatched" and event["phase"] == "ROLLOUT"
        )
        if began and event["worker"] == worker:
            running.add(event["key"])
        elif event["name"] in ("quantum_finished", "quantum_lost", "quantum_given_back"):
            running.discard(event["key"])
        most = max(most, len(running))
    return most


def test_engines_use_as_many_slots_as_they_are_told_to(make_config: Config, client: Client) -> None:
    config = make_config(
        run={"iterations": 4},
        trainer={"prompts": 4, "group_size": 4},
        cluster={"hybrid_workers": 1},
        rollout={"slots": 4},
    )
    with Session(config, client=client) as session:
        iterations = session.iterations()
        next(iterations)
        with pytest.raises(ClusterError, match=r"rollout-1: 5 slots, its engine \(TP 1\) was started with 4"):
            session.engines.limit_slots({"rollout-0": 2, "rollout-1": 5})
        with pytest.raises(ClusterError, match=r"tool-0 has no engine .* rollout-0, rollout-1"):
            session.engines.limit_slots({"tool-0": 1})
        assert {row["worker"]: row["supplies"] for row in session.engines.rows()} == {"rollout-0": 4, "rollout-1": 4}
        session.engines.limit_slots({"rollout-0": 1, "rollout-1": 2}, "a test")
        assert {row["worker"]: row["supplies"] for row in session.engines.rows()} == {"rollout-0": 1, "rollout-1": 2}
        next(iterations)
        next(iterations)
        session.engines.limit_slots({"rollout-1": 4})
        next(iterations)
    events = events_of(session)
    marks = [n for n, event in enumerate(events) if event["name"] == "slots_set"]
    assert [(events[n]["worker"], events[n]["slots"], events[n]["of_slots"], events[n]["reason"]) for n in marks] == [
        ("rollout-0", 1, 4, "a test"), ("rollout-1", 2, 4, "a test"), ("rollout-1", 4, 4, "requested"),
    ]  # fmt: skip
    first, limited, last = events[: marks[0]], events[marks[1] : marks[2]], events[marks[2] :]
    assert most_at_once(first, "rollout-0") > 1 and most_at_once(first, "rollout-1") > 2
    assert most_at_once(limited, "rollout-0") == 1 and most_at_once(limited, "rollout-1") == 2
    assert most_at_once(last, "rollout-0") == 1 and most_at_once(last, "rollout-1") > 2
    assert not [event for event in events if event["name"] in ("quantum_lost", "quantum_given_back", "worker_lost")]
    assert replay_run(session.directory, from_snapshot=False, keys=(), decisions=(), as_json=True)
    workers = present_workers(client).values()
    supply = {worker["name"]: worker["resources"].get("ROLLOUT") for worker in workers}
    assert (supply["rollout-0"], supply["rollout-1"]) == (4, 4), "the next run finds what the workers were started with"


def test_a_limit_outlives_a_change_of_roles_and_the_death_of_a_worker(
    make_config: Config, client: Client, until: Callable[..., None]
) -> None:
    config = make_config(
        run={"iterations": 5}, cluster={"hybrid_workers": 1}, rollout={"slots": 4}, checkpoint={"every": 1}
    )

    def supplied(name: str, slots: int) -> Callable[[Scheduler], bool]:
        def there(scheduler: Scheduler) -> bool:
            found = [ws for ws in scheduler.workers.values() if ws.name == name and ws.address not in gone]
            return [ws.resources.get("ROLLOUT") for ws in found] == [slots]

        return there

    gone: set[str] = set()
    with Session(config, client=client) as session:
        iterations = session.iterations()
        next(iterations)
        session.engines.limit_slots({"rollout-0": 3, "rollout-1": 2})
        assert session.roles.wait(session.roles.change({"rollout-0": "train"}))
        until(client.cluster, supplied("rollout-0", 0))
        session.engines.limit_slots({"rollout-0": 1})  # it holds for when it generates again
        until(client.cluster, supplied("rollout-0", 0))
        next(iterations)
        assert session.roles.wait(session.roles.change({"rollout-0": "rollout"}))
        until(client.cluster, supplied("rollout-0", 1))
        next(iterations)
        for name, slots in (("rollout-1", 2), ("rollout-0", 1)):
            where = next(row["address"] for row in session.engines.rows() if row["worker"] == name)
            ((pid),) = client.run(os.getpid, workers=[where]).values()
            os.kill(pid, signal.SIGKILL)
            gone.add(where)
            until(client.cluster, supplied(name, slots))
            next(iterations)
    events = events_of(session)
    told = [(event["worker"], event["rollout_slots"]) for event in events if event["name"] == "worker_capacity"]
    assert told[-1] == ("rollout-0", 1)
    after = next(n for n, event in enumerate(events) if event["name"] == "worker_lost")
    assert most_at_once(events[after:], "rollout-0") == 1

"""Workers that change roles while a run goes on, with real processes: nothing is lost, nothing runs twice, nobody waits for a joiner."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import zarr

from libra.config import RunConfig
from libra.graph.driver import Session
from libra.store.event_log import read_events

pytestmark = pytest.mark.timeout(300)

Config = Callable[..., RunConfig]

CLUSTER = {"rollout_workers": 2, "hybrid_workers": 1, "threads": 1, "dashboard_port": 0}


def events(session: Session, *names: str) -> list[dict[str, Any]]:
    return [event for event in read_events(session.directory / "events.jsonl").events if event["name"] in names]


def each_trajectory_once(session: Session, iterations: int) -> None:
    """Every trajectory is in the store once, and each of its quanta was committed once."""
    columns = zarr.open_group(session.directory / "trajectories.zarr", mode="r")["trajectory"]
    ids = list(zip(*(columns[name][:].tolist() for name in ("iteration", "group", "sample")), strict=True))
    assert sorted(ids) == [(k, g, s) for k in range(iterations) for g in (0, 1) for s in (0, 1)]
    done = Counter((event["key"], event["quantum"]) for event in events(session, "quantum_finished"))
    assert set(done.values()) == {1}
    assert not events(session, "failure_classified")


def test_a_worker_trains_for_a_while_and_generates_again(make_config: Config) -> None:
    config = make_config(run={"iterations": 6}, cluster=CLUSTER)
    with Session(config) as session:
        iterations = session.iterations()
        rows = [next(iterations)]
        there = session.roles.change({"rollout-0": "train"})
        assert session.roles.wait(there)
        rows += [next(iterations) for _ in range(3)]
        assert session.roles.rows()[0]["role"] == "train"
        back = session.roles.change({"rollout-0": "rollout"})
        assert session.roles.wait(back)
        rows += iterations
    assert max(row["hybrids"] for row in rows[1:4]) == 1
    assert rows[0]["hybrids"] == rows[-1]["hybrids"] == 0
    assert all(row["hybrids_lost"] == 0 for row in rows)
    # A step that gave the joiner no slice never looked at it: it waited for nothing.
    assert all(row["hybrid_wait_s"] == 0 for row in rows if row["hybrids"] == 0)
    each_trajectory_once(session, 6)
    changed = events(session, "role_changed")
    assert [(e["worker"], e["generation"], e["from_role"], e["to_role"]) for e in changed] == [
        ("rollout-0", there, "rollout", "train"),
        ("rollout-0", back, "train", "rollout"),
    ]
    assert all(set(e["stage_s"]) == {"draining", "sleeping", "taking_up"} for e in changed)
    stages = [(e["generation"], e["stage"]) for e in events(session, "role_stage") if e["stage"] != "state"]
    assert stages == [(g, stage) for g in (there, back) for stage in ("draining", "sleeping", "taking_up")]
    given = [e["worker"] for e in events(session, "quantum_dispatched") if e["t_s"] > changed[1]["t_s"]]
    assert "rollout-0" in given

"""``staleness.versions=one``, live: every trajectory has one version, also when its engine is killed or must serve another."""

import os
from collections import Counter

import pytest
from whole_run import WIDE, events_of, kill, named

from libra import events
from libra.driver.session import Session
from libra.events import from_dict
from libra.observe.invariants import check_invariants
from libra.policy import LoadVersion, Vacate
from libra.policy.log_replay import replay
from libra.store.event_log import EventReader
from libra.store.trajectories import TrajectoryStore
from libra.store.trajectory_journal import Journal
from libra.weights import WeightStore

pytestmark = pytest.mark.timeout(300)


def mixed(directory):
    """Trajectories with tokens of several versions."""
    store = TrajectoryStore.open(directory / "trajectories.zarr")
    every = (store.trajectory(index) for index in range(store.num_trajectories))
    return sum(len(set(t.weight_version[t.is_action].tolist())) > 1 for t in every)


def restarts(directory):
    """Trajectories that began again, of a run that keeps its journals."""
    names = {path.name.split(".")[0] for path in (directory / "journal").glob("*.rec")}
    return sum(r["kind"] == "restart" for name in names for r in Journal(directory / "journal").read(name))


def test_a_trajectory_keeps_the_weights_that_it_began_with_also_when_its_engine_is_killed(make_config, client, until):
    config = make_config(
        run={"iterations": 5, "eta": 2}, staleness={"versions": "one"}, rollout={"max_turns": 6, "max_new_tokens": 8},
        trainer={"prompts": 3}, store={"keep_journals": True},
    )  # fmt: skip
    with Session(config, client=client) as session:
        iterations = session.iterations()
        rows = [next(iterations)]
        kill(client, "rollout-0", until)
        rows += iterations
        directory = session.directory
    assert len(rows) == 5 and max(row["lag_max"] for row in rows) <= 2 and mixed(directory) == 0
    assert {promise.verdict for promise in check_invariants(directory)} == {"holds"}
    loads = [event["version"] for event in named(events_of(directory), "version_served")]
    assert max(loads) >= 3 and loads == sorted(loads)


def test_versions_share_the_engines_out_by_rounding_and_stay_while_they_are_used(make_config, client_wide, tmp_path):
    """Both engines have a trajectory of version 0 in an action; one of them gives it to the other, and takes newer weights."""
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    config = make_config(
        run={"iterations": 5, "eta": 2}, staleness={"versions": "one", "engines": "rounded"},
        environment={"name": "held_tool:Held", "args": {"gate": str(gate), "held": "train-0-0-"}},
        trainer={"old_logp": "version", "correction": "truncate"}, rollout={"max_new_tokens": 8},
        cluster=WIDE | {"hybrid_workers": 0}, checkpoint={"every": 1}, store={"keep_journals": True,
        "keep_versions": 1},
    )  # fmt: skip
    with Session(config, client=client_wide) as session:
        versions, iterations = WeightStore(session.spec.weights_dir), session.iterations()
        rows = [next(iterations), next(iterations)]
        assert versions.numbers() == [0, 1, 2]  # one is kept for readers, two for tokens
        with gate.open("w"):
            pass
        rows += iterations
        directory = session.directory
    assert rows[2]["lag_max"] == 2 and max(row["lag_max"] for row in rows) == 2
    scored = [row for row in rows if row["forwarded_tokens"]]
    assert len(scored) >= 3 and all(row["exact_old_frac"] == 1.0 for row in scored)
    assert versions.numbers()[-1] == 5 and versions.numbers()[0] >= 1  # and then they go

    log = [(line, from_dict(event)) for line, event in EventReader(directory / "events.jsonl")]
    vacated = [event for _, event in log if isinstance(event, events.EngineVacated)]
    assert any(key.startswith("trajectory-train-0-0-") for event in vacated for key in event.keys)
    ordered = [event for _, event in log if isinstance(event, events.VersionOrdered)]
    assert any(event.worker == vacated[0].worker and event.version >= 1 for event in ordered)
    assert mixed(directory) == restarts(directory) == 0
    told = list(replay(log))
    assert [each.difference for each in told if each.difference] == []
    repeated = Counter(type(command) for each in told for command in each.now)
    assert (repeated[Vacate], repeated[LoadVersion]) == (len(vacated), len(ordered))
    assert not [promise for promise in check_invariants(directory) if promise.verdict == "broken"]

"""``staleness.versions=one``, live: every trajectory has one version, also when the engine of some is killed."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from distributed import Client

from libra import events
from libra.cluster.present_workers import present_workers
from libra.config import RunConfig
from libra.driver.session import Session
from libra.events import from_dict
from libra.observe.invariants import check_invariants
from libra.policy import LoadVersion, Vacate
from libra.policy.log_replay import replay
from libra.store.event_log import EventReader, read_events
from libra.store.trajectories import TrajectoryStore
from libra.store.trajectory_journal import Journal
from libra.weights import WeightStore

Config = Callable[..., RunConfig]
LONG = {"max_turns": 6, "slots": 2, "max_new_tokens": 8}


def mixed(directory: Path) -> int:
    """Trajectories with tokens of several versions."""
    store = TrajectoryStore.open(directory / "trajectories.zarr")
    every = (store.trajectory(index) for index in range(store.num_trajectories))
    return sum(len(set(t.weight_version[t.is_action].tolist())) > 1 for t in every)


def restarts(directory: Path) -> int:
    """Trajectories that began again, of a run that keeps its journals."""
    names = {path.name.split(".")[0] for path in (directory / "journal").glob("*.rec")}
    return sum(r["kind"] == "restart" for name in names for r in Journal(directory / "journal").read(name))


def loads(directory: Path) -> list[int]:
    return [
        event["version"]
        for event in read_events(directory / "events.jsonl").events
        if event["name"] == "version_served"
    ]


@pytest.mark.parametrize("versions", ["one", "many"])
def test_a_trajectory_keeps_the_weights_that_it_began_with(versions: str, make_config: Config, client: Client) -> None:
    config = make_config(
        run={"iterations": 6, "eta": 2}, staleness={"versions": versions}, rollout=LONG, store={"keep_journals": True}
    )
    with Session(config, client=client) as session:
        rows = list(session.iterations())
        directory = session.directory
    assert len(rows) == 6 and max(row["lag_max"] for row in rows) <= 2
    assert (mixed(directory) == 0) == (versions == "one")  # with many, some go on with the next version
    verdicts = {promise.name.split(",")[0]: promise.verdict for promise in check_invariants(directory)}
    assert verdicts.pop("C1") == ("holds" if versions == "one" else "not promised")
    assert set(verdicts.values()) == {"holds"}
    assert restarts(directory) == 0  # engines wait for what is under way
    assert max(loads(directory)) >= 3 and loads(directory) == sorted(loads(directory))


def apart(directory: Path) -> int:
    """The largest difference between the versions that two engines served at once."""
    served: dict[str, int] = {}
    largest = 0
    for event in read_events(directory / "events.jsonl").events:
        if event["name"] == "version_served":
            served[event["worker"]] = event["version"]
            largest = max(largest, max(served.values()) - min(served.values()))
    return largest


@pytest.mark.timeout(300)
def test_versions_that_tokens_are_of_stay_while_they_are_used(make_config: Config, tmp_path: Path) -> None:
    """One engine has a trajectory of version 0 until two more were published; its tokens are scored under version 0 then."""
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    config = make_config(
        run={"iterations": 6, "eta": 2},
        staleness={"versions": "one", "window": 3},
        environment={"name": "held_tool:Held", "args": {"gate": str(gate)}},
        trainer={"old_logp": "version", "correction": "truncate"},
        cluster={"rollout_workers": 2},
        rollout=LONG | {"max_turns": 3},
        checkpoint={"every": 1},
        store={"keep_versions": 1},
    )
    with Session(config) as session:
        versions, iterations = WeightStore(session.spec.weights_dir), session.iterations()
        rows = [next(iterations), next(iterations)]
        assert versions.numbers() == [0, 1, 2]  # one is kept for readers, two for tokens
        with gate.open("w"):
            pass
        rows += iterations
        directory = session.directory
    assert apart(directory) >= 1 and mixed(directory) == 0
    assert rows[2]["lag_max"] == 2 and max(row["lag_max"] for row in rows) == 2
    scored = [row for row in rows if row["forwarded_tokens"]]
    assert len(scored) >= 3 and all(row["exact_old_frac"] == 1.0 for row in scored)
    assert versions.numbers()[-3:] == [4, 5, 6] and versions.numbers()[0] >= 2  # and then they go
    assert not [promise for promise in check_invariants(directory) if promise.verdict == "broken"]


@pytest.mark.timeout(300)
def test_versions_share_the_engines_out_by_rounding(make_config: Config, tmp_path: Path) -> None:
    """Both engines have a trajectory of version 0 in an action; one of them gives it to the other, and takes newer weights."""
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    config = make_config(
        run={"iterations": 4, "eta": 2},
        staleness={"versions": "one", "engines": "rounded"},
        environment={"name": "held_tool:Held", "args": {"gate": str(gate), "held": "train-0-0-"}},
        cluster={"rollout_workers": 2},
        rollout=LONG | {"max_turns": 3},
        store={"keep_journals": True},
    )
    with Session(config) as session:
        iterations = session.iterations()
        rows = [next(iterations), next(iterations)]
        with gate.open("w"):
            pass
        rows += iterations
        directory = session.directory
    log = [(line, from_dict(event)) for line, event in EventReader(directory / "events.jsonl")]
    vacated = [event for _, event in log if isinstance(event, events.EngineVacated)]
    assert any(key.startswith("trajectory-train-0-0-") for event in vacated for key in event.keys)
    assert "version 0 has" in vacated[0].reason and "and 1 of 2 engines by rounding; it had 2" in vacated[0].reason
    ordered = [event for _, event in log if isinstance(event, events.VersionOrdered)]
    assert any(event.worker == vacated[0].worker and event.version >= 1 for event in ordered)
    assert apart(directory) >= 1 and mixed(directory) == restarts(directory) == 0
    told = list(replay(log))
    assert [each.difference for each in told if each.difference] == []
    repeated = Counter(type(command) for each in told for command in each.now)
    assert (repeated[Vacate], repeated[LoadVersion]) == (len(vacated), len(ordered))
    assert all(event.alone for _, event in log if isinstance(event, events.QuantumDispatched))
    assert not [promise for promise in check_invariants(directory) if promise.verdict == "broken"]


@pytest.mark.timeout(300)
def test_trajectories_of_an_engine_that_is_killed_begin_again(make_config: Config) -> None:
    config = make_config(
        run={"iterations": 4, "eta": 2},
        staleness={"versions": "one"},
        rollout=LONG,
        trainer={"prompts": 3},
    )
    with Session(config) as session:
        iterations = session.iterations()
        rows = [next(iterations)]
        workers = present_workers(session.client)
        (address,) = (address for address, worker in workers.items() if worker["name"] == "rollout-0")
        (pid,) = session.client.run(os.getpid, workers=[address]).values()
        os.kill(pid, signal.SIGKILL)
        rows += iterations
        directory = session.directory
    assert len(rows) == 4 and mixed(directory) == 0
    assert not [promise for promise in check_invariants(directory) if promise.verdict != "holds"]

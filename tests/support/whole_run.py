"""What a run's directory must hold, read as a stranger would: by plain zarr and by its event log; and its live workers."""

import json
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import zarr

from libra import keys
from libra.cluster.connection import present_workers
from libra.driver import submitted_graphs
from libra.facts import from_dict
from libra.policy.log_replay import replay
from libra.store.event_log import read_events
from libra.store.trajectory_journal import Journal

WIDE = {"rollout_workers": 2, "hybrid_workers": 1, "train_workers": 2}
"""Section ``cluster`` of a run on the fixture ``client_wide``."""


def columns(directory: Path, level: str = "trajectory") -> dict[str, np.ndarray]:
    """Columns of one level, whole."""
    group = zarr.open_group(directory / "trajectories.zarr", mode="r")[level]
    return {name: array[:] for name, array in group.arrays()}


def tokens(directory: Path) -> dict[str, np.ndarray]:
    """Columns of the tokens of all trajectories, one trajectory after the other."""
    return {name: array[:] for name, array in zarr.open_group(directory / "trajectories.zarr", mode="r").arrays()}


def events_of(directory: Path, *names: str) -> list[dict[str, Any]]:
    """The lines of the event log with one of these names; all without."""
    return named(read_events(directory / "events.jsonl").events, *names)


def named(events, *names: str) -> list[dict[str, Any]]:
    return [event for event in events if not names or event["name"] in names]


def unexplained(directory: Path) -> list[str]:
    """Decisions in the log that the policy does not come to again."""
    told = replay((line, from_dict(event).fact) for line, event in enumerate(events_of(directory), start=1))
    return [step.difference for step in told if step.difference]


def check_stored_once(directory: Path, iterations: int, prompts: int, size: int) -> None:
    """Every trajectory is stored once and in the batch of one step; every quantum was done once."""
    stored = columns(directory)
    train = stored["batch"] >= 0
    ids = sorted(zip(*(stored[name][train].tolist() for name in ("iteration", "group", "sample")), strict=True))
    assert ids == [(k, g, s) for k in range(iterations) for g in range(prompts) for s in range(size)]
    assert Counter(stored["batch"][train].tolist()) == dict.fromkeys(range(iterations), prompts * size)
    done: Counter[Any] = Counter()
    for event in events_of(directory, "quantum_finished"):
        key = keys.parse(event["key"])
        assert key is not None
        done[key.split, key.indices, event["quantum"]] += 1
    assert done and set(done.values()) == {1}


def check_once(directory: Path, iterations: int, *, prompts: int = 2, size: int = 2) -> None:
    """Stored and done once, and all decisions replay."""
    check_stored_once(directory, iterations, prompts, size)
    assert unexplained(directory) == []


def once_each(directory: Path, iterations: int, prompts: int, size: int) -> list[dict[str, Any]]:
    """Events of a run of which everything is stored and done once, nothing failed for good, and every version came."""
    check_stored_once(directory, iterations, prompts, size)
    events = events_of(directory)
    assert {e["failure"] for e in named(events, "failure_classified")} <= {"policy"}
    published = dict.fromkeys(e["version"] for e in named(events, "version_published"))
    assert list(published) == list(range(iterations + 1))
    return events


def journal_records(directory: Path) -> dict[str, str]:
    """Every record of the journal as text, by trajectory and quantum."""
    found, journal = {}, Journal(directory / "journal")
    for name in journal.trajectories():
        for quantum, record in enumerate(journal.read(name)):
            plain = msgspec.to_builtins(record, enc_hook=lambda array: array.tolist())
            found[f"{name}.{quantum}"] = json.dumps(plain, sort_keys=True)
    return found


def address_of(client, name: str) -> str:
    (address,) = (address for address, worker in present_workers(client).items() if worker["name"] == name)
    return str(address)


def kill(client, name: str, until) -> str:
    """Kill a worker's process, wait until the scheduler knows it, and return its address."""
    address = address_of(client, name)
    (process,) = client.run(os.getpid, workers=[address]).values()
    os.kill(process, signal.SIGKILL)
    until(client.cluster, lambda scheduler: address not in scheduler.workers)
    return address


def keep_groups(monkeypatch) -> None:
    """Group records stay, so that every step can be taken again."""
    monkeypatch.setattr(submitted_graphs, "prune_groups", lambda spec, first, before: before)


def dies_in_a_wave(run: str, wave: int, step: int, dask_worker: Any) -> None:
    """On a worker: from now on it is killed in the midst of that wave of a step that is not an earlier one."""
    replica = dask_worker.plugins[f"libra-{run}"].trainer.replica
    loss = replica.gradient.micro_batch_loss

    def deadly(*arguments: Any) -> Any:
        if replica.open_step.step >= step and replica.open_step.waves == wave:
            os.kill(os.getpid(), signal.SIGKILL)
        return loss(*arguments)

    replica.gradient.micro_batch_loss = deadly

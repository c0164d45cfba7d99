"""What tests of live runs ask of a run's log, its store and its workers."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import zarr
from distributed import Client

from libra.cluster.present_workers import present_workers
from libra.driver import run_checkpoints
from libra.store.event_log import read_events

WIDE = {"rollout_workers": 2, "hybrid_workers": 1, "train_workers": 2}
"""Section ``cluster`` of a run on the fixture ``client_wide``."""
Events = list[dict[str, Any]]


def events_of(directory: Path) -> Events:
    return list(read_events(directory / "events.jsonl").events)


def named(events: Iterable[dict[str, Any]], *names: str) -> Events:
    return [event for event in events if event["name"] in names]


def address_of(client: Client, name: str) -> str:
    """Address of the worker of that name."""
    (address,) = (address for address, worker in present_workers(client).items() if worker["name"] == name)
    return str(address)


def kill(client: Client, name: str, until: Callable[..., None]) -> str:
    """Kill a worker's process, wait until the scheduler knows it, and return its address."""
    address = address_of(client, name)
    (process,) = client.run(os.getpid, workers=[address]).values()
    os.kill(process, signal.SIGKILL)
    until(client.cluster, lambda scheduler: address not in scheduler.workers)
    return address


def once_each(directory: Path, iterations: int, groups: int, samples: int) -> Events:
    """Events of a run, of which every trajectory is stored once, every quantum counts once, and nothing failed for good."""
    events = events_of(directory)
    columns = zarr.open_group(directory / "trajectories.zarr", mode="r")["trajectory"]
    ids = zip(*(columns[name][:].tolist() for name in ("iteration", "group", "sample")), strict=True)
    assert sorted(ids) == [(k, g, s) for k in range(iterations) for g in range(groups) for s in range(samples)]
    done = Counter((e["key"], e["quantum"]) for e in named(events, "quantum_finished"))
    assert set(done.values()) == {1}
    assert {e["failure"] for e in named(events, "failure_classified")} <= {"policy"}
    published = dict.fromkeys(e["version"] for e in named(events, "version_published"))
    assert list(published) == list(range(iterations + 1))
    return events


def keep_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Group records stay, so that every step can be taken again."""
    monkeypatch.setattr(run_checkpoints, "prune_groups", lambda spec, first, before: before)

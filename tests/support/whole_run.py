"""What a finished run's directory must hold, read as a stranger would: by plain zarr and by its event log."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import zarr

from libra import keys
from libra.events import from_dict
from libra.policy.log_replay import replay
from libra.store.event_log import read_events
from libra.store.trajectory_journal import Journal


def columns(directory: Path, level: str = "trajectory") -> dict[str, np.ndarray]:
    """Columns of one level, whole."""
    group = zarr.open_group(directory / "trajectories.zarr", mode="r")[level]
    return {name: array[:] for name, array in group.arrays()}  # type: ignore[union-attr]


def tokens(directory: Path) -> dict[str, np.ndarray]:
    """Columns of the tokens of all trajectories, one trajectory after the other."""
    return {name: array[:] for name, array in zarr.open_group(directory / "trajectories.zarr", mode="r").arrays()}


def events_of(directory: Path, *names: str) -> list[dict[str, Any]]:
    """The lines of the event log with one of these names; all without."""
    return [event for event in read_events(directory / "events.jsonl").events if not names or event["name"] in names]


def unexplained(directory: Path) -> list[str]:
    """Decisions in the log that the policy does not come to again."""
    told = replay((line, from_dict(event)) for line, event in enumerate(events_of(directory), start=1))
    return [step.difference for step in told if step.difference]


def check_once(directory: Path, iterations: int, *, prompts: int = 2, size: int = 2) -> None:
    """Every trajectory is stored once and in the batch of one step; every quantum was done once; all decisions replay."""
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
    assert unexplained(directory) == []


def journal_records(directory: Path) -> dict[str, str]:
    """Every record of the journal as text, by trajectory and quantum."""
    found, journal = {}, Journal(directory / "journal")
    for name in journal.trajectories():
        for quantum, record in enumerate(journal.read(name)):
            found[f"{name}.{quantum}"] = json.dumps(record, default=lambda array: array.tolist(), sort_keys=True)
    return found

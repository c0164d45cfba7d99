"""Which trajectories a batch consists of, committed before its step is taken.

1. The membership of a batch is created once, flushed to the device, and never changes: whoever runs the step again
   takes the same members in the same order. A second writer gets RecordExists.
2. A member appears once in a batch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from libra.errors import StoreError
from libra.store.exclusive_files import create_exclusive
from libra.types import TrajectoryId

SCHEMA = 1


def batch_path(root: str | Path, batch: int) -> Path:
    """Where the membership of one batch lies."""
    return Path(root) / f"batch-{batch:06d}.json"


def commit_batch(root: str | Path, batch: int, members: Sequence[TrajectoryId], **facts: Any) -> Path:
    """Create the membership file of one batch, flushed to the device, and return its path.

    Parameters
    ----------
    members
        In the order in which the step sees them.
    **facts
        Further JSON-able things to know about the batch (epoch, oldest version, ...), kept under ``facts``.

    Raises
    ------
    RecordExists
        The batch was already committed; read it and use that one.
    StoreError
        A member appears twice, there is none, or the file cannot be written.
    """
    path = batch_path(root, batch)
    if not members or len(set(members)) != len(members):
        raise StoreError(f"{path}: got {len(members)} members, {len(set(members))} different; each must appear once")
    rows = [[member.split, member.iteration, member.group, member.sample] for member in members]
    try:
        text = json.dumps({"schema": SCHEMA, "batch": batch, "members": rows, "facts": facts})
    except (TypeError, ValueError) as error:
        raise StoreError(f"{path}: facts of a batch must be JSON-able: {error}") from error
    create_exclusive(path, text.encode() + b"\n", fsync=True)
    return path


def read_batch(root: str | Path, batch: int) -> list[TrajectoryId]:
    """Members of one batch in order; StoreError where it is missing, corrupt or of another schema."""
    rows = _load(batch_path(root, batch))["members"]
    return [TrajectoryId(iteration, group, sample, split) for split, iteration, group, sample in rows]


def read_batch_facts(root: str | Path, batch: int) -> dict[str, Any]:
    """What `commit_batch` was told about the batch beside its members."""
    facts: dict[str, Any] = _load(batch_path(root, batch))["facts"]
    return facts


def _load(path: Path) -> Mapping[str, Any]:
    try:
        content: dict[str, Any] = json.loads(path.read_bytes())
        schema = content["schema"]
    except OSError as error:
        raise StoreError(f"{path}: cannot read this batch: {error.strerror}") from error
    except (ValueError, TypeError, KeyError) as error:
        raise StoreError(
            f"{path}: torn or corrupt batch file ({error!r}); restore it from a copy of the run"
        ) from error
    if schema != SCHEMA:
        raise StoreError(f"{path}: batch schema {schema}, this Libra reads {SCHEMA}; use the Libra that wrote it")
    return content

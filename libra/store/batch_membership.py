"""Members of a batch, and facts of it, committed before its step.

1. The membership of a batch is created once, flushed to the device, and never changes: a step that runs again takes the same
   members in the same order. A second writer gets RecordExists.
2. A member appears once in a batch.
3. A file that was cut or altered is never read as a batch: it is sealed (`libra.seals`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from libra.errors import StoreError, shell_path
from libra.seals import sealed_text, unseal
from libra.store.exclusive_files import create_exclusive
from libra.store.group_records import group_path
from libra.types import TrajectoryId

SCHEMA = 1


def batch_path(root: str | Path, batch: int) -> Path:
    """File of the membership of one batch."""
    return Path(root) / f"batch-{batch:06d}.json"


def commit_batch(root: str | Path, batch: int, members: Sequence[TrajectoryId], **facts: Any) -> Path:
    """Create the membership file of one batch, flushed to the device, and return its path.

    Parameters
    ----------
    members
        In the order of the step.
    **facts
        Further JSON-able facts of the batch (epoch, oldest version, ...).

    Raises
    ------
    RecordExists
        The batch was already committed; read it and use that one.
    StoreError
        There is no member, one appears twice, or the file cannot be written.
    """
    path = batch_path(root, batch)
    if not members or len(set(members)) != len(members):
        raise StoreError(f"{path}: got {len(members)} members, {len(set(members))} different; each must appear once")
    rows = [[member.split, member.iteration, member.group, member.sample] for member in members]
    try:
        text = sealed_text({"schema": SCHEMA, "batch": batch, "members": rows, "facts": facts})
    except (TypeError, ValueError) as error:
        raise StoreError(f"{path}: facts of a batch must be JSON-able: {error}") from error
    create_exclusive(path, text.encode() + b"\n", fsync=True)
    return path


def read_batch(root: str | Path, batch: int) -> list[TrajectoryId]:
    """Members of one batch in order; StoreError if it is missing, corrupt, of another schema or of another batch."""
    rows = _load(root, batch)["members"]
    return [TrajectoryId(iteration, group, sample, split) for split, iteration, group, sample in rows]


def read_batch_facts(root: str | Path, batch: int) -> dict[str, Any]:
    """The facts given to `commit_batch`."""
    facts: dict[str, Any] = _load(root, batch)["facts"]
    return facts


def group_names(facts: Mapping[str, Any]) -> list[str]:
    """Names of the group records that a batch and those after it need, by its facts."""
    late = facts.get("late", {})
    rows = (*facts.get("groups", ()), *late.get("rows", ()))
    waiting = (group_path("", iteration, group).name for iteration, group, *_ in late.get("waiting", ()))
    return [*(Path(row["path"]).name for row in rows), *waiting]


def taught_names(facts: Mapping[str, Any]) -> list[str]:
    """Names of the group records of a batch that trained with scores of a teacher, by its facts."""
    return [Path(row["path"]).name for row in facts.get("groups", ()) if row.get("taught")]


def _load(root: str | Path, batch: int) -> Mapping[str, Any]:
    path = batch_path(root, batch)
    try:
        content = unseal(path.read_bytes())
        schema = content["schema"]
    except OSError as error:
        raise StoreError(f"{path}: cannot read this batch: {error.strerror}") from error
    except (ValueError, TypeError, KeyError) as error:
        raise StoreError(
            f"{path}: torn or corrupt batch file ({error!r}); type libra repair {shell_path(path.parent.parent)}"
        ) from error
    if schema != SCHEMA:
        raise StoreError(f"{path}: batch schema {schema}, this Libra reads {SCHEMA}; use the Libra that wrote it")
    if content.get("batch") != batch:
        raise StoreError(f"{path}: it is of another batch; type libra repair {shell_path(path.parent.parent)}")
    return content

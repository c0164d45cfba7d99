"""Immutable records of finished groups, one file each, read by the batch and by the committer.

1. The file of (split, iteration, group) is created once; a second writer gets RecordExists and must stop.
2. A reader sees all trajectories of the group, every field of them, or no file.
3. A file holds one group: trajectories of another one are refused before anything is written.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from libra.errors import StoreError
from libra.seals import parsed_json
from libra.store.exclusive_files import create_exclusive
from libra.store.record_codec import pack, unpack
from libra.types import Drawn, EndReason, FailureClass, Prompt, Trajectory, TrajectoryId

_SOME = ("late", "counted", "routes", "drawn", "taught")
_FIELDS = tuple(field.name for field in fields(Trajectory) if field.name not in _SOME)
"""Of every record; one of a late reward also has ``late``, one of recorded experts ``routes``, one with further draws ``drawn``.
``counted`` and ``taught`` are of a step."""


def prompt_to_json(prompt: Prompt) -> str:
    """Messages and facts of a prompt as one JSON object; StoreError if the facts are not JSON-able."""
    try:
        return json.dumps({"messages": [dict(message) for message in prompt.messages], "facts": dict(prompt.facts)})
    except (TypeError, ValueError) as error:
        raise StoreError(f"prompt {prompt.prompt_id}: facts and messages must be JSON-able: {error}") from error


def prompt_from_json(prompt_id: str, text: str) -> Prompt:
    """The inverse of `prompt_to_json`; tuples among the facts come back as lists."""
    content = parsed_json(text)
    return Prompt(prompt_id, tuple(content["messages"]), content["facts"])


def group_path(root: str | Path, iteration: int, group: int, split: str = "train") -> Path:
    """File of the record of one group."""
    return Path(f"{root}/{split}-{iteration:06d}-{group:06d}.group")


def write_group(
    root: str | Path, iteration: int, group: int, trajectories: Sequence[Trajectory], *, fsync: bool = False
) -> Path:
    """Create the record of one group and return its path.

    Parameters
    ----------
    trajectories
        All samples of the group, of one split, in the order in which they are read.
    fsync : bool
        Also survive a power failure.

    Raises
    ------
    RecordExists
        The group was already committed.
    StoreError
        A trajectory is of another group or appears twice, or the file cannot be written.
    """
    ids = [trajectory.trajectory_id for trajectory in trajectories]
    if not ids:
        raise StoreError(f"group {iteration}-{group} in {root}: got no trajectories; a group has at least one sample")
    split = ids[0].split
    strangers = [str(i) for i in ids if (i.split, i.iteration, i.group) != (split, iteration, group)]
    if strangers or len(set(ids)) != len(ids):
        raise StoreError(
            f"group {split}-{iteration}-{group} in {root}: got {', '.join(map(str, ids))}; "
            "allowed are different samples of this one group and split"
        )
    path = group_path(root, iteration, group, split)
    record = {"trajectories": [_to_record(trajectory) | _drawn(trajectory) for trajectory in trajectories]}
    create_exclusive(path, pack(record, source=str(path)), fsync=fsync)
    return path


def read_group(path: str | Path) -> list[Trajectory]:
    """The trajectories of one group; StoreError names the file if it is missing, torn or corrupt."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise StoreError(f"{path}: cannot read this group: {error.strerror}") from error
    return [_from_record(record) for record in unpack(data, source=path)["trajectories"]]


def pack_trajectory(trajectory: Trajectory) -> bytes:
    """One trajectory as bytes, to send to a trainer: without ``drawn``, which the teacher has read."""
    return pack(_to_record(trajectory), source=str(trajectory.trajectory_id))


def unpack_trajectory(data: bytes, *, source: str) -> Trajectory:
    """The inverse of `pack_trajectory`; StoreError names ``source`` if the bytes are torn or corrupt."""
    return _from_record(unpack(data, source=source))


def _to_record(trajectory: Trajectory) -> dict[str, Any]:
    record = {name: getattr(trajectory, name) for name in _FIELDS}
    record["trajectory_id"] = list(trajectory.trajectory_id)
    record["prompt"] = [trajectory.prompt.prompt_id, prompt_to_json(trajectory.prompt)]
    record["end_reason"], record["failure"] = str(trajectory.end_reason), str(trajectory.failure)
    if trajectory.late is not None:
        record["late"] = trajectory.late
    if trajectory.routes is not None:
        record["routes"] = trajectory.routes
    return record


def _drawn(trajectory: Trajectory) -> dict[str, Any]:
    return {} if trajectory.drawn is None else {"drawn": list(trajectory.drawn)}


def _from_record(record: Mapping[str, Any]) -> Trajectory:
    values = dict(record)
    values["trajectory_id"] = TrajectoryId(*record["trajectory_id"])
    values["prompt"] = prompt_from_json(*record["prompt"])
    values["end_reason"], values["failure"] = EndReason(record["end_reason"]), FailureClass(record["failure"])
    if "drawn" in record:
        values["drawn"] = Drawn(*record["drawn"])
    return Trajectory(**values)

"""The record files of a run: groups, batches, waves, late rewards and teacher scores.

1. A record is created once, whole, and never changes. A second writer gets RecordExists and must
   stop.
2. A file that was cut, altered or renamed is never read as a record, because each record has a
   checksum and its key. StoreError names the file.
3. Every record except a group's is flushed to the device before its writer continues.
4. The groups of a wave are committed before its gradient is computed, the members of a batch before
   its step. Waves of a batch are numbered from 0 without gaps, and the batch repeats their groups
   in the same order.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from libra.errors import StoreError, TrainError, disk_refusal, shell_path
from libra.seals import parsed_json, sealed_text, unseal
from libra.store.exclusive_files import create_exclusive, replace_file
from libra.store.record_codec import pack, unpack
from libra.types import Drawn, EndReason, FailureClass, Prompt, Taught, Trajectory, TrajectoryId

SCHEMA = 1
"""Version of the layout of JSON records; a change that old code cannot read raises it."""
WAVE = "wave"
"""Fact of a batch's group: the number of its wave."""
TEACHER = "teacher"
"""Directory of teacher scores, beside the group records."""
Rows = list[dict[str, Any]]
"""Facts of the groups of a batch or a wave."""
R = TypeVar("R", bound=msgspec.Struct)


# ------------------------------------------------------------------------------------------------ sealed records


class BatchRecord(msgspec.Struct):
    """Members of a batch (split, iteration, group, sample) in order, and JSON-able facts."""

    batch: int
    members: list[tuple[str, int, int, int]]
    facts: dict[str, Any]


class WaveRecord(msgspec.Struct):
    """Groups of one wave of a streamed step."""

    batch: int
    wave: int
    groups: Rows


class LateReward(msgspec.Struct):
    """A reward delivered late, at Unix time ``at_s``; the first delivery counts."""

    trajectory: tuple[int, int, int, str]
    value: float
    at_s: float


@dataclass(frozen=True, slots=True)
class RecordKind(Generic[R]):
    """One kind of JSON record with a checksum.

    Attributes
    ----------
    noun : str
        Name of the kind in messages.
    template : str
        File name, a format string of the record's key.
    struct : type
        The content.
    key : callable
        Arguments of the template, from a record.
    cure : str
        Remedy for a damaged record, a format string of the run directory and the key.
    """

    noun: str
    template: str
    struct: type[R]
    key: Callable[[R], tuple[object, ...]]
    cure: str = "type libra repair {0}"

    def path(self, root: str | Path, *key: object) -> Path:
        """File of one record; ``root`` is the directory of the kind."""
        return Path(root) / self.template.format(*key)

    def write(self, root: str | Path, record: R) -> Path:
        """Create a record, flushed to the device. RecordExists, or StoreError if it fails."""
        path = self.path(root, *self.key(record))
        try:
            text = sealed_text({"schema": SCHEMA, **{name: getattr(record, name) for name in record.__struct_fields__}})
        except (TypeError, ValueError) as error:
            raise StoreError(f"{path}: facts of a {self.noun} must be JSON-able: {error}") from error
        create_exclusive(path, text.encode() + b"\n", fsync=True)
        return path

    def read(self, root: str | Path, *key: object) -> R:
        """One record; StoreError if it is missing, torn, of another schema or of another key."""
        path = self.path(root, *key)
        cure = self.cure.format(shell_path(path.parent.parent), *key)
        try:
            content = unseal(path.read_bytes())
            schema = content.pop("schema")
            if schema != SCHEMA:
                raise StoreError(
                    f"{path}: {self.noun} schema {schema}, this Libra reads {SCHEMA}; use the Libra that wrote it"
                )
            record = msgspec.convert(content, self.struct)
        except StoreError:  # a subclass of OSError
            raise
        except OSError as error:
            raise StoreError(f"{path}: cannot read this {self.noun}: {error.strerror}") from error
        except (ValueError, TypeError, KeyError) as error:
            raise StoreError(f"{path}: torn or altered {self.noun} ({error!r}); {cure}") from error
        if (found := self.key(record)) != key:
            names = " ".join(map(str, found)), " ".join(map(str, key))
            raise StoreError(f"{path}: it is of another {self.noun}, of {names[0]} instead of {names[1]}; {cure}")
        return record


BATCH = RecordKind("batch", "batch-{:06d}.json", BatchRecord, lambda record: (record.batch,))
WAVES = RecordKind("wave", "wave-{:06d}-{:02d}.json", WaveRecord, lambda record: (record.batch, record.wave))
LATE = RecordKind(
    "reward",
    "{}.json",
    LateReward,
    lambda record: (TrajectoryId(*record.trajectory),),
    "remove it, and deliver the reward again with libra deliver {0} {1} VALUE",
)


# ------------------------------------------------------------------------------------------------ batches and waves


def batch_path(root: str | Path, batch: int) -> Path:
    """File of the record of one batch."""
    return BATCH.path(root, batch)


def commit_batch(root: str | Path, batch: int, members: Sequence[TrajectoryId], **facts: Any) -> Path:
    """Create the record of one batch, members in the order of the step, and return its path. Raises
    RecordExists if the batch was already committed (the caller then reads and uses that batch);
    StoreError without members, if a member appears twice, or if the file cannot be written."""
    if not members or len(set(members)) != len(members):
        raise StoreError(
            f"{batch_path(root, batch)}: got {len(members)} members, {len(set(members))} different; each must appear once"
        )
    rows = [(member.split, member.iteration, member.group, member.sample) for member in members]
    return BATCH.write(root, BatchRecord(batch, rows, facts))


def read_batch(root: str | Path, batch: int) -> list[TrajectoryId]:
    """Members of one batch in order; StoreError if its file is missing or not this batch's."""
    return [
        TrajectoryId(iteration, group, sample, split)
        for split, iteration, group, sample in BATCH.read(root, batch).members
    ]


def read_batch_facts(root: str | Path, batch: int) -> dict[str, Any]:
    """The facts given to `commit_batch`."""
    return BATCH.read(root, batch).facts


def group_names(facts: Mapping[str, Any]) -> list[str]:
    """Names of the group records that a batch and later batches need, by the facts of the batch."""
    late = facts.get("late", {})
    rows = (*facts.get("groups", ()), *late.get("rows", ()))
    waiting = (group_path("", iteration, group).name for iteration, group, *_ in late.get("waiting", ()))
    return [*(Path(row["path"]).name for row in rows), *waiting]


def taught_names(facts: Mapping[str, Any]) -> list[str]:
    """Names of a batch's group records that trained with teacher scores, by its facts."""
    return [Path(row["path"]).name for row in facts.get("groups", ()) if row.get("taught")]


def commit_wave(root: str | Path, batch: int, wave: int, rows: Sequence[dict[str, Any]]) -> None:
    """Create the record of a wave, flushed to the device; RecordExists if it exists."""
    WAVES.write(root, WaveRecord(batch, wave, [row | {WAVE: wave} for row in rows]))


def read_waves(root: str | Path, batch: int) -> list[Rows]:
    """The committed waves of a batch, in order; StoreError if a wave is torn."""
    waves: list[Rows] = []
    while WAVES.path(root, batch, len(waves)).exists():
        waves.append(WAVES.read(root, batch, len(waves)).groups)
    return waves


def in_waves(rows: Rows) -> list[Rows]:
    """The groups of a committed batch by wave, in order; empty if its step was not streamed."""
    waves: dict[int, Rows] = {}
    for row in rows:
        if WAVE in row:
            waves.setdefault(row[WAVE], []).append(row)
    return [waves[number] for number in sorted(waves)]


def groups_of(rows: Rows) -> tuple[tuple[int, int], ...]:
    """Groups of a wave, as (iteration, group)."""
    return tuple((row["iteration"], row["group"]) for row in rows)


# ------------------------------------------------------------------------------------------------ steps


def write_step(root: Path, step: int, numbers: Mapping[str, Any]) -> None:
    """Write the numbers of a step, over older numbers, for a replica that must repeat it."""
    path = root / f"step-{step:06d}.json"
    try:
        root.mkdir(exist_ok=True)
        replace_file(path, sealed_text(numbers).encode() + b"\n")
    except OSError as fault:
        raise TrainError(f"step {step}: {disk_refusal(path, fault)}") from fault


def read_step(root: Path, step: int) -> dict[str, Any]:
    """The numbers of a step; TrainError if there are none."""
    path = root / f"step-{step:06d}.json"
    try:
        return unseal(path.read_bytes())
    except (OSError, ValueError) as fault:
        raise TrainError(
            f"step {step}: training has passed it and {path} cannot be read: {fault}; resume the run"
        ) from fault


def step_numbers(root: Path, step: int) -> dict[str, int | float]:
    """Metrics of a step, from its record; empty if it has none."""
    try:
        record = read_step(root, step)
    except TrainError:
        return {}
    return {k: v for k, v in record.items() if isinstance(v, int | float) and k not in ("rank", "step")}


# ------------------------------------------------------------------------------------------------ late rewards

_HERE: Counter[Path] = Counter()


@contextmanager
def run_here(directory: Path) -> Iterator[None]:
    """Within this context, this process drives or works for the run in ``directory``."""
    _HERE[directory] += 1
    try:
        yield
    finally:
        _HERE[directory] -= 1
        if not _HERE[directory]:
            del _HERE[directory]


def runs_here() -> list[Path]:
    """Directories of the runs that this process drives or works for."""
    return list(_HERE)


def write_late(root: str | Path, trajectory: TrajectoryId, value: float) -> Path:
    """Record a delivered reward; RecordExists if there is one, StoreError if writing fails."""
    return LATE.write(root, LateReward((*trajectory,), value, time.time()))


def read_late(root: str | Path, trajectory: TrajectoryId) -> float | None:
    """The delivered reward, if any; StoreError if its file is damaged."""
    path = LATE.path(root, trajectory)
    if not path.exists():
        return None
    value = LATE.read(root, trajectory).value
    if not math.isfinite(value):
        raise StoreError(f"{path}: its value is {value}; remove it")
    return value


def came(root: str | Path, trajectories: Iterable[TrajectoryId]) -> dict[TrajectoryId, float]:
    """The delivered rewards, by trajectory."""
    found = ((trajectory, read_late(root, trajectory)) for trajectory in trajectories)
    return {trajectory: value for trajectory, value in found if value is not None}


# ------------------------------------------------------------------------------------------------ groups

_SOME = ("late", "counted", "routes", "drawn", "taught")
_FIELDS = tuple(field.name for field in fields(Trajectory) if field.name not in _SOME)
"""Fields of every record; ``late``, ``routes`` and ``drawn`` follow if set."""


def prompt_to_json(prompt: Prompt) -> str:
    """Messages and facts of a prompt as one JSON object; StoreError if not JSON-able."""
    try:
        return json.dumps({"messages": [dict(message) for message in prompt.messages], "facts": dict(prompt.facts)})
    except (TypeError, ValueError) as error:
        raise StoreError(f"prompt {prompt.prompt_id}: facts and messages must be JSON-able: {error}") from error


def prompt_from_json(prompt_id: str, text: str) -> Prompt:
    """The inverse of `prompt_to_json`, but tuples in the facts become lists."""
    content = parsed_json(text)
    return Prompt(prompt_id, tuple(content["messages"]), content["facts"])


def group_path(root: str | Path, iteration: int, group: int, split: str = "train") -> Path:
    """File of the record of one group."""
    return Path(f"{root}/{split}-{iteration:06d}-{group:06d}.group")


def write_group(
    root: str | Path, iteration: int, group: int, trajectories: Sequence[Trajectory], *, fsync: bool = False
) -> Path:
    """Create the record of one group, all samples in order; with ``fsync`` it survives a power
    failure. RecordExists if the group was already committed; StoreError if a trajectory is of
    another group or appears twice, or writing fails."""
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
    """The trajectories of one group; StoreError names the file if missing or damaged."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise StoreError(f"{path}: cannot read this group: {error.strerror}") from error
    return [_from_record(record) for record in unpack(data, source=path)["trajectories"]]


def pack_trajectory(trajectory: Trajectory) -> bytes:
    """One trajectory as bytes for a trainer, without ``drawn``, which only the teacher reads."""
    return pack(_to_record(trajectory), source=str(trajectory.trajectory_id))


def unpack_trajectory(data: bytes, *, source: str) -> Trajectory:
    """The inverse of `pack_trajectory`; StoreError names ``source`` if damaged."""
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


# ------------------------------------------------------------------------------------------------ scores of a teacher


def scores_path(group: str | Path) -> Path:
    """File of the teacher scores of the group whose record is ``group``."""
    path = Path(group)
    return path.parent.with_name(TEACHER) / f"{path.stem}.scores"


def write_scores(path: Path, scores: Sequence[Taught | None]) -> None:
    """Create a group's file, an entry per member or None. RecordExists or StoreError."""
    record = {"scores": [None if each is None else list(each) for each in scores]}
    create_exclusive(path, pack(record, source=str(path)), fsync=True)


def read_scores(path: Path, num_members: int | None = None) -> list[Taught | None]:
    """The teacher scores of a group, one entry per member; StoreError names a bad file."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise StoreError(f"{path}: cannot read what the teacher scored: {error.strerror}") from error
    found = [None if each is None else Taught(*each) for each in unpack(data, source=path)["scores"]]
    if num_members not in (None, len(found)):
        raise StoreError(f"{path}: it has {len(found)} trajectories and its group {num_members}; it is of another run")
    return found


# ------------------------------------------------------------------------------------------------ evaluations


def evaluation_path(directory: Path, version: int) -> Path:
    """The file with the outcome of an evaluation."""
    return directory / f"version-{version:06d}.json"


def read_evaluation(directory: Path, version: int) -> dict[str, Any] | None:
    """The outcome of an evaluation, None if there was none; StoreError if damaged."""
    path = evaluation_path(directory, version)
    if not path.exists():
        return None
    try:
        result = unseal(path.read_bytes())
    except ValueError as error:
        raise StoreError(
            f"{path}: torn or altered ({error}); type libra repair {shell_path(path.parents[1])}"
        ) from error
    return result | {"reward": math.nan if result["reward"] is None else result["reward"]}


def read_evaluations(directory: Path, last: int) -> list[dict[str, Any]]:
    """The outcomes of all evaluations up to version ``last``, in order."""
    found = (read_evaluation(directory, version) for version in range(last + 1))
    return [result for result in found if result is not None]

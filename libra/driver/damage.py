"""Which files of a run are damaged: missing, truncated, or altered since they were written.

Every file that a resumed run reads carries a checksum or a seal, and most have a second trace elsewhere in the run. `libra
resume` refuses a damaged run, and `libra repair` (`libra.driver.repair`) repairs it. Imports neither torch nor Dask, so
that a damaged run is named within seconds.

1. Reading only.
2. The state that a killed run leaves is not damage: a torn last line of a log, an append that was not committed, the
   missing file of unfinished work.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from libra.driver.lost_files import cut_log, logs_events, lost_files, newest_started
from libra.driver.read_budget import ReadBudget
from libra.driver.start_records import (
    CONFIG_FILE,
    GIVEN_FILE,
    STARTS_FILE,
    config_digest,
    read_given,
    read_starts,
)
from libra.driver.teacher_faults import teacher_faults
from libra.errors import DamagedRun, RunDirectoryError, StoreError, shell_path
from libra.seals import parsed_json, unseal
from libra.store.batch_membership import batch_path, group_names, read_batch_facts, taught_names
from libra.store.committer_lock import lock_holder
from libra.store.group_records import read_group
from libra.store.log_segments import check_whole, segments_of
from libra.store.observations import observation_faults
from libra.store.trajectory_journal import Journal
from libra.tensor_files import checkpoint_fault, version_fault
from libra.types import TrajectoryId
from libra.worker.run_spec import RunDirectory

LIMIT_BYTES = 256 * 2**20
"""Bytes of each kind of file that `libra resume` reads, the newest first; the rest is checked when it is loaded."""

LOG_LIMIT_BYTES = 16 * 2**20
"""Longer logs are only read by `libra doctor RUN`."""
RECHECK_S = 1.0
"""Seconds until a damaged run is read again."""
SETTLE_S = 20.0
"""Seconds for which a damaged run is read again while a committer has its store."""
LOGS = ("metrics.jsonl", "events.jsonl")
SEGMENTS = "events"
"""Directory of the closed parts of the event log."""
_STEP = re.compile(r"step-(\d{6,})")
_BATCH = re.compile(r"batch-(\d{6,})\.json")
_RECORD = re.compile(r"(?P<trajectory>.+)\.(?P<quantum>\d{4,})\.rec")
_GROUP = re.compile(r"(?P<split>train|eval)-(?P<iteration>\d{6,})-(?P<group>\d{6,})\.group")


@dataclass(frozen=True, slots=True)
class Damage:
    """One damaged file: its path within the run directory, and what is wrong with it."""

    name: str
    what: str

    @property
    def kind(self) -> str:
        """The first part of its path."""
        return self.name.split("/")[0]


@dataclass(slots=True)
class RunCheck:
    """The result of checking a run directory.

    Attributes
    ----------
    damages : list of Damage
    whole_checkpoints, all_checkpoints : list of int
        Steps of the checkpoints that are as they were written, and of all.
    num_batches : int
        Batches that were committed, by any trace of them.
    stored : set of int or None
        Batches whose trajectories are in the store; None where its rows cannot be read.
    logged : set of int
        Steps whose metrics are written.
    evaluated, stored_evaluations : set of int
        Versions whose evaluation the metrics have, and whose trajectories of it the store has.
    groups : dict of int to list of str
        Names of the group records of each batch whose file can be read.
    taught : dict of int to list of str
        Names of the group records of each batch that were trained with scores of a teacher.
    epoch : int
        The highest epoch in any file but ``epochs/`` itself, -1 if there is none.
    """

    files: RunDirectory
    limit_bytes: int | None
    damages: list[Damage] = field(default_factory=list)
    whole_checkpoints: list[int] = field(default_factory=list)
    all_checkpoints: list[int] = field(default_factory=list)
    num_batches: int = 0
    stored: set[int] | None = None
    logged: set[int] = field(default_factory=set)
    evaluated: set[int] = field(default_factory=set)
    stored_evaluations: set[int] = field(default_factory=set)
    groups: dict[int, list[str]] = field(default_factory=dict)
    taught: dict[int, list[str]] = field(default_factory=dict)
    epoch: int = -1

    def add(self, name: str, what: str) -> None:
        """Note a damaged file."""
        self.damages.append(Damage(name, what))

    def missing_groups(self, first: int) -> list[str]:
        """Missing group records of the batches from ``first`` on, as paths within the run."""
        names = [name for number in range(first, self.num_batches) for name in self.groups.get(number, ())]
        return [f"groups/{name}" for name in names if not (self.files.groups_dir / name).exists()]


def check_run(directory: Path, limit_bytes: int | None = None) -> RunCheck:
    """Check every file of a run.

    Parameters
    ----------
    limit_bytes : int or None
        Read about that many bytes of each kind of file, the newest first. None: everything.

    Raises
    ------
    RunDirectoryError
        There is no run in ``directory``.
    """
    directory = run_directory(directory)
    check = RunCheck(RunDirectory(directory), limit_bytes)
    for part in (_check_start, _check_weights, _check_checkpoints, _check_store, _check_batches, _check_sealed, _check_logs,
                 _check_segments, _check_journal, _check_groups, _check_teacher, _check_lost, _check_epochs):  # fmt: skip
        try:
            part(check)
        except OSError as error:
            path = Path(error.filename or directory)
            name = path.relative_to(directory) if path.is_relative_to(directory) else path
            check.add(str(name), f"cannot be read: {error.strerror or error}")
    return check


def run_directory(typed: Path) -> Path:
    """The absolute path of a run; RunDirectoryError if there is no run."""
    directory = typed.expanduser().absolute()
    marks = (CONFIG_FILE, GIVEN_FILE, "epochs", "batches", "trajectories.zarr")
    if not any((directory / name).exists() for name in marks):
        raise RunDirectoryError(
            f"{typed}: no run here, it has no {CONFIG_FILE}; type the directory of a run, such as runs/NAME"
        )
    return directory


def check_settled(directory: Path, limit_bytes: int | None = None, *, wait_s: float = SETTLE_S) -> RunCheck:
    """`check_run`, with the damages that it finds twice in a row.

    Workers whose driver was killed go on for a moment, and what they write between two reads looks like damage. So a second
    check follows, and further ones for at most ``wait_s`` while a committer has the store.
    """
    check = check_run(directory, limit_bytes)
    until_s = time.monotonic() + wait_s
    while check.damages:
        time.sleep(RECHECK_S)
        before, check = check.damages, check_run(directory, limit_bytes)
        if time.monotonic() >= until_s or lock_holder(check.files.store_path) is None:
            check.damages = [damage for damage in check.damages if damage in before]
            break
    return check


def refuse_damaged(directory: Path, limit_bytes: int | None = LIMIT_BYTES) -> None:
    """DamagedRun, in at most three lines, where a file of the run is damaged."""
    check = check_settled(directory, limit_bytes)
    if check.damages:
        raise DamagedRun(advice(check, directory))


def advice(check: RunCheck, typed: Path) -> str:
    """The damaged files of a run in at most three lines, the last with what to type; ``typed`` is the run as its user wrote it."""
    first, *others = check.damages
    lines = [f"{typed / first.name}: {' '.join(first.what.split())[:300]}"]
    if others:
        names = ", ".join(damage.name for damage in others[:4])
        lines.append(f"{len(others)} more: {names}{', ...' if len(others) > 4 else ''}")
    run = shell_path(typed)
    if all(_STEP.fullmatch(damage.name.partition("/")[2].split("/")[0]) for damage in check.damages):
        newest = max(check.whole_checkpoints, default=0)
        which = "the newest whole checkpoint" if newest else "the model it began with"
        lines.append(f"Type: libra resume {run} --from-checkpoint {newest}   # {which}; steps since are repeated")
    elif {damage.kind for damage in check.damages} == {SEGMENTS}:
        lines.append(
            f"Type: libra resume {run}   # which does not need them; libra replay --from-snapshot begins after them"
        )
    else:
        lines.append(f"Type: libra repair {run}   # rebuilds what can be rebuilt, and deletes nothing")
    return "\n".join(lines)


# ------------------------------------------------------------------------------------------------ by kind of file


def _check_start(check: RunCheck) -> None:
    directory = check.files.directory
    config, given, starts = directory / CONFIG_FILE, None, list[dict[str, Any]]()
    try:
        given = read_given(directory)
    except StoreError as error:
        check.add(GIVEN_FILE, _what(error))
    try:
        starts = read_starts(directory)
    except StoreError as error:
        check.add(STARTS_FILE, _what(error))
    check.epoch = max((int(start.get("epoch", -1)) for start in starts), default=-1)
    if not config.is_file():
        check.add(CONFIG_FILE, "it is gone")
        return
    data = config.read_bytes()
    if given is not None and given["config"] is not None:
        if data != given["config"].encode():
            check.add(CONFIG_FILE, f"it was edited since the run was started ({_edited(data, given['config'])})")
    elif starts and config_digest(data) != starts[0]["config"]:
        check.add(CONFIG_FILE, "it was edited since the run was started")


def _check_weights(check: RunCheck) -> None:
    numbers = sorted(
        (int(path.name) for path in _entries(check.files.weights_dir) if path.name.isdigit()), reverse=True
    )
    check.num_batches = max([check.num_batches, *numbers])
    budget = ReadBudget(check.limit_bytes)
    for number in numbers:
        directory = check.files.weights_dir / f"{number:08d}"
        fault = version_fault(directory, contents=budget.allows(_size(directory)))
        if fault is not None:
            check.add(f"weights/{directory.name}/{fault.partition(': ')[0]}", fault.partition(": ")[2])


def _check_checkpoints(check: RunCheck) -> None:
    found = {
        int(match[1]): path for path in _entries(check.files.checkpoints_dir) if (match := _STEP.fullmatch(path.name))
    }
    check.num_batches = max([check.num_batches, *found])
    budget = ReadBudget(check.limit_bytes)
    check.all_checkpoints = sorted(found)
    for step in sorted(found, reverse=True):
        fault = checkpoint_fault(found[step], contents=budget.allows(_size(found[step])))
        if fault is None:
            check.whole_checkpoints.append(step)
        else:
            check.add(f"checkpoints/{found[step].name}/{fault.partition(': ')[0]}", fault.partition(": ")[2])


def _check_store(check: RunCheck) -> None:
    store = check.files.store_path
    if not store.is_dir():
        check.add(store.name, "it is gone")
        return
    from libra.store.store_check import (  # imports zarr, which a first start does without
        column_rows,
        committed_rows,
        store_faults,
    )

    for fault in store_faults(store, check.limit_bytes):
        check.add(fault.name, fault.what)
    try:
        rows = committed_rows(store)["trajectory"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return
    names = ("batch", "epoch", "iteration")
    batches, epochs, iterations = (column_rows(store, f"trajectory/{name}", 0, rows) for name in names)
    damaged = {damage.name.rpartition("/c/")[0] for damage in check.damages}
    if batches is None or f"{store.name}/trajectory/batch" in damaged:
        return
    if epochs is not None and len(epochs) and f"{store.name}/trajectory/epoch" not in damaged:
        check.epoch = max(check.epoch, int(epochs.max()))
    check.num_batches = max(check.num_batches, int(batches.max(initial=-1)) + 1)
    check.stored = {int(batch) for batch in batches if batch >= 0}
    if iterations is not None and f"{store.name}/trajectory/iteration" not in damaged:
        check.stored_evaluations = {int(version) for version in iterations[batches < 0]}


def _check_batches(check: RunCheck) -> None:
    found = [int(match[1]) for path in _entries(check.files.batches_dir) if (match := _BATCH.fullmatch(path.name))]
    check.num_batches = max([check.num_batches, *(number + 1 for number in found)])
    for number in range(check.num_batches):
        path = batch_path(check.files.batches_dir, number)
        if not path.exists():
            check.add(f"batches/{path.name}", "it is gone")
            continue
        try:
            facts = read_batch_facts(check.files.batches_dir, number)
            check.groups[number], check.taught[number] = group_names(facts), taught_names(facts)
        except StoreError as error:
            check.add(f"batches/{path.name}", _what(error).partition("; type")[0])


def _check_sealed(check: RunCheck) -> None:
    """Files that are checked only against their seal."""
    directories = (check.files.evaluations_dir, check.files.steps_dir, check.files.waves_dir)
    paths = [path for directory in directories for path in _entries(directory) if path.suffix == ".json"]
    for path in [*paths, check.files.checkpoints_dir / "scores.json"]:
        try:
            if path.exists() and not path.name.startswith("."):
                unseal(path.read_bytes())
        except (OSError, ValueError) as error:
            check.add(str(path.relative_to(check.files.directory)), f"torn or altered ({error})")
    for name, what in observation_faults(check.files.directory, ReadBudget(check.limit_bytes).allows):
        check.add(name, what)


def _check_logs(check: RunCheck) -> None:
    for name in LOGS:
        path = check.files.directory / name
        # The metrics of every step count: they say which group records may be gone.
        is_skipped = name != LOGS[0] and check.limit_bytes is not None and _bytes(path) > LOG_LIMIT_BYTES
        if not path.exists() or is_skipped:
            continue
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                try:
                    values = parsed_json(line)
                    if name == LOGS[0] and "reward" in values:
                        check.logged.add(int(values["step"]))
                    elif name == LOGS[0] and "evaluation/reward" in values:
                        check.evaluated.add(int(values["step"]))
                except (ValueError, TypeError, KeyError, OverflowError):
                    if line.endswith(b"\n"):
                        check.add(name, f"line {number} is no JSON object of this log")
                        break


def _check_segments(check: RunCheck) -> None:
    """Closed parts of the event log; a resumed run needs none of them, so that only a full check reads them."""
    if check.limit_bytes is not None:
        return
    log = check.files.directory / "events.jsonl"
    segments = segments_of(log)
    if check.num_batches and logs_events(log.parent):
        if not segments and newest_started(log.parent) < 0:
            check.add(SEGMENTS, f"the event log is gone: {log.name} is missing, or has no start of this run")
        elif what := cut_log(log.parent, check.logged):
            check.add(SEGMENTS, what)
    try:
        check_whole(log, segments)
    except StoreError as error:
        check.add(SEGMENTS, _what(error).partition("; libra replay")[0])
    for segment in segments:
        name = segment.packed.name if segment.packed.exists() else segment.plain.name
        try:
            for number, line in enumerate(segment.lines(), segment.first):
                if not _is_object(line):
                    check.add(f"{SEGMENTS}/{name}", f"line {number} is no JSON object of this log")
                    break
        except StoreError as error:
            check.add(f"{SEGMENTS}/{name}", _what(error).partition("; libra replay")[0])


def _check_journal(check: RunCheck) -> None:
    budget = ReadBudget(check.limit_bytes)
    for trajectory, quantum, what in journal_faults(check.files.journal_dir, check, budget):
        check.add(f"journal/{trajectory}.{quantum:04d}.rec", what)


def journal_faults(
    directory: Path, check: RunCheck | None = None, budget: ReadBudget | None = None
) -> Iterator[tuple[str, int, str]]:
    """Trajectory, first quantum that is missing or unreadable, and the reason; also raises ``check.epoch`` to that of every
    record."""
    quanta: dict[str, list[int]] = {}
    for path in _entries(directory):
        if match := _RECORD.fullmatch(path.name):
            quanta.setdefault(match["trajectory"], []).append(int(match["quantum"]))
    journal = Journal(directory)
    for trajectory, numbers in sorted(quanta.items()):
        present, quantum = set(numbers), 0
        while quantum <= max(numbers):
            if quantum not in present:
                yield trajectory, quantum, "it is gone, and records after it are not"
                break
            if budget is not None and not budget.allows(4096):
                return
            try:
                records = journal.read_at(trajectory, quantum)
            except StoreError as error:
                yield trajectory, quantum, _what(error).partition(". Delete")[0]
                break
            if check is not None:
                check.epoch = max([check.epoch, *(int(record.get("epoch", -1)) for record in records)])
            quantum += len(records)


def _check_groups(check: RunCheck) -> None:
    budget = ReadBudget(check.limit_bytes)
    for path in sorted(_entries(check.files.groups_dir), reverse=True):
        match = _GROUP.fullmatch(path.name)
        if match is None or not budget.allows(_bytes(path)):
            continue
        try:
            members = read_group(path)
        except StoreError as error:
            check.add(f"groups/{path.name}", _what(error).partition(". Delete")[0])
            continue
        of = {TrajectoryId(int(match["iteration"]), int(match["group"]), 0, match["split"])}
        if {member.trajectory_id._replace(sample=0) for member in members} != of:
            check.add(f"groups/{path.name}", "it has the trajectories of another group")
        check.epoch = max([check.epoch, *(member.epoch for member in members)])
    for number, why in _needed(check):
        for name in check.groups.get(number, ()):
            if not (check.files.groups_dir / name).exists():
                check.add(f"groups/{name}", f"it is gone, and {why}")


def _needed(check: RunCheck) -> Iterator[tuple[int, str]]:
    """Each batch whose group records are needed, and what for."""
    kept, stored = min(check.whole_checkpoints, default=0), check.stored
    for number in range(check.num_batches):
        if number < kept and number not in check.logged:
            yield number, f"metrics.jsonl has lost step {number}, which is made again from it"
        elif number >= kept or (stored is not None and number not in stored):
            yield number, "the run needs it to continue"


def _check_teacher(check: RunCheck) -> None:
    needed = {name: why for number, why in _needed(check) for name in check.taught.get(number, ())}
    for name, what in teacher_faults(check.files, ReadBudget(check.limit_bytes).allows, needed):
        check.add(name, what)


def batch_groups(files: RunDirectory, number: int) -> list[str]:
    """Names of the group records of a batch; none if its file cannot be read."""
    try:
        return group_names(read_batch_facts(files.batches_dir, number))
    except StoreError:
        return []


def _check_lost(check: RunCheck) -> None:
    lost = lost_files(check.files, check.all_checkpoints, check.evaluated, check.stored_evaluations)
    named = {damage.name for damage in check.damages}
    check.damages += [Damage(name, what) for name, what in lost if name not in named]


def _check_epochs(check: RunCheck) -> None:
    directory = check.files.epochs_dir
    have = {int(path.name) for path in _entries(directory) if path.name.isdigit()}
    if not have and not (check.files.directory / STARTS_FILE).exists():
        check.epoch = max(check.epoch, newest_started(check.files.directory))
    missing = sorted(set(range(max([check.epoch, *have]) + 1)) - have)
    if missing:
        names = ", ".join(f"{number:04d}" for number in missing[:4])
        gone = f"of epochs 0 to {max([check.epoch, *have])}, {names}{', ...' if len(missing) > 4 else ''} are gone"
        check.add("epochs", f"{gone}: a process of an older start might write again")


# ------------------------------------------------------------------------------------------------ parts


def _entries(directory: Path) -> list[Path]:
    return list(directory.iterdir()) if directory.is_dir() else []


def _size(directory: Path) -> int:
    return sum(_bytes(path) for path in _entries(directory))


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(parsed_json(line), dict)
    except ValueError:
        return False


def _bytes(path: Path) -> int:
    """Size of a file, 0 where it has gone."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _what(error: StoreError) -> str:
    """The text of an error without the path it begins with."""
    return str(error).partition(": ")[2]


def _edited(now: bytes, was: str) -> str:
    """The first line in which a configuration differs."""
    after, before = now.decode(errors="replace").splitlines(), was.splitlines()
    for number, (new, old) in enumerate(zip(after, before, strict=False), start=1):
        if new != old:
            return f"line {number}: {new.strip()[:60]!r}, it was {old.strip()[:60]!r}"
    return f"{len(after)} lines, there were {len(before)}"

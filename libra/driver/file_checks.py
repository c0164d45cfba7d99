"""The checks of the files of a run, one for each kind: missing, truncated, or altered since they were written.

Every file that a resumed run reads carries a checksum, and most have a second trace elsewhere in the
run. Of a killed run the newest files may be missing: of each kind only what must have been there is
named. Imports neither torch nor Dask, so that a damaged run is named within seconds.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from libra.driver.start_records import (
    CONFIG_FILE,
    GIVEN_FILE,
    STARTS_FILE,
    config_digest,
    read_given,
    read_starts,
)
from libra.errors import StoreError
from libra.facts import RunStarted
from libra.seals import parsed_json, unseal
from libra.store.event_log import check_whole, lines_of, segments_of
from libra.store.observations import observation_faults
from libra.store.run_records import (
    batch_path,
    group_names,
    read_batch_facts,
    read_group,
    read_scores,
    scores_path,
    taught_names,
)
from libra.store.trajectory_journal import Journal
from libra.tensor_files import checkpoint_fault, version_fault
from libra.types import TrajectoryId
from libra.worker.run_spec import RunDirectory

LOG_LIMIT_BYTES = 16 * 2**20
"""Longer logs are only read by `libra doctor RUN`."""
LOGS = ("metrics.jsonl", "events.jsonl")
SEGMENTS = "events"
"""Directory of the closed parts of the event log."""
_STEP = re.compile(r"step-(\d{6,})")
_BATCH = re.compile(r"batch-(\d{6,})\.json")
_RECORD = re.compile(r"(?P<trajectory>.+)\.(?P<quantum>\d{4,})\.rec")
_GROUP = re.compile(r"(?P<split>train|eval)-(?P<iteration>\d{6,})-(?P<group>\d{6,})\.group")


TIDIED = 3
"""A run with this many checkpoints has tidied one and written scores; see `libra.driver.submitted_graphs`."""


class ReadBudget:
    """Bytes that may be read; None for all."""

    def __init__(self, limit_bytes: int | None) -> None:
        self._left = limit_bytes

    def allows(self, num_bytes: int) -> bool:
        """Whether this many more bytes may be read."""
        if self._left is None:
            return True
        if num_bytes > self._left:
            return False
        self._left -= num_bytes
        return True


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
    whole_checkpoints, all_checkpoints : list of int
        Steps of the undamaged checkpoints, and of all.
    num_batches : int
        Batches that were committed, by any trace of them.
    stored : set of int or None
        Batches whose trajectories are in the store; None if its rows cannot be read.
    logged, evaluated : set of int
        Steps and evaluated versions that the metrics have.
    stored_evaluations : set of int
        Versions whose evaluation the store has.
    groups, taught : dict of int to list of str
        Names of the group records of each readable batch, and of those trained with scores of a teacher.
    epoch : int
        The highest epoch in any file outside ``epochs/``, -1 without one.
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
    if given is not None:
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
    from libra.store.row_digests import (  # imports zarr, which a first start does without
        column_rows,
        committed_if_readable,
        store_faults,
    )

    for fault in store_faults(store, check.limit_bytes):
        check.add(fault.name, fault.what)
    if (committed := committed_if_readable(store)) is None:
        return
    names = ("batch", "epoch", "iteration")
    batches, epochs, iterations = (
        column_rows(store, f"trajectory/{name}", 0, committed["trajectory"]) for name in names
    )
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
    if check.limit_bytes is not None:
        return
    log = check.files.directory / "events.jsonl"
    segments = segments_of(log)
    if check.num_batches and _logs_events(log.parent) and not segments and _newest_started(log.parent) < 0:
        check.add(SEGMENTS, f"the event log is gone: {log.name} is missing, or has no start of this run")
    try:
        check_whole(log, segments)
    except StoreError as error:
        check.add(SEGMENTS, _what(error).partition("; libra replay")[0])
    for segment in segments:
        name = segment.packed.name if segment.packed.exists() else segment.plain.name
        try:
            for number, line in enumerate(segment.lines(), segment.first):
                if not is_object(line):
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
    """Trajectory, first missing or unreadable quantum, and the reason; raises ``check.epoch`` to the records' epochs."""
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
                check.epoch = max([check.epoch, *(record.epoch for record in records)])
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
    kept, stored = min(check.whole_checkpoints, default=0), check.stored
    for number in range(check.num_batches):
        if number < kept and number not in check.logged:
            yield number, f"metrics.jsonl has lost step {number}, which is made again from it"
        elif number >= kept or (stored is not None and number not in stored):
            yield number, "the run needs it to continue"


def _check_teacher(check: RunCheck) -> None:
    directory, budget = check.files.teacher_dir, ReadBudget(check.limit_bytes)
    for path in sorted(directory.glob("*.scores"), reverse=True) if directory.is_dir() else ():
        group = check.files.groups_dir / f"{path.stem}.group"
        if budget.allows(path.stat().st_size) and (what := _scores_fault(path, group)):
            check.add(f"{directory.name}/{path.name}", what)
    for name, why in {name: why for number, why in _needed(check) for name in check.taught.get(number, ())}.items():
        path = scores_path(check.files.groups_dir / name)
        if not path.exists():
            check.add(f"{directory.name}/{path.name}", f"it is gone, and {why}")


def _scores_fault(path: Path, group: Path) -> str:
    try:
        scores = read_scores(path)
    except StoreError as error:
        return str(error).partition(": ")[2].partition(". Delete")[0]
    except (TypeError, KeyError) as error:  # whole, but not scores
        return f"it has no scores ({error})"
    try:
        lengths = [member.num_action_tokens for member in read_group(group)]
    except StoreError:
        return ""
    scored = [None if each is None else len(each.own_logp) for each in scores]
    same = len(scored) == len(lengths) and all(one in (None, other) for one, other in zip(scored, lengths, strict=True))
    return "" if same else "it has the scores of another group"


def _check_lost(check: RunCheck) -> None:
    named = {damage.name for damage in check.damages}
    check.damages += [Damage(name, what) for name, what in _lost_files(check) if name not in named]


def _lost_files(check: RunCheck) -> Iterator[tuple[str, str]]:
    files, checkpoints, stored = check.files, check.all_checkpoints, check.stored_evaluations
    best = files.checkpoints_dir / "best"
    scores = files.checkpoints_dir / "scores.json"
    first, second = checkpoints[:2] if len(checkpoints) > 1 else (0, 0)
    is_tidied = (
        len(checkpoints) >= TIDIED or first > second - first or best.is_symlink()
    )  # one before the first was removed
    if not scores.exists() and is_tidied:
        yield f"checkpoints/{scores.name}", "it is gone; it ranks the checkpoints"
    for version in sorted(check.evaluated & stored):
        path = files.evaluations_dir / f"version-{version:06d}.json"
        if not path.exists():
            yield f"evaluations/{path.name}", "it is gone; metrics.jsonl and the store have that evaluation"
    for path in sorted(files.evaluations_dir.glob("version-*.json")) if files.evaluations_dir.is_dir() else ():
        text = path.stem.partition("-")[2]
        if not text.isdecimal() or int(text) < min(checkpoints, default=0) or int(text) not in stored:
            continue
        try:
            number = int(parsed_json(path.read_bytes())["num"])
        except (ValueError, KeyError, TypeError, OverflowError):  # the check of its seal names it
            continue
        for group in range(min(number, 10**6)):
            name = f"eval-{text}-{group:06d}.group"
            if not (files.groups_dir / name).exists():
                yield f"groups/{name}", "it is gone; the store would be made again from it"


def _newest_started(directory: Path) -> int:
    return max((_number(line, "epoch") for line in lines_of(directory / "events.jsonl", RunStarted)), default=-1)


def _logs_events(directory: Path) -> bool:
    config = directory / CONFIG_FILE
    return config.is_file()


def _number(line: bytes, name: str) -> int:
    try:
        return int(parsed_json(line)[name])
    except (ValueError, KeyError, TypeError, OverflowError):
        return -1


def _check_epochs(check: RunCheck) -> None:
    directory = check.files.epochs_dir
    have = {int(path.name) for path in _entries(directory) if path.name.isdigit()}
    if not have and not (check.files.directory / STARTS_FILE).exists():
        check.epoch = max(check.epoch, _newest_started(check.files.directory))
    missing = sorted(set(range(max([check.epoch, *have]) + 1)) - have)
    if missing:
        names = ", ".join(f"{number:04d}" for number in missing[:4])
        gone = f"of epochs 0 to {max([check.epoch, *have])}, {names}{', ...' if len(missing) > 4 else ''} are gone"
        check.add("epochs", f"{gone}: a process of an older start might write again")


def _entries(directory: Path) -> list[Path]:
    return list(directory.iterdir()) if directory.is_dir() else []


def _size(directory: Path) -> int:
    return sum(_bytes(path) for path in _entries(directory))


def is_object(line: bytes) -> bool:
    """Whether a line of a log is a JSON object."""
    try:
        return isinstance(parsed_json(line), dict)
    except ValueError:
        return False


def _bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _what(error: StoreError) -> str:
    return str(error).partition(": ")[2]


def _edited(now: bytes, was: str) -> str:
    after, before = now.decode(errors="replace").splitlines(), was.splitlines()
    for number, (new, old) in enumerate(zip(after, before, strict=False), start=1):
        if new != old:
            return f"line {number}: {new.strip()[:60]!r}, it was {old.strip()[:60]!r}"
    return f"{len(after)} lines, there were {len(before)}"


CHECKS: tuple[Callable[[RunCheck], None], ...] = (
    _check_start, _check_weights, _check_checkpoints, _check_store, _check_batches, _check_sealed, _check_logs,
    _check_segments, _check_journal, _check_groups, _check_teacher, _check_lost, _check_epochs,
)  # fmt: skip
"""In this order: later ones use what earlier ones found."""

"""The files of a run: one table of their kinds, and the check of a run against the table.

Every file that a resumed run reads carries a checksum. Imports neither torch nor Dask, so that
damage is reported within seconds.

1. The check only reads.
2. The state that a killed run leaves is not damage: a torn last line of a log, an uncommitted
   append, a missing file of unfinished work.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from libra.errors import RunDirectoryError, StoreError
from libra.facts import RunStarted
from libra.seals import parsed_json, unseal
from libra.store.event_log import check_whole, lines_of, segments_of
from libra.store.observations import observation_fault
from libra.store.run_records import group_names, read_batch_facts, read_group, read_scores, scores_path, taught_names
from libra.store.start_records import (
    CONFIG_FILE,
    GIVEN_FILE,
    STARTS_FILE,
    epochs_in,
    newest_logged,
    read_given,
)
from libra.store.trajectory_journal import Journal
from libra.tensor_files import checkpoint_fault, version_fault
from libra.types import TrajectoryId

LOG_LIMIT_BYTES = 16 * 2**20
"""A longer event log is read only if there is no limit of bytes."""
METRICS, EVENTS, SEGMENTS = "metrics.jsonl", "events.jsonl", "events"
STORE, SCORES = "trajectories.zarr", "checkpoints/scores.json"
TIDIED = 3
"""A run with this many checkpoints has written `SCORES`; see `libra.driver.submitted_graphs`."""
_RECORD = re.compile(r"(?P<trajectory>.+)\.(?P<quantum>\d{4,})\.rec")
_GROUP = re.compile(r"(?P<split>train|eval)-(?P<iteration>\d{6,})-(?P<group>\d{6,})\.group")
_ADVICE = re.compile(r"\. Delete|; type|; libra replay")


@dataclass(frozen=True, slots=True)
class Damage:
    """One damaged file: its path within the run directory, and its damage."""

    name: str
    what: str

    @property
    def kind(self) -> str:
        """The first part of the path."""
        return self.name.split("/")[0]


@dataclass(slots=True)
class RunCheck:
    """The result of checking a run directory.

    Attributes
    ----------
    whole_checkpoints, all_checkpoints : list of int
        Steps of the undamaged checkpoints, and of all checkpoints; the newest first.
    num_batches : int
        Number of committed batches, counted from any file that mentions a batch.
    stored : set of int or None
        Batches whose trajectories are in the store; None if its rows cannot be read.
    logged, evaluated : set of int
        Steps and evaluated versions in the metrics.
    stored_evaluations : set of int
        Versions whose evaluation is in the store.
    groups, taught : dict of int to list of str
        Names of the group records of each readable batch, and of groups trained with teacher
        scores.
    epoch : int
        The highest epoch in any file outside ``epochs/``, -1 without an epoch.
    """

    run: Path
    limit_bytes: int | None = None
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
        """Note the damage of a file, unless the file is already noted."""
        if all(damage.name != name for damage in self.damages):
            self.damages.append(Damage(name, what))

    def missing_groups(self, first: int) -> list[str]:
        """Missing group records of the batches from ``first`` on, as paths within the run."""
        names = [f"groups/{name}" for number in range(first, self.num_batches) for name in self.groups.get(number, ())]
        return [name for name in names if not (self.run / name).exists()]


def existing_run(typed: Path) -> Path:
    """The absolute path of a run; RunDirectoryError if ``typed`` has none."""
    directory = typed.expanduser().absolute()
    if not any((directory / name).exists() for name in (CONFIG_FILE, GIVEN_FILE, "epochs", "batches", STORE)):
        raise RunDirectoryError(
            f"{typed}: no run here, it has no {CONFIG_FILE}; type the directory of a run, such as runs/NAME"
        )
    return directory


def check_run(directory: Path, limit_bytes: int | None = None) -> RunCheck:
    """Check every file of a run; RunDirectoryError if ``directory`` has no run. ``limit_bytes`` is
    about how many bytes of each kind of file to read, the newest files first; None for all."""
    check = RunCheck(existing_run(directory), limit_bytes)
    for kind in KINDS:
        left = limit_bytes
        for path in sorted(check.run.glob(kind.pattern), reverse=True):
            size = _size(path)
            contents = left is None or size <= left
            left = left if left is None or not contents else left - size
            if contents or kind.has_headers:
                try:
                    kind.read(check, path, contents)
                except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
                    if path.exists():
                        check.add(str(path.relative_to(check.run)), _what(error))
    for name, what in _gone(check):
        check.add(name, what)
    return check


def _what(error: Exception) -> str:
    if isinstance(error, StoreError):
        return _ADVICE.split(str(error).partition(": ")[2])[0]
    return f"cannot be read: {error.strerror}" if isinstance(error, OSError) else f"torn or altered ({error})"


def _size(path: Path) -> int:
    with suppress(FileNotFoundError):
        return sum(map(_size, path.iterdir())) if path.is_dir() else path.stat().st_size
    return 0


# ------------------------------------------------------------------------------------------------ the kinds


def _config(check: RunCheck, path: Path, contents: bool) -> None:
    try:
        was = read_given(check.run)["config"]
    except StoreError:  # the check of that file reports it
        return
    now = path.read_bytes()
    if now != was.encode():
        pairs = zip(now.decode(errors="replace").splitlines(), was.splitlines(), strict=False)
        lines = (
            f"line {number}: {new.strip()[:60]!r}, it was {old.strip()[:60]!r}"
            for number, (new, old) in enumerate(pairs, start=1)
            if new != old
        )
        check.add(path.name, f"it was edited since the run was started ({next(lines, 'another number of lines')})")


def _starts(check: RunCheck, path: Path, contents: bool) -> None:
    check.epoch = newest_logged(check.run)


def _version(check: RunCheck, path: Path, contents: bool) -> None:
    if not path.name.isdigit():
        return
    check.num_batches = max(check.num_batches, int(path.name))
    _add_inner(check, path, version_fault(path, contents=contents))


def _checkpoint(check: RunCheck, path: Path, contents: bool) -> None:
    if not path.name.removeprefix("step-").isdigit():
        return
    step = int(path.name.removeprefix("step-"))
    check.num_batches = max(check.num_batches, step)
    check.all_checkpoints.append(step)
    fault = checkpoint_fault(path, contents=contents)
    if fault is None:
        check.whole_checkpoints.append(step)
    _add_inner(check, path, fault)


def _add_inner(check: RunCheck, path: Path, fault: str | None) -> None:
    if fault is not None:
        name, _, what = fault.partition(": ")
        check.add(f"{path.relative_to(check.run)}/{name}", what)


def _store(check: RunCheck, path: Path, contents: bool) -> None:
    # here, because it imports zarr, which a first start does not need
    from libra.store.row_digests import column_rows, committed_if_readable, store_faults

    for name, what in store_faults(path, check.limit_bytes):
        check.add(name, what)
    if (committed := committed_if_readable(path)) is None:
        return
    damaged = {damage.name.rpartition("/c/")[0] for damage in check.damages}
    batches, epochs, iterations = (
        None
        if f"{path.name}/trajectory/{name}" in damaged
        else column_rows(path, f"trajectory/{name}", 0, committed["trajectory"])
        for name in ("batch", "epoch", "iteration")
    )
    if batches is None:
        return
    check.epoch = max(check.epoch, -1 if epochs is None else int(epochs.max(initial=-1)))
    check.num_batches = max(check.num_batches, int(batches.max(initial=-1)) + 1)
    check.stored = {int(batch) for batch in batches if batch >= 0}
    if iterations is not None:
        check.stored_evaluations = {int(version) for version in iterations[batches < 0]}


def _batch(check: RunCheck, path: Path, contents: bool) -> None:
    if not path.stem.removeprefix("batch-").isdigit():
        return
    number = int(path.stem.removeprefix("batch-"))
    check.num_batches = max(check.num_batches, number + 1)
    facts = read_batch_facts(path.parent, number)
    check.groups[number], check.taught[number] = group_names(facts), taught_names(facts)


def _sealed(check: RunCheck, path: Path, contents: bool) -> None:
    unseal(path.read_bytes())


def _observation(check: RunCheck, path: Path, contents: bool) -> None:
    if (fault := observation_fault(path)) is not None:
        check.add(str(path.relative_to(check.run)), fault)


def _log(check: RunCheck, path: Path, contents: bool) -> None:
    if path.name == EVENTS and check.limit_bytes is not None and _size(path) > LOG_LIMIT_BYTES:
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                values = parsed_json(line)
                if path.name == METRICS and "reward" in values:
                    check.logged.add(int(values["step"]))
                elif path.name == METRICS and "evaluation/reward" in values:
                    check.evaluated.add(int(values["step"]))
            except (ValueError, TypeError, KeyError, OverflowError):
                if line.endswith(b"\n"):
                    check.add(path.name, f"line {number} is no JSON object of this log")
                    return


def _segments(check: RunCheck, path: Path, contents: bool) -> None:
    if check.limit_bytes is not None:  # a resumed run reads no segment
        return
    segments = segments_of(check.run / EVENTS)
    for segment in segments:
        name = f"{SEGMENTS}/{(segment.packed if segment.packed.exists() else segment.plain).name}"
        try:
            for number, line in enumerate(segment.lines(), segment.first):
                if not is_object(line):
                    check.add(name, f"line {number} is no JSON object of this log")
                    break
        except StoreError as error:
            check.add(name, _what(error))
    check_whole(check.run / EVENTS, segments)


def is_object(line: bytes) -> bool:
    """Whether a line of a log is a JSON object."""
    with suppress(ValueError):
        return isinstance(parsed_json(line), dict)
    return False


def _journal(check: RunCheck, path: Path, contents: bool) -> None:
    for trajectory, quantum, what in journal_faults(path, check):
        check.add(f"journal/{trajectory}.{quantum:04d}.rec", what)


def journal_faults(directory: Path, check: RunCheck) -> Iterator[tuple[str, int, str]]:
    """Trajectory, first missing or unreadable quantum, and reason; updates ``check.epoch``."""
    quanta: dict[str, set[int]] = {}
    for path in directory.iterdir():
        if match := _RECORD.fullmatch(path.name):
            quanta.setdefault(match["trajectory"], set()).add(int(match["quantum"]))
    journal = Journal(directory)
    for trajectory, present in sorted(quanta.items()):
        quantum = 0
        while quantum <= max(present):
            if quantum not in present:
                yield trajectory, quantum, "it is gone, and records after it are not"
                break
            try:
                records = journal.read_at(trajectory, quantum)
            except StoreError as error:
                yield trajectory, quantum, _what(error)
                break
            check.epoch = max([check.epoch, *(record.epoch for record in records)])
            quantum += len(records)


def _group(check: RunCheck, path: Path, contents: bool) -> None:
    if (match := _GROUP.fullmatch(path.name)) is None:
        return
    members = read_group(path)
    of = {TrajectoryId(int(match["iteration"]), int(match["group"]), 0, match["split"])}
    if {member.trajectory_id._replace(sample=0) for member in members} != of:
        check.add(f"groups/{path.name}", "it has the trajectories of another group")
    check.epoch = max([check.epoch, *(member.epoch for member in members)])


def _teacher(check: RunCheck, path: Path, contents: bool) -> None:
    scored = [None if each is None else len(each.own_logp) for each in read_scores(path)]
    with suppress(StoreError):  # the check of the group reports it
        lengths = [member.num_action_tokens for member in read_group(check.run / "groups" / f"{path.stem}.group")]
        if len(scored) != len(lengths) or any(one not in (None, two) for one, two in zip(scored, lengths, strict=True)):
            check.add(f"teacher/{path.name}", "it has the scores of another group")


@dataclass(frozen=True, slots=True)
class FileKind:
    """One kind of file.

    Attributes
    ----------
    pattern : str
        Paths below the run directory, as a glob.
    read : callable
        Reads one file into a `RunCheck`; adds its damage, or raises it.
    quarantined : str
        Consequence of moving a damaged file away; empty if `libra.driver.repair` rebuilds the file.
    has_headers : bool
        Whether headers are read beyond the limit of bytes, too.
    """

    pattern: str
    read: Callable[[RunCheck, Path, bool], None]
    quarantined: str = ""
    has_headers: bool = False


KINDS = (
    FileKind(GIVEN_FILE, _sealed),
    FileKind(CONFIG_FILE, _config),
    FileKind(STARTS_FILE, _starts),
    FileKind("weights/[0-9]*", _version, "the run publishes the version again, or continues without it", True),
    FileKind("checkpoints/step-[0-9]*", _checkpoint, "the run repeats the steps since the checkpoint before", True),
    FileKind(SCORES, _sealed),
    FileKind(STORE, _store, has_headers=True),
    FileKind("batches/batch-[0-9]*.json", _batch, has_headers=True),
    FileKind("evaluations/version-*.json", _sealed, has_headers=True),
    FileKind("steps/step-*.json", _sealed, "a resumed run does not need it", True),
    FileKind("waves/wave-*.json", _sealed, has_headers=True),
    FileKind("observations/*/[!.]*", _observation, "a reward function that reads it fails, and no reward is made up"),
    FileKind(METRICS, _log, has_headers=True),
    FileKind(EVENTS, _log, has_headers=True),
    FileKind(SEGMENTS, _segments, has_headers=True),
    FileKind("journal", _journal, has_headers=True),
    FileKind("groups/*.group", _group),
    FileKind("teacher/*.scores", _teacher),
)
"""Order of the check: later kinds use the findings of earlier kinds."""


# ------------------------------------------------------------------------------------------------ missing files


def _gone(check: RunCheck) -> Iterator[tuple[str, str]]:
    run = check.run
    yield from ((name, "it is gone") for name in (GIVEN_FILE, CONFIG_FILE, STORE) if not (run / name).exists())
    for number in range(check.num_batches):
        if not (run / (name := f"batches/batch-{number:06d}.json")).exists():
            yield name, "it is gone"
    needed = [(f"groups/{name}", why) for number, why in _needed(check) for name in check.groups.get(number, ())] + [
        (str(scores_path(Path("groups", name))), why)
        for number, why in _needed(check)
        for name in check.taught.get(number, ())
    ]
    yield from ((name, f"it is gone, and {why}") for name, why in needed if not (run / name).exists())
    yield from _gone_evaluations(check)
    reads_log = check.limit_bytes is None and check.num_batches > 0 and _logs_events(run)
    if reads_log and not segments_of(run / EVENTS) and _newest_started(run) < 0:
        yield SEGMENTS, f"the event log is gone: {EVENTS} is missing, or has no start of this run"
    have = epochs_in(run / "epochs")
    if not have and not (run / STARTS_FILE).exists():
        check.epoch = max(check.epoch, _newest_started(run))
    top = max([check.epoch, *have])
    if missing := sorted(set(range(top + 1)) - have):
        names = ", ".join(f"{number:04d}" for number in missing[:4])
        gone = f"of epochs 0 to {top}, {names}{', ...' if len(missing) > 4 else ''} are gone"
        yield "epochs", f"{gone}: a process of an older start might write again"


def _needed(check: RunCheck) -> Iterator[tuple[int, str]]:
    kept, stored = min(check.whole_checkpoints, default=0), check.stored
    for number in range(check.num_batches):
        if number < kept and number not in check.logged:
            yield number, f"{METRICS} has lost step {number}, which is made again from it"
        elif number >= kept or (stored is not None and number not in stored):
            yield number, "the run needs it to continue"


def _gone_evaluations(check: RunCheck) -> Iterator[tuple[str, str]]:
    run, steps = check.run, sorted(check.all_checkpoints)
    one_was_removed = len(steps) > 1 and steps[0] > steps[1] - steps[0]
    has_best = (run / "checkpoints" / "best").is_symlink()
    if (len(steps) >= TIDIED or one_was_removed or has_best) and not (run / SCORES).exists():
        yield SCORES, "it is gone; it ranks the checkpoints"
    for version in sorted(check.evaluated & check.stored_evaluations):
        if not (run / (name := f"evaluations/version-{version:06d}.json")).exists():
            yield name, f"it is gone; {METRICS} and the store have that evaluation"
    for path in sorted(run.glob("evaluations/version-[0-9]*.json")):
        text = path.stem.partition("-")[2]
        if int(text) < min(steps, default=0) or int(text) not in check.stored_evaluations:
            continue
        with suppress(OSError, ValueError, KeyError):  # the check of a damaged file reports it
            for group in range(unseal(path.read_bytes())["num"]):
                if not (run / (name := f"groups/eval-{text}-{group:06d}.group")).exists():
                    yield name, "it is gone; the store would be made again from it"


def _newest_started(run: Path) -> int:
    newest = -1
    for line in lines_of(run / EVENTS, RunStarted):
        with suppress(ValueError, KeyError, TypeError, OverflowError):
            newest = max(newest, int(parsed_json(line)["epoch"]))
    return newest


def _logs_events(run: Path) -> bool:
    config = run / CONFIG_FILE
    return config.is_file()

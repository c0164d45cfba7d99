"""`libra repair RUN`: damaged files are set aside and rebuilt from the other copies of their content in the run.

`REPAIRS` has a row for each kind of file.

1. Nothing is deleted: what is replaced goes to ``damaged/`` in the run directory.
2. No driver or committer has the run meanwhile; both locks are held.
3. A second repair does nothing, and one that was killed is continued by the next.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from libra.driver.damage import SCORES, Repairs, check_run, run_directory
from libra.driver.file_checks import LOGS, SEGMENTS, RunCheck, is_object
from libra.driver.repair_records import (
    repair_batch,
    repair_evaluation,
    repair_group,
    repair_journal,
    repair_scores,
    repair_teacher,
)
from libra.driver.repair_store import repair_store
from libra.driver.run_lock import lock_run
from libra.driver.start_records import (
    CONFIG_FILE,
    GIVEN_FILE,
    STARTS_FILE,
    config_digest,
    read_given,
    read_starts,
    write_given,
)
from libra.errors import StoreError, shell_path
from libra.seals import sealed_text, unseal
from libra.store.committer_lock import CommitterLock, Holder, lock_holder
from libra.store.exclusive_files import create_exclusive
from libra.store.observations import DIRECTORY as OBSERVATIONS
from libra.store.run_records import TEACHER
from libra.worker.run_spec import RunDirectory

STORE_WAIT_S = 20.0
"""Seconds that a repair waits until the workers of a killed driver have closed the store."""
MOST_ROUNDS = 4
"""One file may be rebuilt only after another one."""


@dataclass(frozen=True, slots=True)
class RepairResult:
    """The check of every file after a repair, and the number of repairs."""

    check: RunCheck
    num_repaired: int


def repair_run(directory: Path, say: Callable[[str], None]) -> RepairResult:
    """Repair a run; ``say`` gets a line for each repair, and for each file that cannot be repaired.

    RunDirectoryError if the run is missing or a driver has it, StoreError if a committer has its store.
    """
    run = run_directory(directory)
    repairs = Repairs(run, say)
    lock = lock_run(run)
    try:
        committer = _store_lock(directory, say)
        try:
            check = check_run(directory)
            for _ in range(MOST_ROUNDS):
                before = repairs.num_done
                if check.damages:
                    _round(check, repairs)
                if repairs.num_done == before:
                    break
                check = check_run(directory)
        finally:
            committer.release()
    finally:
        lock.release()
    for reason in repairs.reasons():
        say(reason)
    return RepairResult(check, repairs.num_done)


def _store_lock(directory: Path, say: Callable[[str], None]) -> CommitterLock:
    store = RunDirectory(run_directory(directory)).store_path
    until_s = time.monotonic() + STORE_WAIT_S
    waits = False
    while True:
        try:
            return CommitterLock(store)
        except StoreError as error:
            holder = lock_holder(store)
            if holder is not None and time.monotonic() >= until_s:
                raise StoreError(_still_held(directory, holder)) from error
            if holder is None and time.monotonic() >= until_s:  # a file system without locks
                raise
            if holder is not None and not waits:
                waits = True
                say(
                    f"waiting until a worker of an earlier start has closed the store (process {holder.pid} on {holder.host})"
                )
        time.sleep(0.2)


def _still_held(directory: Path, holder: Holder) -> str:
    return (
        f"{directory}: process {holder.pid} on {holder.host} still has the store open: a worker of an earlier start, whose driver "
        f"has ended. Type kill {holder.pid} on {holder.host} (its nanny, if it has one, starts it again), then libra repair "
        f"{shell_path(directory)} again"
    )


def _round(check: RunCheck, repairs: Repairs) -> None:
    kinds: dict[str, list[str]] = {}
    for damage in check.damages:
        kinds.setdefault(damage.kind, []).append(damage.name)
    repairs.begin_round()
    for kind, repair in REPAIRS.items():
        if kind in kinds:
            repair(check, repairs, list(dict.fromkeys(kinds[kind])))
    best = repairs.run / "checkpoints" / "best"
    if best.is_symlink() and not best.exists():
        best.unlink()


def _each(repair: Callable[[RunCheck, Repairs, str], None]) -> Repair:
    def all_of(check: RunCheck, repairs: Repairs, names: Sequence[str]) -> None:
        for name in names:
            repair(check, repairs, name)

    return all_of


def _set_aside(depth: int, then: str) -> Repair:
    def repair(check: RunCheck, repairs: Repairs, names: Sequence[str]) -> None:
        for name in dict.fromkeys("/".join(name.split("/")[:depth]) for name in names):
            if name != SCORES and repairs.exists(name):
                repairs.done(f"{name}: set aside as {repairs.set_aside(name)}; {then}")

    return repair


def _segment(check: RunCheck, repairs: Repairs, name: str) -> None:
    repairs.cannot(name, "nothing else has its lines; a resumed run does not need them, and it stays where it is")


def _checkpoints(check: RunCheck, repairs: Repairs, names: Sequence[str]) -> None:
    _set_aside(2, "the run repeats the steps since the checkpoint before")(check, repairs, names)
    if SCORES in names:
        repair_scores(check, repairs)


def _wave(check: RunCheck, repairs: Repairs, name: str) -> None:
    for path in sorted((repairs.run / "waves").glob(f"{Path(name).name.rpartition('-')[0]}-*.json")):
        if (later := f"waves/{path.name}") >= name:
            aside = repairs.set_aside(later)
            repairs.done(
                f"{later}: set aside as {aside}; its groups go into other waves, if their step is not taken yet"
            )


def _given(check: RunCheck, repairs: Repairs, name: str) -> None:
    config = check.files.directory / CONFIG_FILE
    try:
        starts = read_starts(check.files.directory)
    except StoreError:
        starts = []
    if not starts or not config.is_file() or config_digest(config.read_bytes()) != starts[-1]["config"]:
        repairs.cannot(
            GIVEN_FILE, f"{STARTS_FILE} and {CONFIG_FILE}, which have the same facts, do not agree or are gone"
        )
        return
    aside = repairs.set_aside(GIVEN_FILE)
    facts = starts[-1]
    write_given(check.files.directory, config.read_text(), environment=facts["environment"], score=facts["score"])
    repairs.done(
        f"{GIVEN_FILE}: made again from {STARTS_FILE} and {CONFIG_FILE}{aside and f'; the old one is {aside}'}"
    )


def _config(check: RunCheck, repairs: Repairs, name: str) -> None:
    try:
        text = read_given(check.files.directory)["config"]
    except StoreError:
        repairs.cannot(CONFIG_FILE, f"{GIVEN_FILE}, which has its text, is damaged too")
        return
    aside = repairs.set_aside(CONFIG_FILE)
    (check.files.directory / CONFIG_FILE).write_text(text)
    repairs.done(f"{CONFIG_FILE}: as the run was started with{aside and f'; the other one is {aside}'}")


def _starts(check: RunCheck, repairs: Repairs, name: str) -> None:
    directory = check.files.directory
    try:
        given = read_given(directory)
    except StoreError:
        repairs.cannot(STARTS_FILE, f"{GIVEN_FILE}, which has the same facts, is damaged too")
        return
    lines = {}
    for line in (directory / STARTS_FILE).read_bytes().splitlines():
        try:
            lines[int(unseal(line)["epoch"])] = line.decode()
        except (ValueError, KeyError, TypeError):
            continue
    text = given.pop("config")
    epochs = (
        {int(path.name) for path in check.files.epochs_dir.glob("[0-9]*")} if check.files.epochs_dir.is_dir() else ()
    )
    for epoch in range(max([check.epoch, *epochs]) + 1):
        lines.setdefault(epoch, sealed_text({**given, "config": config_digest(text), "epoch": epoch}))
    aside = repairs.set_aside(STARTS_FILE)
    (directory / STARTS_FILE).write_text("".join(f"{lines[epoch]}\n" for epoch in sorted(lines)))
    repairs.done(f"{STARTS_FILE}: made again from its sound lines, {GIVEN_FILE} and epochs/; the old one is {aside}")


def _epochs(check: RunCheck, repairs: Repairs, name: str) -> None:
    directory = check.files.epochs_dir
    aside = repairs.set_aside("epochs") if directory.exists() and not directory.is_dir() else ""
    directory.mkdir(exist_ok=True)
    have = [int(path.name) for path in directory.iterdir() if path.name.isdigit()]
    top, margin = max([check.epoch, *have]), ""
    if not have and not (check.files.directory / STARTS_FILE).exists():
        top, margin = top + 1, ", and one more for a start that left no record"
    for epoch in range(top + 1):
        if not (directory / f"{epoch:04d}").exists():
            create_exclusive(directory / f"{epoch:04d}", b"", fsync=True)
    repairs.done(
        f"epochs: 0 to {top} are there again, by the records of the run{margin}; the next start is {top + 1}"
        f"{aside and f'; what was there is {aside}'}"
    )


def _log(check: RunCheck, repairs: Repairs, name: str) -> None:
    path = check.files.directory / name
    lines = path.read_bytes().splitlines(keepends=True)
    sound = [line for line in lines if is_object(line)]
    aside = repairs.set_aside(name)
    path.write_bytes(b"".join(sound))
    repairs.done(f"{name}: {len(lines) - len(sound)} of {len(lines)} lines left out; the old one is {aside}")


def _store(check: RunCheck, repairs: Repairs, names: Sequence[str]) -> None:
    repair_store(check, repairs)


Repair = Callable[[RunCheck, Repairs, Sequence[str]], None]
REPAIRS: dict[str, Repair] = {
    GIVEN_FILE: _each(_given),
    CONFIG_FILE: _each(_config),
    STARTS_FILE: _each(_starts),
    "epochs": _each(_epochs),
    **dict.fromkeys(LOGS, _each(_log)),
    SEGMENTS: _each(_segment),
    "weights": _set_aside(2, "the run publishes the version again, or continues without it"),
    "steps": _set_aside(2, "a resumed run does not need it"),
    OBSERVATIONS: _set_aside(3, "a reward function that reads it fails, and no reward is made up"),
    "waves": _each(_wave),
    "batches": _each(repair_batch),
    "trajectories.zarr": _store,
    "trajectories.zarr.digests": _store,
    "groups": _each(repair_group),
    TEACHER: repair_teacher,
    "journal": repair_journal,
    "evaluations": _each(repair_evaluation),
    "checkpoints": _checkpoints,
}
"""The first part of a path, and the repair of all damaged files of that kind. Later ones read what
earlier ones made."""

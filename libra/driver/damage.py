"""Whether a run is damaged, what to type about it, and where damaged files go.

`libra resume` refuses a damaged run, and `libra repair` (`libra.driver.repair`) repairs it. Imports
neither torch nor Dask, so that a damaged run is named within seconds.

1. Checks only read. Damaged files are moved to ``damaged/`` in the run directory, never deleted.
2. The state that a killed run leaves is not damage: a torn last line of a log, an append that was not
   committed, the missing file of unfinished work.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

from libra.driver.file_checks import CHECKS, SEGMENTS, RunCheck
from libra.driver.run_lock import lock_run
from libra.driver.start_records import CONFIG_FILE, GIVEN_FILE
from libra.errors import ConfigError, DamagedRun, RunDirectoryError, shell_path
from libra.store.committer_lock import lock_holder
from libra.worker.run_spec import RunDirectory

LIMIT_BYTES = 256 * 2**20
"""Bytes of each kind of file that `libra resume` reads, the newest first; the rest is checked when it is loaded."""

RECHECK_S = 1.0
"""Seconds until a damaged run is read again."""
SETTLE_S = 20.0
"""Seconds for which a damaged run is read again while a committer has its store."""
_STEP = re.compile(r"step-(\d{6,})")


def check_run(directory: Path, limit_bytes: int | None = None) -> RunCheck:
    """Check every file of a run; RunDirectoryError if ``directory`` has none.

    ``limit_bytes``: about how many bytes of each kind of file to read, the newest first; None for all.
    """
    directory = run_directory(directory)
    check = RunCheck(RunDirectory(directory), limit_bytes)
    for part in CHECKS:
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

    Workers of a killed driver still write for a moment. A second check follows, and further ones for at most
    ``wait_s`` while a committer has the store.
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


DAMAGED = "damaged"
SCORES = "checkpoints/scores.json"


def set_aside(run: Path, name: str) -> str:
    """Move a file or directory of a run to ``damaged/``, and return its new path within the run; nothing there is replaced."""
    target = run / DAMAGED / name
    number = 1
    while target.exists() or target.is_symlink():
        number += 1
        target = run / DAMAGED / f"{name}.{number}"
    target.parent.mkdir(parents=True, exist_ok=True)
    (run / name).rename(target)
    return str(target.relative_to(run))


class Repairs:
    """The report of one repair of a run, an absolute directory; ``say`` gets each line."""

    def __init__(self, run: Path, say: Callable[[str], None]) -> None:
        self.run, self._say = run, say
        self.num_done = 0
        self._reasons: dict[str, str] = {}

    def begin_round(self) -> None:
        """Forget the failed repairs of the round before."""
        self._reasons.clear()

    def exists(self, name: str) -> bool:
        """Whether a file or directory of the run exists."""
        return (self.run / name).exists()

    def set_aside(self, name: str) -> str:
        """As `set_aside`; the empty string if it does not exist."""
        return set_aside(self.run, name) if self.exists(name) else ""

    def done(self, text: str) -> None:
        """Report a repair."""
        self.num_done += 1
        self._say(text)

    def cannot(self, name: str, reason: str) -> None:
        """Record why a file cannot be repaired; reported at the end, if no later round repairs it."""
        self._reasons[name] = reason

    def reasons(self) -> list[str]:
        """A line for each file that could not be repaired."""
        return [f"{name}: cannot be repaired: {reason}" for name, reason in self._reasons.items()]


def go_back(run: Path, step: int) -> list[str]:
    """Quarantine checkpoints that are damaged or after ``step``; a resumed run repeats the steps since. A line for each.

    Step 0 is the model that the run started with. DamagedRun if other files than checkpoints are damaged, their
    scores included; ConfigError if the step has no whole checkpoint, or records of the repeated steps are gone.
    """
    typed, run = run, run_directory(run)
    lock = lock_run(run)
    try:
        return _go_back(run, typed, step)
    finally:
        lock.release()


def _go_back(run: Path, typed: Path, step: int) -> list[str]:
    check = check_settled(typed, LIMIT_BYTES)
    others = [damage for damage in check.damages if damage.kind != "checkpoints" or damage.name == SCORES]
    if others:
        raise DamagedRun(advice(RunCheck(check.files, check.limit_bytes, others), typed))
    whole = sorted(check.whole_checkpoints)
    if step not in (0, *whole):
        raise ConfigError(
            f"--from-checkpoint {step}: {typed} has no whole checkpoint of that step; allowed are "
            f"{', '.join(map(str, (*whole, 0)))} (0: the model it began with)"
        )
    gone = check.missing_groups(step)
    if gone:
        raise ConfigError(
            f"--from-checkpoint {step}: {gone[0]} is gone, which the repeated steps need; the lowest step with all its records is "
            f"{min(whole, default=0)}"
        )
    lines = []
    for found in check.all_checkpoints:
        if found > step or found not in whole:
            name = f"checkpoints/step-{found:06d}"
            lines.append(f"{name} is set aside as {set_aside(run, name)}")
    best = run / "checkpoints" / "best"
    if best.is_symlink() and not best.exists():
        best.unlink()
    return lines

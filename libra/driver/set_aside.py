"""Damaged files are moved to ``damaged/`` in the run directory, never deleted; and the report of a repair."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from libra.driver.damage import LIMIT_BYTES, RunCheck, advice, check_settled, run_directory
from libra.driver.run_lock import lock_run
from libra.errors import ConfigError, DamagedRun

DAMAGED = "damaged"
SCORES = "checkpoints/scores.json"
"""Of all checkpoints: which of them is the best."""


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
    """The report of one repair of a run: what it did, and could not do.

    Parameters
    ----------
    run : Path
        The run directory, absolute.
    say : callable
        Called with each line.
    """

    def __init__(self, run: Path, say: Callable[[str], None]) -> None:
        self.run, self._say = run, say
        self.num_done = 0
        self._reasons: dict[str, str] = {}

    def begin_round(self) -> None:
        """What could not be repaired may be by now."""
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
    """Set aside checkpoints that are damaged or after ``step``, so that a resumed run repeats the steps since; a line for each.

    Raises
    ------
    DamagedRun
        Other files than checkpoints are damaged: also their scores, which `libra repair` makes again.
    ConfigError
        There is no whole checkpoint of this step, or the records that the repeated steps need are gone. 0 is the model that the
        run began with.
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

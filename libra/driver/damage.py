"""Checks a run for damage, advises what to type, and returns to an earlier checkpoint.

`libra resume` refuses a damaged run, and `libra repair` (`libra.driver.repair`) repairs it. Imports
neither torch nor Dask, so that damage is reported within seconds. Damaged files are moved to
``damaged/`` in the run directory, never deleted.
"""

from __future__ import annotations

import time
from pathlib import Path

from libra.driver.rundir import lock_run
from libra.errors import ConfigError, DamagedRun, shell_path
from libra.store.exclusive_files import lock_holder
from libra.store.run_files import SCORES, SEGMENTS, STORE, RunCheck, check_run, existing_run

LIMIT_BYTES = 256 * 2**20
"""Bytes of each kind of file that `libra resume` reads, the newest first; the rest is checked when it is loaded."""
RECHECK_S = 1.0
"""Seconds until a damaged run is read again."""
SETTLE_S = 20.0
"""Seconds for which a damaged run is read again while a committer has its store."""


def check_settled(directory: Path, limit_bytes: int | None = None, *, wait_s: float = SETTLE_S) -> RunCheck:
    """`check_run`, reduced to the damages that two consecutive checks find.

    Workers of a killed driver may still write; waits at most ``wait_s`` seconds for a committer.
    """
    check = check_run(directory, limit_bytes)
    until_s = time.monotonic() + wait_s
    while check.damages:
        time.sleep(RECHECK_S)
        before, check = check.damages, check_run(directory, limit_bytes)
        if time.monotonic() >= until_s or lock_holder(check.run / STORE) is None:
            check.damages = [damage for damage in check.damages if damage in before]
            break
    return check


def refuse_damaged(directory: Path) -> None:
    """Raise DamagedRun, in at most three lines, if a file that a resume reads is damaged."""
    check = check_settled(directory, LIMIT_BYTES)
    if check.damages:
        raise DamagedRun(advice(check, directory))


def advice(check: RunCheck, typed: Path) -> str:
    """A run's damage in at most three lines, the last with what to type (run path as ``typed``)."""
    first, *others = check.damages
    lines = [f"{typed / first.name}: {' '.join(first.what.split())[:300]}"]
    if others:
        names = ", ".join(damage.name for damage in others[:4])
        lines.append(f"{len(others)} more: {names}{', ...' if len(others) > 4 else ''}")
    run = shell_path(typed)
    if all(damage.name.startswith("checkpoints/step-") for damage in check.damages):
        newest = max(check.whole_checkpoints, default=0)
        which = "the newest whole checkpoint" if newest else "the first model"
        lines.append(f"Type: libra resume {run} --from-checkpoint {newest}   # {which}; steps since are repeated")
    elif {damage.kind for damage in check.damages} == {SEGMENTS}:
        lines.append(
            f"Type: libra resume {run}   # which does not need them; libra replay --from-snapshot begins after them"
        )
    else:
        lines.append(f"Type: libra repair {run}   # rebuilds what can be rebuilt, and deletes nothing")
    return "\n".join(lines)


def quarantine(run: Path, name: str) -> str:
    """Move a run's file to ``damaged/``; returns its path in the run, "" if it does not exist."""
    if not (run / name).exists():
        return ""
    target, number = run / "damaged" / name, 1
    while target.exists() or target.is_symlink():
        number += 1
        target = run / "damaged" / f"{name}.{number}"
    target.parent.mkdir(parents=True, exist_ok=True)
    (run / name).rename(target)
    return str(target.relative_to(run))


def drop_dead_link(run: Path) -> None:
    best = run / "checkpoints" / "best"
    if best.is_symlink() and not best.exists():
        best.unlink()


def go_back(typed: Path, step: int) -> list[str]:
    """Quarantine checkpoints that are damaged or later than ``step``; returns a line for each.

    A resumed run repeats the steps since. Step 0 is the initial model. Raises DamagedRun if
    anything but checkpoints is damaged (their scores included), ConfigError if the step has no
    intact checkpoint or records of the steps to repeat are gone.
    """
    run = existing_run(typed)
    lock = lock_run(run)
    try:
        check = check_settled(typed, LIMIT_BYTES)
        whole, found = sorted(check.whole_checkpoints), sorted(check.all_checkpoints)
        check.damages = [each for each in check.damages if each.kind != "checkpoints" or each.name == SCORES]
        if check.damages:
            raise DamagedRun(advice(check, typed))
        if step not in (0, *whole):
            raise ConfigError(
                f"--from-checkpoint {step}: {typed} has no whole checkpoint of that step; allowed are "
                f"{', '.join(map(str, (*whole, 0)))} (0: the first model)"
            )
        if gone := check.missing_groups(step):
            raise ConfigError(
                f"--from-checkpoint {step}: {gone[0]} is gone, which the repeated steps need; the lowest step with all its "
                f"records is {min(whole, default=0)}"
            )
        names = [f"checkpoints/step-{number:06d}" for number in found if number > step or number not in whole]
        lines = [f"{name} is moved to {quarantine(run, name)}" for name in names]
        drop_dead_link(run)
        return lines
    finally:
        lock.release()

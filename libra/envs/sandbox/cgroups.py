"""A control group around one sandbox: bounds on processes, memory and CPU that also bind root.

It uses version 1 hierarchies (`/sys/fs/cgroup/pids`, `memory`, `cpu`), the delegated version 2
group of this process, or as root the version 2 root. On other machines only the limits of each
process apply.
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
EXTRA_PROCESSES = 8
"""Processes of the sandbox itself: bubblewrap and the supervisor."""
PERIOD_US = 100_000
"""Period of a group's share of the cores."""
KILL_S = 20.0
"""Longest seconds for the end of killed processes: the kernel frees some GiB slowly on a loaded
machine."""


@dataclass(frozen=True, slots=True)
class ControlGroup:
    """Directories of one group, empty if this process cannot make groups."""

    places: tuple[Path, ...]

    @classmethod
    def make(cls, processes: int, memory_bytes: int, cpus: float) -> ControlGroup:
        """A new group with these bounds."""
        name = f"libra-{os.getpid()}-{secrets.token_hex(6)}"
        made: list[Path] = []
        for parent in _parents():
            place = parent / name
            try:
                place.mkdir()
                made.append(place)
                for file, value in (
                    ("pids.max", processes + EXTRA_PROCESSES),
                    ("memory.max", memory_bytes),
                    ("memory.swap.max", 0),
                    ("memory.limit_in_bytes", memory_bytes),
                    ("cpu.max", f"{round(cpus * PERIOD_US)} {PERIOD_US}"),
                    ("cpu.cfs_period_us", PERIOD_US),
                    ("cpu.cfs_quota_us", round(cpus * PERIOD_US)),
                ):
                    if (place / file).exists():
                        (place / file).write_text(str(value))
            except OSError:
                cls(tuple(made)).remove()
                return cls(())
        return cls(tuple(made))

    def around(self, command: list[str]) -> list[str]:
        """A command that enters the group and then runs ``command``."""
        if not self.places:
            return command
        enter = "; ".join(f'echo $$ > "${{{index}}}" || exit 97' for index in range(1, len(self.places) + 1))
        script = f'{enter}; shift {len(self.places)}; exec "$@"'
        return ["/bin/sh", "-c", script, "sh", *(str(place / "cgroup.procs") for place in self.places), *command]

    def kill(self) -> None:
        """Kill the group's processes until no thread is left, for at most `KILL_S`."""
        until_s = time.monotonic() + KILL_S
        while self._has_threads() and time.monotonic() < until_s:
            for process in (int(word) for place in self.places for word in _read(place / "cgroup.procs").split()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, 9)
            time.sleep(0.005)

    def remove(self) -> None:
        """Delete this group; one that still has a process stays."""
        for place in self.places:
            with contextlib.suppress(OSError):
                place.rmdir()

    def _has_threads(self) -> bool:
        """Whether a thread is left: it keeps the group when its ending process is no longer
        listed."""
        return any(_read(place / file) for place in self.places for file in ("tasks", "cgroup.threads"))


def can_make_groups() -> bool:
    """Whether this process can make groups."""
    return bool(_parents())


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


@functools.cache
def _parents() -> tuple[Path, ...]:
    found = [ROOT / kind for kind in ("pids", "memory") if os.access(ROOT / kind / "cgroup.procs", os.W_OK)]
    if found:
        cpu = ROOT / "cpu"
        bounded = (cpu / "cpu.cfs_quota_us").exists() and os.access(cpu / "cgroup.procs", os.W_OK)
        return (*found, cpu) if bounded else tuple(found)
    own = [line[3:].strip() for line in _read(Path("/proc/self/cgroup")).splitlines() if line.startswith("0::")]
    for place in (*(ROOT / path.lstrip("/") for path in own), ROOT):
        if {"pids", "memory"} <= set(_read(place / "cgroup.subtree_control").split()) and os.access(place, os.W_OK):
            return (place,)
    return ()

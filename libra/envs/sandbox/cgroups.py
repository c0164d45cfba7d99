"""A control group around one sandbox, where this process may make one: a bound on processes and memory that also binds root.

Version 1 hierarchies (`/sys/fs/cgroup/pids`, `/sys/fs/cgroup/memory`) and a delegated version 2 group are used; elsewhere there is
none, and limits of the processes themselves are all there is.
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
"""Of the sandbox itself: bubblewrap and the supervisor."""


@dataclass(frozen=True, slots=True)
class ControlGroup:
    """Directories of one group; empty where none can be made."""

    places: tuple[Path, ...]

    @classmethod
    def make(cls, processes: int, memory_bytes: int) -> ControlGroup:
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
                ):
                    if (place / file).exists():
                        (place / file).write_text(str(value))
            except OSError:
                cls(tuple(made)).remove()
                return cls(())
        return cls(tuple(made))

    def around(self, command: list[str]) -> list[str]:
        """``command`` as one that enters the group before it runs."""
        if not self.places:
            return command
        enter = "; ".join(f'echo $$ > "${{{index}}}" || exit 97' for index in range(1, len(self.places) + 1))
        script = f'{enter}; shift {len(self.places)}; exec "$@"'
        return ["/bin/sh", "-c", script, "sh", *(str(place / "cgroup.procs") for place in self.places), *command]

    def kill(self) -> None:
        """Kill every process in the group, again until there is none."""
        for _ in range(100):
            processes = [int(word) for place in self.places for word in _read(place / "cgroup.procs").split()]
            if not processes:
                return
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, 9)
            time.sleep(0.005)

    def remove(self) -> None:
        """Delete the group; what is left of it after that is the system's."""
        for place in self.places:
            with contextlib.suppress(OSError):
                place.rmdir()


def can_make_groups() -> bool:
    """Whether a group can be made here."""
    return bool(_parents())


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


@functools.cache
def _parents() -> tuple[Path, ...]:
    """Where groups can be made."""
    found = [ROOT / kind for kind in ("pids", "memory") if os.access(ROOT / kind / "cgroup.procs", os.W_OK)]
    if found:
        return tuple(found)
    for line in _read(Path("/proc/self/cgroup")).splitlines():
        if line.startswith("0::"):
            own = ROOT / line[3:].strip().lstrip("/")
            if {"pids", "memory"} <= set(_read(own / "cgroup.subtree_control").split()) and os.access(own, os.W_OK):
                return (own,)
    return ()

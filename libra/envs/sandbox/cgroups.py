"""A control group around one sandbox, where this process may make one: bounds on processes, memory and CPU that also bind root.

Version 1 hierarchies (`/sys/fs/cgroup/pids`, `memory`, `cpu`), the version 2 group of this process where it was delegated, and as
root the version 2 root are used. On other machines there is no control group, and only the limits of each process
apply.
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import threading
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
EXTRA_PROCESSES = 8
"""Of the sandbox itself: bubblewrap and the supervisor."""
PERIOD_US = 100_000
"""In which a group may use its share of the cores."""
KILL_S = 20.0
"""Seconds in which killed processes end. The kernel takes half a second to free some GiB, and longer on a loaded machine."""
_left: set[Path] = set()
_removing = threading.Lock()


@dataclass(frozen=True, slots=True)
class ControlGroup:
    """Directories of one group; empty if none can be made."""

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
        """``command`` as one that enters the group before it runs."""
        if not self.places:
            return command
        enter = "; ".join(f'echo $$ > "${{{index}}}" || exit 97' for index in range(1, len(self.places) + 1))
        script = f'{enter}; shift {len(self.places)}; exec "$@"'
        return ["/bin/sh", "-c", script, "sh", *(str(place / "cgroup.procs") for place in self.places), *command]

    def kill(self) -> None:
        """Kill every process in the group, again until no thread of one is left, for `KILL_S` at most."""
        until_s = time.monotonic() + KILL_S
        while self._has_threads() and time.monotonic() < until_s:
            for process in (int(word) for place in self.places for word in _read(place / "cgroup.procs").split()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, 9)
            time.sleep(0.005)

    def remove(self) -> None:
        """Delete the group, and those that could not be deleted before; one in which something still ends is deleted with a later
        one."""
        with _removing:
            _left.update(self.places)
            for place in tuple(_left):
                try:
                    place.rmdir()
                except FileNotFoundError:
                    pass
                except OSError:
                    continue
                _left.discard(place)

    def _has_threads(self) -> bool:
        """Whether a thread is left; processes that end are not listed any more, while a thread of theirs keeps the group."""
        return any(_read(place / file) for place in self.places for file in ("tasks", "cgroup.threads"))


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
        cpu = ROOT / "cpu"
        bounded = (cpu / "cpu.cfs_quota_us").exists() and os.access(cpu / "cgroup.procs", os.W_OK)
        return (*found, cpu) if bounded else tuple(found)
    own = [line[3:].strip() for line in _read(Path("/proc/self/cgroup")).splitlines() if line.startswith("0::")]
    for place in (*(ROOT / path.lstrip("/") for path in own), ROOT):
        if {"pids", "memory"} <= set(_read(place / "cgroup.subtree_control").split()) and os.access(place, os.W_OK):
            return (place,)
    return ()

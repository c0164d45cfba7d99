"""Processes below this one: those that it started, and on Linux what these leave behind, in whatever session.

For programs that stand between Libra and what it starts, and kill all of that. They run where Libra is not installed, and read this
file by its name (`libra.agents.runner`, `libra.envs.mcp_keeper`): it needs Python's standard library only.

Invariants
----------
1. Only children are killed, whose pids are theirs until this process reaps them.
"""

# mypy: disallow_untyped_defs=False, disallow_untyped_calls=False, check_untyped_defs=False
import contextlib
import ctypes
import os
import signal
import time

PR_SET_CHILD_SUBREAPER = 36


def prctl(option, value):
    """prctl(2) on Linux; nothing elsewhere."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(option, value)


def adopt():
    """From now on what a process below this one leaves behind is a child of this one (Linux)."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)


def own_children():
    """Pids of this process's children: those that it forked, and those that came to it. Empty where /proc does not tell."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as file:  # noqa: PTH123
            return [int(word) for word in file.read().split()]
    except OSError:  # not Linux: nothing comes to it
        return []


def has_ended(child):
    """Whether a child has ended, which is not reaped: its pid, and that of its group, are its own until then. Others are."""
    while True:
        found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if found is None or found.si_pid == child:
            return found is not None
        os.waitpid(found.si_pid, 0)


def kill(pid):
    """Kill a child of this process, which has not been reaped."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


def end_children(within_s, child=0):
    """Kill the children of this process, and what comes to it from them, for at most so many seconds.

    Returns the wait status of ``child``, one of them (0: of none), and whether no process is left.
    """
    status, until_s = 0, time.monotonic() + within_s
    while time.monotonic() < until_s:
        for pid in {child, *own_children()} - {0}:
            kill(pid)
        try:
            pid = -1
            while pid:
                pid, ended_with = os.waitpid(-1, os.WNOHANG)
                if pid and pid == child:
                    status, child = ended_with, 0
        except ChildProcessError:
            return status, True
        time.sleep(0.001)
    return status, False

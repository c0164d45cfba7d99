"""Child processes, and on Linux the processes that they leave behind, in any session.

``python keeper.py PROGRAM WORD ...`` starts a program that reads its standard input, and kills all
its processes at its end. The program must end within `GRACE_S` after its input was closed, as by
the death of its starter, and within `TERM_S` after the keeper got a signal of `ENDS`. Agents' own
Pythons load this file by its path, so it needs only the standard library.

Invariants
----------
1. Only unreaped children are killed, because only their pids cannot belong to another process.
"""

# mypy: disallow_untyped_defs=False, disallow_untyped_calls=False, check_untyped_defs=False
import contextlib
import ctypes
import os
import select
import signal
import sys
import time

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
GRACE_S, TERM_S, KILL_S = 5.0, 1.0, 0.5
"""`KILL_S` is for processes that a program left. A sender of SIGTERM kills the keeper after 2 s, which
`TERM_S` + `KILL_S` must not exceed."""
ENDS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def prctl(option, value):
    """prctl(2) on Linux; nothing elsewhere."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(option, value)


def adopt():
    """Make this process adopt the processes that a descendant leaves behind (Linux)."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)


def end_with(parent):
    """Have the kernel kill this process when its parent ends (Linux)."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def own_children():
    """Pids of this process's children, adopted ones included; empty outside Linux."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as file:  # noqa: PTH123
            return [int(word) for word in file.read().split()]
    except OSError:
        return []


def kill(pid, *, group=False):
    """Kill an unreaped child, or its group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        (os.killpg if group else os.kill)(pid, signal.SIGKILL)


def end_children(within_s, child=0):
    """Kill all children, adopted ones included; outside Linux only ``child`` is known."""
    until_s = time.monotonic() + within_s
    while time.monotonic() < until_s:
        for pid in {child, *own_children()} - {0}:
            kill(pid)
        try:
            while pid := os.waitpid(-1, os.WNOHANG)[0]:
                child = 0 if pid == child else child
        except ChildProcessError:
            return
        time.sleep(0.001)


def started(words):
    pid = os.fork()
    if pid == 0:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, *ENDS):
            signal.signal(number, signal.SIG_DFL)
        try:
            os.execvp(words[0], words)
        except OSError as error:
            os.write(2, f"{words[0]}: {error.strerror}\n".encode())
        finally:
            os._exit(127)
    return pid


def has_ended(child):
    """Whether a child has ended; it is not reaped, so its pid stays valid. Others are reaped."""
    while True:
        found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if found is None or found.si_pid == child:
            return found is not None
        os.waitpid(found.si_pid, 0)


def keep(words):
    adopt()
    wake, write = os.pipe()  # a byte for each signal
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write)
    for number in (signal.SIGCHLD, *ENDS):
        signal.signal(number, lambda *_: None)
    program = started(words)
    os.close(1)  # readers see the program's end
    poll = select.poll()
    poll.register(wake, select.POLLIN)
    poll.register(0, 0)  # for its end alone
    until_s = float("inf")
    while not has_ended(program) and (left_s := until_s - time.monotonic()) > 0:
        for descriptor, _ in poll.poll(None if left_s == float("inf") else 1000 * left_s + 1):
            if descriptor == 0:
                poll.unregister(0)
                until_s = min(until_s, time.monotonic() + GRACE_S)
            elif not set(ENDS).isdisjoint(os.read(wake, 4096)):
                until_s = min(until_s, time.monotonic() + TERM_S)
    end_children(KILL_S, program)


if __name__ == "__main__":
    keep(sys.argv[1:])

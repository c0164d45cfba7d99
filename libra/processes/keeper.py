"""Processes below this one: those that it started, and on Linux what these leave behind, in whatever session.

``python keeper.py PROGRAM WORD ...`` starts a program that reads its standard input, and kills all that it
started once it has ended. The program has `GRACE_S` to end once the other end of its input is closed, as
by the death of whoever started it, and `TERM_S`
once the keeper gets one of `ENDS`. Agents' own Pythons read this file by its name: it needs the standard library only.

Invariants
----------
1. Only children are killed, whose pids are theirs until this process reaps them.
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
"""The last is for what a program left behind. Whoever sends SIGTERM waits two seconds, and kills the keeper then."""
ENDS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def prctl(option, value):
    """prctl(2) on Linux; nothing elsewhere."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(option, value)


def adopt():
    """From now on what a process below this one leaves behind is a child of this one (Linux)."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)


def end_with(parent):
    """Have this process killed when its parent ends, however that does (Linux); elsewhere it ends by itself."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


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


def kill(pid, *, group=False):
    """Kill a child of this process, which has not been reaped, or its group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        (os.killpg if group else os.kill)(pid, signal.SIGKILL)


def end_children(within_s, child=0):
    """Kill the children of this process, and what comes to it from them, for at most so many seconds. ``child`` is one where /proc
    does not tell."""
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


def wake_pipe(*signals):
    """A pipe in which a byte comes with each of these signals, and whenever a child of this process ends."""
    wake, write = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write)
    for number in (signal.SIGCHLD, *signals):
        signal.signal(number, lambda *_: None)
    return wake


def started(words):
    """The pid of a program."""
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


def keep(words):
    """Until a program has ended, with all that it started."""
    adopt()
    wake = wake_pipe(*ENDS)
    program = started(words)
    os.close(1)  # whose end tells that the program has ended
    poll = select.poll()
    poll.register(wake, select.POLLIN)
    poll.register(0, 0)  # told by its end, which needs no reading
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

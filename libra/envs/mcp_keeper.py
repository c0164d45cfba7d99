"""Starts a program that reads its standard input, and kills all that it started once it has ended.

It needs Python's standard library only: ``python mcp_keeper.py PROGRAM WORD ...``. What the program starts and leaves behind, in
whatever session, comes to this process (Linux), which kills it. The program has `GRACE_S` to end once the other end of its input is
closed, as by the death of whoever started it, and `TERM_S` once this process is told to end (`ENDS`).
"""

# mypy: disallow_untyped_defs=False, disallow_untyped_calls=False, check_untyped_defs=False
import contextlib
import ctypes
import os
import select
import signal
import sys
import time

GRACE_S, TERM_S, KILL_S = 5.0, 1.0, 0.5
"""The last is for the processes that it left behind. Whoever sends SIGTERM waits for two seconds, and kills this process then."""
ENDS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
PR_SET_CHILD_SUBREAPER = 36


def started(words):
    """The pid of the program."""
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
    """Until the program has ended, with all that it started."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    wake, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write)
    for number in (signal.SIGCHLD, *ENDS):
        signal.signal(number, lambda *_: None)
    program = started(words)
    os.close(1)  # whose end tells that the program has ended
    poll = select.poll()
    poll.register(wake, select.POLLIN)
    poll.register(0, 0)  # told by its end, which needs no reading
    until_s = None
    while not has_ended(program):
        left_s = None if until_s is None else until_s - time.monotonic()
        if left_s is not None and left_s <= 0:
            break
        for descriptor, _ in poll.poll(None if left_s is None else 1000 * left_s + 1):
            if descriptor == 0:
                poll.unregister(0)
                until_s = sooner(until_s, GRACE_S)
            elif not set(ENDS).isdisjoint(os.read(wake, 4096)):
                until_s = sooner(until_s, TERM_S)
    end_children(program)


def sooner(until_s, seconds):
    """The earlier of a time and so many seconds from now."""
    return min(until_s or float("inf"), time.monotonic() + seconds)


def has_ended(program):
    """Whether the program has ended, which is not reaped: its pid is its own until then. Others are."""
    while True:
        found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if found is None or found.si_pid == program:
            return found is not None
        os.waitpid(found.si_pid, 0)


def end_children(program):
    """Kill the program, and whatever comes to this process from it."""
    until_s = time.monotonic() + KILL_S
    while time.monotonic() < until_s:
        for pid in {program, *own_children()} - {0}:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        try:
            while pid := os.waitpid(-1, os.WNOHANG)[0]:
                program = 0 if pid == program else program
        except ChildProcessError:
            return
        time.sleep(0.001)


def own_children():
    """Children of this process: the program, and those that came to it."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as file:  # noqa: PTH123
            return [int(word) for word in file.read().split()]
    except OSError:  # not Linux: nothing comes to it
        return []


if __name__ == "__main__":
    keep(sys.argv[1:])

"""Starts a program that reads its standard input, and kills all that it started once it has ended.

It needs Python's standard library only: ``python mcp_keeper.py PROGRAM WORD ...``. What the program starts and leaves behind, in
whatever session, comes to this process (Linux), which kills it. The program has `GRACE_S` to end once the other end of its input is
closed, as by the death of whoever started it, and `TERM_S` once this process is told to end (`ENDS`).
"""

# mypy: disallow_untyped_defs=False, disallow_untyped_calls=False, check_untyped_defs=False
import importlib.util
import os
import select
import signal
import sys
import time

_FOUND = importlib.util.spec_from_file_location("descendants", f"{os.path.dirname(__file__)}/../descendants.py")  # noqa: PTH120
assert _FOUND is not None and _FOUND.loader is not None
descendants = importlib.util.module_from_spec(_FOUND)  # by its file: Libra is not installed here
_FOUND.loader.exec_module(descendants)

GRACE_S, TERM_S, KILL_S = 5.0, 1.0, 0.5
"""The last is for the processes that it left behind. Whoever sends SIGTERM waits for two seconds, and kills this process then."""
ENDS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


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
    descendants.adopt()
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
    while not descendants.has_ended(program):
        left_s = None if until_s is None else until_s - time.monotonic()
        if left_s is not None and left_s <= 0:
            break
        for descriptor, _ in poll.poll(None if left_s is None else 1000 * left_s + 1):
            if descriptor == 0:
                poll.unregister(0)
                until_s = sooner(until_s, GRACE_S)
            elif not set(ENDS).isdisjoint(os.read(wake, 4096)):
                until_s = sooner(until_s, TERM_S)
    descendants.end_children(KILL_S, program)


def sooner(until_s, seconds):
    """The earlier of a time and so many seconds from now."""
    return min(until_s or float("inf"), time.monotonic() + seconds)


if __name__ == "__main__":
    keep(sys.argv[1:])

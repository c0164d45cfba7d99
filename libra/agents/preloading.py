"""Modules that agents import while they work, imported once for all that come after: clients import much at their first request.

It needs Python's standard library only, and is read by its file's name in the agents' environment (`libra.agents.runner`).

Invariants
----------
1. Only modules of the standard library and of installed packages that the function's module has imported a part of: a module of
   the user's own may read the environment, which is an agent's.
2. A process of its own has imported them before, and has no thread, open file or process of it.
"""

# mypy: disallow_untyped_defs=False, disallow_untyped_calls=False, check_untyped_defs=False
import contextlib
import gc
import importlib
import os
import platform
import signal
import sys
import sysconfig
import threading

EAGER = {"DEFER_PYDANTIC_BUILD": "false"}
"""Variables for the import alone, where they are not set: with it the clients of OpenAI and Anthropic make the validators of their
types as they are imported, which otherwise each agent does at its first request."""
TRIAL_S = 120
"""Seconds that the trial may take; then it is killed, and nothing is imported."""


def beyond(before):
    """Names of the modules that were imported since ``before`` was the set of them, in that order; those that qualify."""
    return [name for name in list(sys.modules) if name not in before and qualifies(name, before)]


def qualifies(name, before):
    """Whether a module is of the standard library, or of an installed package of which a part was imported."""
    top = name.partition(".")[0]
    if top in sys.stdlib_module_names:
        return True
    file = getattr(sys.modules[name], "__file__", None) or ""
    return top in before and file.startswith((sysconfig.get_path("purelib"), sysconfig.get_path("platlib")))


def import_all(names):
    """Import what can be imported of ``names``."""
    with eager():
        for name in names:
            with contextlib.suppress(Exception):  # it may be no module of a file
                importlib.import_module(name)
    platform.platform()  # starts a program, and keeps what that says; clients tell it with each request
    share()


@contextlib.contextmanager
def eager():
    """Import with `EAGER`."""
    added = EAGER.keys() - os.environ.keys()
    os.environ.update({name: EAGER[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def share():
    """Keep collections of garbage from what is there: their marks would copy its pages in each fork."""
    gc.collect()
    gc.freeze()


def try_all(names):
    """In a process of its own: import ``names``, and end with status 0 if that left nothing that forks cannot share."""
    status = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.alarm(TRIAL_S)
        before = opened()
        import_all(names)
        if threading.active_count() == 1 and tasks() == 1 and opened() == before:
            status = 0
    finally:
        os._exit(status)


def opened():
    """Open files of this process; empty where /proc does not tell."""
    found = {}
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
            with contextlib.suppress(OSError):  # that of the list itself
                found[name] = os.readlink(f"/proc/self/fd/{name}")  # noqa: PTH115
    return found


def tasks():
    """Threads of this process and its children; 1 where /proc does not tell."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as file:  # noqa: PTH123
            return len(os.listdir("/proc/self/task")) + len(file.read().split())  # noqa: PTH208
    except OSError:
        return 1

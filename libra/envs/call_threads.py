"""Threads for tools and graders that are not coroutines: reused, one call at a time each, and abandoned where they hang.

Invariants
----------
1. A call never waits for another: where every thread is busy, or hangs, a new one is started.
2. At most ``KEPT_IDLE`` idle threads are kept. They are daemons: none keeps the process from exiting.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from contextvars import copy_context
from functools import partial
from typing import Self

from libra.errors import ToolFault

KEPT_IDLE = 64
"""Idle threads kept for the next calls: starting one costs more than most rewards."""
IDLE = "libra-call-idle"

_idle: list[CallThread] = []
_hung: set[CallThread] = set()
_lock = threading.Lock()


class NoThread(ToolFault):
    """The machine starts no further thread; the call was not begun."""


class CallThread(threading.Thread):
    """A thread that runs calls one after the other."""

    def __init__(self) -> None:
        super().__init__(name=IDLE, daemon=True)
        self._calls: queue.SimpleQueue[tuple[Callable[[], None], str]] = queue.SimpleQueue()

    @classmethod
    def call(cls, work: Callable[[], None], name: str) -> Self:
        """Run ``work``, which must not raise, on an idle thread or a new one, in the context of the caller; returns the thread,
        called ``name`` meanwhile. `NoThread`."""
        with _lock:
            thread = _idle.pop() if _idle else None
        if thread is None:
            thread = cls()
            try:
                thread.start()
            except RuntimeError as error:
                raise NoThread(f"{name}: {error}") from error
        thread._calls.put((partial(copy_context().run, work), name))
        assert isinstance(thread, cls)
        return thread

    def run(self) -> None:
        """Run calls, until there are enough idle threads without this one."""
        while True:
            work, self.name = self._calls.get()
            work()
            self.name = IDLE
            del work  # it holds the arguments of the call
            with _lock:
                _hung.discard(self)
                if len(_idle) >= KEPT_IDLE:
                    return
                _idle.append(self)

    def abandon(self) -> None:
        """Count the current call as hung until it ends."""
        with _lock:
            if self.name != IDLE:
                _hung.add(self)


def hung_threads() -> int:
    """Threads whose call has outlived its time-out and still runs."""
    with _lock:
        return len(_hung)

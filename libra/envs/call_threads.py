"""Threads for tools and graders that are not coroutines: one call at a time each, used again, left behind where they hang.

Invariants
----------
1. A call never waits for another: where every thread is busy, or hangs, a new one is started.
2. At most ``KEPT_IDLE`` idle threads are kept. They are daemons: none keeps the process from exiting.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Self

KEPT_IDLE = 64
"""Idle threads kept for the next calls; starting one costs a grader more than most rewards do."""
IDLE = "libra-call-idle"

_idle: list[CallThread] = []
_hung: set[CallThread] = set()
_lock = threading.Lock()


class CallThread(threading.Thread):
    """A thread that runs what `run_in_thread` gives it."""

    def __init__(self) -> None:
        super().__init__(name=IDLE, daemon=True)
        self._calls: queue.SimpleQueue[tuple[Callable[[], None], str]] = queue.SimpleQueue()

    @classmethod
    def call(cls, work: Callable[[], None], name: str) -> Self:
        """Run ``work``, which does not raise, on an idle thread or a new one; the thread, named so meanwhile."""
        with _lock:
            thread = _idle.pop() if _idle else None
        if thread is None:
            thread = cls()
            thread.start()
        thread._calls.put((work, name))
        assert isinstance(thread, cls)
        return thread

    def run(self) -> None:
        """Call after call, until there are enough idle threads without this one."""
        while True:
            work, self.name = self._calls.get()
            work()
            self.name = IDLE
            del work  # it holds what the call was given
            with _lock:
                _hung.discard(self)
                if len(_idle) >= KEPT_IDLE:
                    return
                _idle.append(self)

    def left_behind(self) -> None:
        """Nobody waits for the present call any more; it counts as hung until it ends."""
        with _lock:
            if self.name != IDLE:
                _hung.add(self)


def hung_threads() -> int:
    """Threads whose call outlived its time-out and runs still."""
    with _lock:
        return len(_hung)

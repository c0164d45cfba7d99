"""An event loop on a thread of its own, in which coroutines of other loops run.

Invariants
1. Every coroutine handed to `EngineLoop.ask` ends: with its result, its error, or EngineError once the loop is closed.
2. After `EngineLoop.close` nothing runs on the thread.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from libra.errors import EngineError

T = TypeVar("T")


class EngineLoop:
    """The loop of the engine ``name``; ``at_end`` runs in it when it closes, before its tasks are cancelled."""

    def __init__(self, name: str, at_end: Callable[[], None]) -> None:
        self._name, self._at_end = name, at_end
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="libra-vllm", daemon=True)
        self._entry = threading.Lock()  # between callers and the end of the loop
        self._tasks: set[asyncio.Task[Any]] = set()
        self.closing = self._ended = False

    def start(self) -> None:
        """Start the thread; EngineError if it was started before."""
        if self._loop is not None:
            raise EngineError(f"{self._name}: this engine was started before; create a new one")
        self._loop = asyncio.new_event_loop()
        self._thread.start()

    def check_open(self) -> asyncio.AbstractEventLoop:
        """The loop; EngineError before `start` and after `close`."""
        if self._loop is None or self.closing or self._ended:
            raise EngineError(f"{self._name}: the engine is {'not started' if self._loop is None else 'closed'}")
        return self._loop

    async def ask(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in this loop and await it in the caller's."""
        with self._entry:
            try:
                answer = asyncio.run_coroutine_threadsafe(work, self.check_open())
            except EngineError:
                work.close()
                raise
        try:
            return await asyncio.wrap_future(answer)
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if self.closing and answer.cancelled() and not (caller and caller.cancelling()):
                raise EngineError(f"{self._name}: the engine was closed") from None
            raise

    def begin(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Start a task; called in this loop."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self) -> None:
        """End all tasks and join the thread; may be called twice."""
        if self._loop is None:
            return
        with self._entry:
            first, self.closing = not self.closing, True
            if first and not self._ended:  # a second stop would interrupt `_end`
                self._loop.call_soon_threadsafe(self._loop.stop)
        await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        assert self._loop is not None, "the thread starts after the loop"
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            with self._entry:
                self._ended = True
            self._loop.run_until_complete(self._end())
        finally:
            self._loop.close()

    async def _end(self) -> None:
        self._at_end()
        for _ in range(3):  # the latest requests start, are cancelled, and answer
            left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)

"""The threads of one batch of a service: nothing can stop them, so a device is theirs until they have returned."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any


class BatchThreads:
    """Calls of a batch that run in threads; except in `noted` calls, of the event loop alone."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._running = 0
        self._then: Callable[[], None] | None = None

    def noted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, for one call in a thread, which begins now."""
        self._running += 1

        def call(*args: Any, **more: Any) -> Any:
            try:
                return function(*args, **more)
            finally:
                with contextlib.suppress(RuntimeError):  # the loop has closed, and with it the worker
                    self._loop.call_soon_threadsafe(self._returned)

        return call

    def when_returned(self, then: Callable[[], None]) -> None:
        """Call ``then`` when all have returned; at once where they have."""
        if self._running:
            self._then = then
        else:
            then()

    def _returned(self) -> None:
        self._running -= 1
        if not self._running and self._then is not None:
            self._then()

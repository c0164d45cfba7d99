"""The threads of one batch of a service: nothing can stop them, so a device is theirs until they have returned."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from libra.envs.tool_calls import NoThread, run_bounded


class BatchThreads:
    """Calls of a batch that run in threads; except in these, of the event loop alone."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._running = 0
        self._then: Callable[[], None] | None = None

    async def run(
        self, function: Callable[..., Any], timeout_s: float, name: str, **arguments: Any
    ) -> tuple[Any, BaseException | None] | None:
        """What `libra.envs.tool_calls.run_bounded` gives of ``function(**arguments)`` in a thread."""
        self._running += 1

        def call(**more: Any) -> Any:
            try:
                return function(**more)
            finally:
                with contextlib.suppress(RuntimeError):  # the loop has closed, and with it the worker
                    self._loop.call_soon_threadsafe(self._returned)

        outcome = await run_bounded(call, arguments, timeout_s, is_async=False, name=name)
        if outcome is not None and isinstance(outcome[1], NoThread):
            self._returned()
        return outcome

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

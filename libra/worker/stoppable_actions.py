"""Actions of a worker that are stopped when the scheduler revokes their lease."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Coroutine
from typing import Any

from libra.errors import ActionRevoked

KEPT = 1024
"""Revocations that are kept, the newest: each for an action that has yet to begin here, or that had just ended, whose revocation
stays until the trajectory's next action here."""


class StoppableActions:
    """One per quantum runner."""

    def __init__(self) -> None:
        self._running: dict[str, tuple[int, asyncio.Future[None]]] = {}
        self._revoked: OrderedDict[str, int] = OrderedDict()

    def revoke(self, key: str, quantum: int, **_: Any) -> None:
        """Stop quantum ``quantum`` of a task, now or as soon as it begins; one that has ended stays as it is."""
        self._revoked[key] = quantum
        while len(self._revoked) > KEPT:
            self._revoked.popitem(last=False)
        at, action = self._running.get(key, (None, None))
        if action is not None and at == quantum:
            action.cancel()

    async def run(self, key: str, quantum: int, action: Coroutine[Any, Any, None]) -> None:
        """Await ``action``; ActionRevoked if it was stopped before its end."""
        task = asyncio.ensure_future(action)
        self._running[key] = quantum, task
        if self._revoked.get(key) == quantum:
            task.cancel()
        try:
            await task
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if self._revoked.get(key) != quantum or (current is not None and current.cancelling()):
                raise
            raise ActionRevoked(f"{key}: quantum {quantum} was stopped, and is called again") from None
        finally:
            del self._running[key]
            self._revoked.pop(key, None)

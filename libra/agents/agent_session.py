"""The requests of one trajectory's agent in order, until the agent has ended. Without HTTP.

Invariants
----------
1. A request has one answer, however many connections wait for it: a retry joins the open request,
   or gets the earlier answer.
2. A request for which no connection waits is dropped, unless the model already writes its answer.
3. A session takes no request after its end.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from libra.agents.messages import ModelRequest, Reply
from libra.agents.request_bodies import Known
from libra.errors import RequestRefused

KEPT_REPLIES = 64
"""Answers that a session keeps for retries."""


def as_float(value: float) -> float:
    """A JSON number as a float; an integer too large for a float becomes infinite."""
    try:
        return float(value)
    except OverflowError:
        return math.inf


@dataclass(slots=True, eq=False)
class Pending:
    """A request, the number of waiting connections, and whether the model writes the answer."""

    request: ModelRequest
    answer: asyncio.Future[Reply]
    waiting: int = 1
    taken: bool = False

    def resolve(self, reply: Reply) -> None:
        """Answer the request."""
        if not self.answer.done():
            self.answer.set_result(reply)

    def refuse(self, error: RequestRefused) -> None:
        """Answer the request with an error."""
        if not self.answer.done():
            self.answer.set_exception(error)
            self.answer.exception()  # marks the exception as retrieved, if no connection waits


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of an agent: result or error; ``lost`` if the program that runs agents failed."""

    result: Any = None
    error: str | None = None
    lost: bool = False


@dataclass(slots=True, eq=False)
class Session:
    """The requests of one agent; ``name`` is its trajectory."""

    name: str
    max_model_len: int
    reward: float | None = None
    ended: Ended | None = None
    known: Known = field(default_factory=Known)
    _queue: deque[Pending] = field(default_factory=deque)
    _open: list[Pending] = field(default_factory=list)
    _answered: deque[tuple[bytes, Reply]] = field(default_factory=lambda: deque(maxlen=KEPT_REPLIES))
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    # ---------------------------------------------------------------- for the gateway

    def take(self, request: ModelRequest, *, retry: bool) -> Pending:
        """Take a request; ``retry`` joins an equal open request, or gets the earlier answer."""
        if self.ended is not None:
            raise RequestRefused(f"{self.name} has ended", status=409, code="trajectory_ended")
        if retry:
            for pending in self._open:
                if pending.request.fingerprint == request.fingerprint and not pending.answer.done():
                    pending.waiting += 1
                    return pending
        pending = Pending(request, asyncio.get_running_loop().create_future())
        if retry and (known := [reply for key, reply in self._answered if key == request.fingerprint]):
            pending.taken = True
            pending.resolve(known[-1])
            return pending
        self._open.append(pending)
        self._queue.append(pending)
        self._changed.set()
        return pending

    def leave(self, pending: Pending) -> None:
        """A connection stops waiting for a request."""
        pending.waiting -= 1
        if pending.answer.done() and pending in self._open:
            self._open.remove(pending)

    def end(self, ended: Ended) -> None:
        """Record the agent's end; only the first call counts."""
        if self.ended is None:
            self.ended = ended
            self._changed.set()

    # ---------------------------------------------------------------- for the trajectory

    async def next(self, timeout_s: float) -> Pending | Ended:
        """The next request, or the agent's end; TimeoutError after ``timeout_s``."""
        async with asyncio.timeout(timeout_s):
            while (event := self._here()) is None:
                self._changed.clear()
                await self._changed.wait()
        return event

    def _here(self) -> Pending | Ended | None:
        while self._queue:
            pending = self._queue.popleft()
            if pending.waiting > 0:
                pending.taken = True
                return pending
            self._open.remove(pending)
        return self.ended

    def answered(self, pending: Pending, reply: Reply) -> None:
        """Answer a request that `next` gave."""
        self._answered.append((pending.request.fingerprint, reply))
        pending.resolve(reply)
        if pending.waiting <= 0 and pending in self._open:
            self._open.remove(pending)

    def close(self, error: str) -> None:
        """End the session and refuse its open requests."""
        self.end(Ended(None, error))
        for pending in self._open:
            pending.refuse(RequestRefused(error, status=409, code="trajectory_ended"))
        self._open.clear()
        self._queue.clear()


LONG = 32 << 10
"""Characters or bytes from which `by_size` uses a thread."""
_THREADS = ThreadPoolExecutor(2, thread_name_prefix="libra-agents")


async def by_size(size: int, work: Callable[[], Any]) -> Any:
    """The value of ``work``, called here if ``size`` < `LONG`, else in one of two threads, in
    order."""
    if size < LONG:
        return work()
    return await asyncio.get_running_loop().run_in_executor(_THREADS, work)

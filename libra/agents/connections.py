"""Connections and requests of agents at the gateway, bounded so that none of them keeps another out.

Invariants
----------
1. Where there are as many connections as there may be, a new one takes the place of that which has been idle for longest. One that
   has a request under way gives way to none.
2. A request's head comes within `HEAD_S`, in at most `HEAD_BYTES`, or its connection ends; so does one that is idle for `IDLE_S`.
3. A trajectory has at most as many requests under way as others have places left: alone half of all, with another one a third. What
   they have sent and is not answered is at most `HELD_BYTES`. Beyond that it is told to try again (status 503).
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

from libra.errors import RequestRefused

IDLE_S = 75
"""Seconds between two requests of a connection."""
HEAD_S = 20.0
"""Seconds from a connection's beginning, or the first byte of a later request, to the end of that request's head."""
HEAD_BYTES = 64 << 10
HELD_BYTES = 128 << 20
LEAST_PLACES = 16
"""Requests under way that a trajectory has in any case."""
_Base: Any = AutoHTTPProtocol


class Connection(_Base):  # type: ignore[misc]
    """One connection; ``idle`` has all of the server that have no request under way, the one that has been so for longest first."""

    def __init__(self, *args: Any, idle: OrderedDict[Connection, None], **named: Any) -> None:
        super().__init__(*args, **named)
        self._idle, self._head_bytes = idle, 0
        self._late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        while self._idle and len(self.connections) >= (self.limit_concurrency or 0):
            longest, _ = self._idle.popitem(last=False)
            self.connections.discard(longest)
            longest.transport.abort()
        self._wait_for_head()
        self._idle[self] = None

    def connection_lost(self, exc: Exception | None) -> None:
        self._idle.pop(self, None)
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._head_bytes += len(data)
        if not self._look() and not self.transport.is_closing():
            self._wait_for_head()
            if self.cycle is None and self._head_bytes > HEAD_BYTES:
                self.transport.abort()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._look()

    def _look(self) -> bool:
        """Whether a request is under way; if not, the connection is idle from now on."""
        busy = self.cycle is not None and not self.cycle.response_complete
        if busy:
            self._stop_waiting()
            self._idle.pop(self, None)
        elif not self.transport.is_closing():
            self._idle.setdefault(self)
        return bool(busy)

    def _wait_for_head(self) -> None:
        if self._late is None:
            self._late = self.loop.call_later(HEAD_S, self.transport.abort)

    def _stop_waiting(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None


class Places:
    """The requests under way of each trajectory, by a key of its own; ``most`` of all together."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._requests, self._bytes = Counter[bytes](), Counter[bytes]()

    @contextmanager
    def one(self, key: bytes) -> Iterator[Held]:
        """Take a place for a request until it is answered; RequestRefused if its trajectory may have no further one."""
        if self._requests[key] >= max(LEAST_PLACES, self._most - self._requests.total()):
            raise RequestRefused(
                f"this trajectory has {self._requests[key]} requests under way; try again",
                status=503,
                code="too_many_requests",
            )
        self._requests[key] += 1
        held = Held(self._bytes, key)
        try:
            yield held
        finally:
            for counts, count in ((self._requests, 1), (self._bytes, held.size)):
                counts[key] -= count
                if not counts[key]:
                    del counts[key]


class Held:
    """The bytes of one request."""

    def __init__(self, counts: Counter[bytes], key: bytes) -> None:
        self._counts, self._key, self.size = counts, key, 0

    def take(self, size: int) -> None:
        """Bytes of the request have come; RequestRefused if its trajectory has too many already."""
        self.size += size
        self._counts[self._key] += size
        if size and self._counts[self._key] > HELD_BYTES:
            raise RequestRefused(
                f"this trajectory's requests under way have more than {HELD_BYTES:,} bytes; try again",
                status=503,
                code="too_many_requests",
            )

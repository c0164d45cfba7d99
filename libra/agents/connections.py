"""Connections and requests of agents at the gateway, bounded so that none of them keeps another out.

Invariants
----------
1. Where there are as many connections as there may be, a new one takes the place of that which has been idle for longest. One that
   has a request under way gives way to none.
2. A request's head comes within `HEAD_S` and has at most `HEAD_BYTES` (and what came in one read with a request's end), or the
   connection ends; so does one with as many between two parts of a body, or after the last one, and one that is idle for `IDLE_S`,
   or on which the rest of an answered request's body takes that long.
3. A trajectory has at most as many requests under way as it leaves places for others (alone half of all, beside another such one a
   third), and `LEAST_PLACES` in any case. Their bodies have at most `HELD_BYTES`. Beyond that it is told to try again (status 503).
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import h11
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from libra.errors import RequestRefused

IDLE_S = 75
"""Seconds between two requests of a connection."""
HEAD_S = 20.0
"""Seconds from a connection's beginning, or the first byte of a later request, to the end of that request's head."""
HEAD_BYTES = 64 << 10
"""Bytes of a request's head, and of what stands between it and the end of the request before; of sizes and trailers of chunks."""
HELD_BYTES = 128 << 20
LEAST_PLACES = 16
"""Requests under way that a trajectory has in any case."""
_Base: Any = AutoHTTPProtocol


class Connection(_Base):  # type: ignore[misc]
    """One connection; ``idle`` has those of the server without a request under way, the one that is idle for longest first."""

    def __init__(self, *args: Any, idle: OrderedDict[Connection, None], **named: Any) -> None:
        super().__init__(*args, **named)
        self._idle = idle
        self._head_bytes = 0  # since the end of the last request, or the last part of a body
        self._in_body = False
        self._late: asyncio.TimerHandle | None = None
        self._awaited = ""

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        while self._idle and len(self.connections) >= (self.limit_concurrency or 0):
            longest, _ = self._idle.popitem(last=False)
            self.connections.discard(longest)
            longest.transport.abort()
        self._wait_for("head")
        self._idle[self] = None

    def connection_lost(self, exc: Exception | None) -> None:
        self._idle.pop(self, None)
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._head_bytes += len(data)
        super().data_received(data)
        if (conn := getattr(self, "conn", None)) is not None:  # h11, which makes none of the four calls below
            self._in_body = conn.their_state is h11.SEND_BODY
            self._head_bytes = len(conn.trailing_data[0]) if conn.their_state is h11.IDLE else 0
        busy = self._look()
        if self.transport.is_closing():
            return
        if self._head_bytes > HEAD_BYTES:
            self.transport.abort()
        elif not busy:
            self._wait_for("body" if self._in_body else "head" if self._head_bytes else "request")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_bytes = max(self._head_bytes, 1)  # it may have begun in the read that ended the request before it

    def on_headers_complete(self) -> None:
        self._in_body = True
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self._head_bytes = 0

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._head_bytes, self._in_body = 0, False

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

    def _wait_for(self, awaited: str) -> None:
        """End the connection unless a "head" or "body" ends, or another "request" begins, in time, from the first such call on."""
        if self._late is None or self._awaited != awaited:
            self._stop_waiting()
            self._awaited = awaited
            self._late = self.loop.call_later(HEAD_S if awaited == "head" else IDLE_S, self.transport.abort)

    def _stop_waiting(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None


class Places:
    """The requests under way of each trajectory, by the digest of its token; ``most`` of all trajectories together."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._requests, self._bytes = Counter[bytes](), Counter[bytes]()

    @contextmanager
    def one(self, token: bytes) -> Iterator[Held]:
        """Take a place for a request until it is answered; RequestRefused if its trajectory may have no further one."""
        if self._requests[token] >= max(LEAST_PLACES, self._most - self._requests.total()):
            raise RequestRefused(
                f"this trajectory has {self._requests[token]} requests under way; try again",
                status=503,
                code="too_many_requests",
            )
        self._requests[token] += 1
        held = Held(self._bytes, token)
        try:
            yield held
        finally:
            for counts, count in ((self._requests, 1), (self._bytes, held.size)):
                counts[token] -= count
                if not counts[token]:
                    del counts[token]


class Held:
    """The bytes of one request's body, ``size`` so far; ``counts`` has those of all requests of each trajectory."""

    def __init__(self, counts: Counter[bytes], token: bytes) -> None:
        self._counts, self._token, self.size = counts, token, 0

    def take(self, size: int) -> None:
        """Bytes of the request have come; RequestRefused if its trajectory has too many already."""
        self.size += size
        self._counts[self._token] += size
        if size and self._counts[self._token] > HELD_BYTES:
            raise RequestRefused(
                f"this trajectory's requests under way have more than {HELD_BYTES:,} bytes; try again",
                status=503,
                code="too_many_requests",
            )

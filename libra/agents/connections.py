"""HTTP/1.1 connections of agents at the gateway, bounded so that none of them keeps another out.

Invariants
----------
1. Where there are as many connections as there may be, a new one takes the place of that which has been idle for longest. One that
   has a request under way gives way to none.
2. A request's head comes within `HEAD_S` and has at most `HEAD_BYTES` (and what came in one read with a request's end), or the
   connection ends; so does one with as many between two parts of a body, or after the last one, and one that is idle for `IDLE_S`,
   or on which the rest of an answered request's body takes that long. A body has `BODY_S` and at most `MAX_BODY_BYTES`.
3. A trajectory has at most as many requests under way as it leaves places for others (alone half of all, beside another such one a
   third), and `LEAST_PLACES` in any case. Their bodies have at most `HELD_BYTES`. Beyond that it is told to try again (status 503).
4. Requests of one connection are answered one after the other; a further one stops the reading until its turn has come.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, OrderedDict, deque
from http import HTTPStatus
from typing import Any, Protocol

import httptools

from libra.errors import RequestRefused

IDLE_S = 75.0
"""Seconds between two requests of a connection."""
HEAD_S = 20.0
"""Seconds from a connection's beginning, or the first byte of a later request, to the end of that request's head."""
BODY_S = 60.0
"""Seconds in which a body has to come."""
HEAD_BYTES = 64 << 10
"""Bytes of a request's head, and of what stands between it and the end of the request before; of sizes and trailers of chunks."""
MAX_BODY_BYTES = 16 << 20
"""Largest body of a request."""
HELD_BYTES = 128 << 20
LEAST_PLACES = 16
"""Requests under way that a trajectory has in any case."""
CLOSE_S = 1.0
"""Seconds in which answers under way may leave as the server closes."""

_REASONS = {status.value: status.phrase.encode() for status in HTTPStatus}


class Exchange:
    """One request and its answer.

    ``headers`` has the values of those that are read, by their names in lower case; ``mine`` is the handler's own.
    """

    __slots__ = (
        "begun", "chunked", "complete", "connection", "done", "headers", "held", "keep", "method", "mine", "parts", "size", "url",
    )  # fmt: skip

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.url, self.method = b"", b""
        self.headers: dict[bytes, bytes] = {}
        self.parts: list[bytes] = []
        self.size = 0
        self.held: Held | None = None
        self.keep = self.chunked = True
        self.complete = self.begun = self.done = False
        self.mine: Any = None

    def body(self) -> bytes:
        """The bytes of its body."""
        return self.parts[0] if len(self.parts) == 1 else b"".join(self.parts)

    def answer(self, status: int, body: bytes, kind: bytes = b"application/json", more: bytes = b"") -> None:
        """Write the whole answer; ``more`` are header lines."""
        head = b"HTTP/1.1 %d %s\r\ncontent-type: %s\r\ncontent-length: %d\r\n%s%s\r\n" % (
            status, _REASONS.get(status, b""), kind, len(body), more, b"" if self.keep else b"connection: close\r\n",
        )  # fmt: skip
        self.connection.write(head + body)
        self.end()

    def begin(self, kind: bytes) -> None:
        """Write the head of an answer with status 200 that comes in parts."""
        self.begun = True
        self.keep &= self.chunked
        length = b"transfer-encoding: chunked\r\n" if self.chunked else b""
        close = b"" if self.keep else b"connection: close\r\n"
        self.connection.write(b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\n%s%s\r\n" % (kind, length, close))

    def part(self, data: bytes, *, last: bool = False) -> None:
        """Write a part of the answer that was begun, and its end after the last one."""
        if self.chunked:
            data = b"%x\r\n%s\r\n%s" % (len(data), data, b"0\r\n\r\n" if last else b"")
        self.connection.write(data)
        if last:
            self.end()

    def abort(self) -> None:
        """End the connection in the middle of the answer."""
        self.connection.transport.abort()

    def end(self) -> None:
        """The answer was written, or nobody is there for it."""
        self.done = True
        self.parts.clear()
        if self.held is not None:
            self.held.release()
        self.connection.answered(self)


class Handler(Protocol):
    """Who answers. Each of these may answer at once."""

    read_headers: frozenset[bytes]

    def arrived(self, exchange: Exchange) -> None:
        """The head of a request is there."""

    def complete(self, exchange: Exchange) -> None:
        """Its body is there, too."""

    def refuse(self, exchange: Exchange, refused: RequestRefused) -> None:
        """Answer it with an error."""

    def gone(self, exchange: Exchange) -> None:
        """Its client has gone before the answer was written."""


class Connections:
    """The connections of one server, at most ``most`` of them; ``idle`` has those without a request under way, the one that is idle
    for longest first."""

    def __init__(self, handler: Handler, most: int) -> None:
        self.handler, self.most = handler, most
        self.all = set[Connection]()
        self.empty: asyncio.Event | None = None
        self.idle = OrderedDict[Connection, None]()

    async def close(self) -> None:
        """End all connections, each once what was written has left, or `CLOSE_S` are over."""
        await asyncio.sleep(0)  # answers that are there are written
        self.empty = asyncio.Event()
        for each in list(self.all):
            each.transport.close()
        if self.all:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.empty.wait(), CLOSE_S)
        for each in list(self.all):
            each.transport.abort()


class Connection(asyncio.Protocol):
    """One connection."""

    transport: asyncio.Transport

    def __init__(self, server: Connections) -> None:
        self._server, self._handler = server, server.handler
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpRequestParser(self)
        self._unread = 0  # bytes since the end of the last request, or the last part of a body
        self._reading: Exchange | None = None  # the request whose end has not come
        self._open = deque[Exchange]()  # requests without an answer whose head is there; the first is under way
        self._choked = False
        self._awaited, self._until_s = "", 0.0
        self._late: asyncio.TimerHandle | None = None

    # ---------------------------------------------------------------- for the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        server = self._server
        if len(server.all) >= server.most and server.idle:
            longest, _ = server.idle.popitem(last=False)
            server.all.discard(longest)
            longest.transport.abort()
        crowded = len(server.all) >= server.most
        server.all.add(self)
        server.idle[self] = None
        self._wait_for("head")
        if crowded:
            exchange = Exchange(self)
            exchange.keep = False
            told = RequestRefused("this gateway has too many connections; try again", status=503, code="overloaded")
            self._handler.refuse(exchange, told)

    def connection_lost(self, exc: Exception | None) -> None:
        server = self._server
        server.all.discard(self)
        server.idle.pop(self, None)
        if server.empty is not None and not server.all:
            server.empty.set()
        if self._late is not None:
            self._late.cancel()
        for exchange in list(self._open):
            self._handler.gone(exchange)
            exchange.end()

    def data_received(self, data: bytes) -> None:
        self._unread += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:  # it was refused
            return
        except httptools.HttpParserError as error:
            if isinstance(error.__context__, Exception) and not isinstance(
                error.__context__, httptools.HttpParserError
            ):
                raise error.__context__ from error  # a fault of Libra's, in one of the methods below
            self._malformed()
            return
        if self._unread > HEAD_BYTES:
            self.transport.abort()
        self._look()

    def pause_writing(self) -> None:
        self._choked = True
        self._read_on()

    def resume_writing(self) -> None:
        self._choked = False
        self._read_on()

    # ---------------------------------------------------------------- for the parser

    def on_message_begin(self) -> None:
        self._reading = Exchange(self)
        self._unread = max(self._unread, 1)  # it may have begun in the read that ended the request before it

    def on_url(self, url: bytes) -> None:
        assert self._reading is not None
        self._reading.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name in self._handler.read_headers:
            assert self._reading is not None
            self._reading.headers[name] = value
        elif name == b"expect" and value.lower() == b"100-continue" and not self._open:
            self.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_headers_complete(self) -> None:
        exchange, parser = self._reading, self._parser
        assert exchange is not None
        exchange.method = parser.get_method()
        upgrade = parser.should_upgrade()  # the parser does not read its body then
        exchange.keep = parser.should_keep_alive() and not upgrade
        exchange.chunked = parser.get_http_version() == "1.1"
        self._open.append(exchange)
        if upgrade:
            told = "upgrade: HTTP/1.1 is spoken here, and nothing else; send the request without this header"
            self._handler.refuse(exchange, RequestRefused(told, "upgrade"))
        elif len(self._open) == 1:
            self._handler.arrived(exchange)
        else:
            self._read_on()

    def on_body(self, body: bytes) -> None:
        exchange = self._reading
        assert exchange is not None
        self._unread = 0
        if exchange.done:
            return
        exchange.parts.append(body)
        exchange.size += len(body)
        if exchange.size > MAX_BODY_BYTES:
            told = f"the body has more than {MAX_BODY_BYTES:,} bytes"
            self._handler.refuse(exchange, RequestRefused(told, status=413, code="request_too_large"))
        elif exchange.held is not None:
            try:
                exchange.held.take(len(body))
            except RequestRefused as refused:
                self._handler.refuse(exchange, refused)

    def on_message_complete(self) -> None:
        exchange, self._reading = self._reading, None
        assert exchange is not None
        self._unread = 0
        exchange.complete = True
        if not exchange.done and self._open[0] is exchange:
            self._handler.complete(exchange)

    # ---------------------------------------------------------------- for the exchanges

    def write(self, data: bytes) -> None:
        """Write to the client, if it is still there."""
        if not self.transport.is_closing():
            self.transport.write(data)

    def answered(self, exchange: Exchange) -> None:
        """The answer of a request has been written."""
        first = bool(self._open) and self._open[0] is exchange
        if exchange in self._open:
            self._open.remove(exchange)
        if not exchange.keep:
            self.transport.close()
        elif first and self._open:
            self._loop.call_soon(self._next)
        self._read_on()
        self._look()

    # ---------------------------------------------------------------- inside

    def _next(self) -> None:
        """Begin with the request that came before the one before it was answered."""
        if self._open and not self.transport.is_closing():
            exchange = self._open[0]
            self._handler.arrived(exchange)
            if exchange.complete and not exchange.done:
                self._handler.complete(exchange)

    def _malformed(self) -> None:
        """End a connection that sends something else than HTTP; a request before that has no answer."""
        if not self._open:
            self.write(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        self.transport.close()

    def _read_on(self) -> None:
        if self._choked or len(self._open) > 1:
            self.transport.pause_reading()
        else:
            self.transport.resume_reading()

    def _look(self) -> None:
        """Note whether a request is under way, and until when something has to come."""
        if self.transport.is_closing():
            return
        reading = self._reading is not None and self._reading in self._open
        if self._open:
            self._server.idle.pop(self, None)
        elif self not in self._server.idle:
            self._server.idle[self] = None
        if self._open:
            self._wait_for("body" if reading and len(self._open) == 1 else "")
        elif self._reading is not None and self._reading.done:
            self._wait_for("rest")
        else:
            self._wait_for("head" if self._unread else "request")

    def _wait_for(self, awaited: str) -> None:
        """Give a "head", a "body", the "rest" of one, or another "request" its time, from the first such call on; "": nothing."""
        if awaited == self._awaited:
            return
        self._awaited = awaited
        if not awaited:
            return
        self._until_s = self._loop.time() + {"head": HEAD_S, "body": BODY_S}.get(awaited, IDLE_S)
        if self._late is None or self._late.when() > self._until_s:  # else it looks again
            if self._late is not None:
                self._late.cancel()
            self._late = self._loop.call_at(self._until_s, self._too_late)

    def _too_late(self) -> None:
        self._late = None
        if not self._awaited:
            return
        if self._loop.time() < self._until_s:
            self._late = self._loop.call_at(self._until_s, self._too_late)
        elif self._awaited == "body" and self._open:
            told = f"the body did not come within {BODY_S:g} s"
            self._handler.refuse(self._open[0], RequestRefused(told, status=408, code="request_timeout"))
        else:
            self.transport.abort()


class Places:
    """The requests under way of each trajectory, by the digest of its token; ``most`` of all trajectories together."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.total = 0
        self.requests, self.bytes = Counter[bytes](), Counter[bytes]()

    def take(self, token: bytes) -> Held:
        """Take a place for a request until it is answered; RequestRefused if its trajectory may have no further one."""
        mine = self.requests[token]
        if mine >= max(LEAST_PLACES, self._most - self.total):
            raise RequestRefused(
                f"this trajectory has {mine} requests under way; try again", status=503, code="too_many_requests"
            )
        self.requests[token] = mine + 1
        self.total += 1
        return Held(self, token)


class Held:
    """The place of one request, and the bytes of its body, ``size`` so far."""

    __slots__ = ("_places", "_token", "size")

    def __init__(self, places: Places, token: bytes) -> None:
        self._places, self._token, self.size = places, token, 0

    def take(self, size: int) -> None:
        """Bytes of the request have come; RequestRefused if its trajectory has too many already."""
        self.size += size
        counts = self._places.bytes
        counts[self._token] += size
        if size and counts[self._token] > HELD_BYTES:
            raise RequestRefused(
                f"this trajectory's requests under way have more than {HELD_BYTES:,} bytes; try again",
                status=503,
                code="too_many_requests",
            )

    def release(self) -> None:
        """The request is answered."""
        places = self._places
        places.total -= 1
        for counts, count in ((places.requests, 1), (places.bytes, self.size)):
            counts[self._token] -= count
            if not counts[self._token]:
                del counts[self._token]

"""HTTP/1.1 connections of agents at the gateway.

Invariants
----------
1. There are at most so many connections; a further one is told to try again (status 503).
2. A request comes within `WAIT_S` from its first byte, and the next one within `WAIT_S` after an answer, or the connection ends.
3. A request's head, what is between two parts of its body, and what comes after it have at most `HEAD_BYTES`; a body
   `MAX_BODY_BYTES`.
4. Requests of one connection are answered one after the other; a further one stops the reading until its turn has come.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from http import HTTPStatus
from typing import Any, Protocol

import httptools

from libra.errors import RequestRefused

WAIT_S = 75.0
"""Seconds in which a request, or the next one, has to come."""
HEAD_BYTES = 64 << 10
"""Bytes of a request's head, and of what stands between it and the end of the request before; of sizes and trailers of chunks."""
MAX_BODY_BYTES = 16 << 20
"""Largest body of a request."""
CLOSE_S = 1.0
"""Seconds in which answers under way may leave as the server closes."""

_REASONS = {status.value: status.phrase.encode() for status in HTTPStatus}


class Exchange:
    """One request and its answer.

    ``headers`` has the values of those that are read, by their names in lower case; ``mine`` is the handler's own.
    """

    __slots__ = (
        "begun", "chunked", "complete", "connection", "done", "headers", "keep", "method", "mine", "parts", "size", "url",
    )  # fmt: skip

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.url, self.method = b"", b""
        self.headers: dict[bytes, bytes] = {}
        self.parts: list[bytes] = []
        self.size = 0
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
    """The connections of one server, at most ``most`` of them."""

    def __init__(self, handler: Handler, most: int) -> None:
        self.handler, self.most = handler, most
        self.all = set[Connection]()
        self.empty: asyncio.Event | None = None

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
        self._phase, self._until_s = "", 0.0
        self._late: asyncio.TimerHandle | None = None

    # ---------------------------------------------------------------- for the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        server = self._server
        crowded = len(server.all) >= server.most
        server.all.add(self)
        self._look()
        if crowded:
            exchange = Exchange(self)
            exchange.keep = False
            told = RequestRefused("this gateway has too many connections; try again", status=503, code="overloaded")
            self._handler.refuse(exchange, told)

    def connection_lost(self, exc: Exception | None) -> None:
        server = self._server
        server.all.discard(self)
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
        """Note whether a request is under way, and until when one has to come."""
        if self.transport.is_closing():
            return
        if self._open and (self._open[0].complete or len(self._open) > 1):
            phase = "work"
        else:
            phase = "reading" if self._unread or self._reading is not None else "idle"
        if phase == self._phase:
            return
        self._phase = phase
        if phase != "work":
            self._until_s = self._loop.time() + WAIT_S
            if self._late is None:
                self._late = self._loop.call_at(self._until_s, self._too_late)

    def _too_late(self) -> None:
        self._late = None
        if self._phase == "work":  # the next phase looks again
            return
        if self._loop.time() < self._until_s:
            self._late = self._loop.call_at(self._until_s, self._too_late)
        elif self._open:
            self._open[0].keep = False
            told = f"the body did not come within {WAIT_S:g} s"
            self._handler.refuse(self._open[0], RequestRefused(told, status=408, code="request_timeout"))
        else:
            self.transport.abort()

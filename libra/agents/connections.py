"""HTTP/1.1 connections of agents at the gateway.

Invariants
----------
1. A server has a bounded number of connections: a further one ends an idle one, or gets status 503.
2. A request's head, the gap between two parts of its body, and what follows it have at most
   `HEAD_BYTES`; a body has at most `MAX_BODY_BYTES`.
3. A connection has one request at a time. What a client sends before the answer to its last request
   is dropped, and the connection ends after that answer.
"""

from __future__ import annotations

import asyncio
import socket
from functools import partial
from http import HTTPStatus
from typing import Any

import httptools

from libra.errors import RequestRefused

HEAD_BYTES = 64 << 10
"""Bytes of a head, and of sizes and trailers of chunks."""
MAX_BODY_BYTES = 16 << 20
"""Largest body of a request."""

_REASONS = {status.value: status.phrase.encode() for status in HTTPStatus}


class Exchange:
    """One request and its answer. ``headers`` has the `HttpServer.read_headers`; ``mine`` belongs to
    the server."""

    __slots__ = (
        "chunked",
        "connection",
        "done",
        "headers",
        "keep",
        "method",
        "mine",
        "parts",
        "size",
        "started",
        "url",
    )

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.url, self.method = b"", b""
        self.headers: dict[bytes, bytes] = {}
        self.parts: list[bytes] = []
        self.size = 0
        self.keep = self.chunked = True
        self.started = self.done = False
        self.mine: Any = None

    def body(self) -> bytes:
        """Bytes of the request's body."""
        return b"".join(self.parts)

    def answer(self, status: int, body: bytes, kind: bytes = b"application/json", more: bytes = b"") -> None:
        """Write the whole answer; ``more`` are header lines."""
        head = b"HTTP/1.1 %d %s\r\ncontent-type: %s\r\ncontent-length: %d\r\n%s%s\r\n" % (
            status, _REASONS.get(status, b""), kind, len(body), more, b"" if self.keep else b"connection: close\r\n",
        )  # fmt: skip
        self.connection.write(head + body)
        self.end()

    def begin(self, kind: bytes) -> None:
        """Write the head of an answer with status 200 that comes in parts."""
        self.started = True
        self.keep &= self.chunked
        length = b"transfer-encoding: chunked\r\n" if self.chunked else b""
        close = b"" if self.keep else b"connection: close\r\n"
        self.connection.write(b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\n%s%s\r\n" % (kind, length, close))

    def part(self, data: bytes, *, last: bool = False) -> None:
        """Write a part of an answer that `begin` started; ``last`` ends the answer."""
        if self.chunked:
            data = b"%x\r\n%s\r\n%s" % (len(data), data, b"0\r\n\r\n" if last else b"")
        self.connection.write(data)
        if last:
            self.end()

    def abort(self) -> None:
        """Break the connection in the middle of the answer."""
        self.connection.transport.abort()

    def end(self) -> None:
        """The answer is written, or its client has gone."""
        self.done = True
        self.parts.clear()
        self.connection.answered(self)


class HttpServer:
    """Serves on ``host``, at a free ``port``. Subclasses answer the requests; each method may answer at once."""

    read_headers: frozenset[bytes]

    def __init__(self, host: str, max_connections: int) -> None:
        self.host, self.port, self.max_connections = host, 0, max_connections
        self.connections = set[Connection]()
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Begin to serve."""
        made, loop = partial(Connection, self), asyncio.get_running_loop()
        self._server = await loop.create_server(made, self.host, 0, family=socket.AF_INET, backlog=2048)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Stop serving; answers under way are sent."""
        if self._server is not None:
            self._server.close()
        await asyncio.sleep(0)  # answers that are there are written
        for each in list(self.connections):
            each.transport.close()

    def arrived(self, exchange: Exchange) -> None:
        """The head of a request has come."""
        raise NotImplementedError

    def complete(self, exchange: Exchange) -> None:
        """The body has come, too."""
        raise NotImplementedError

    def refuse(self, exchange: Exchange, refused: RequestRefused) -> None:
        """Answer with an error."""
        raise NotImplementedError

    def gone(self, exchange: Exchange) -> None:
        """The client has gone before its answer was written."""
        raise NotImplementedError


class Connection(asyncio.Protocol):
    """One connection."""

    transport: asyncio.Transport

    def __init__(self, server: HttpServer) -> None:
        self._server = server
        self._parser = httptools.HttpRequestParser(self)
        self._unread = 0  # bytes since the end of the last request, or the last part of a body
        self._reading: Exchange | None = None  # the request whose end has not come
        self._open: Exchange | None = None  # the request whose head has come, and that has no answer

    def write(self, data: bytes) -> None:
        """Write to the client, if it is still there."""
        if not self.transport.is_closing():
            self.transport.write(data)

    def answered(self, exchange: Exchange) -> None:
        """The answer of the open request has been written."""
        self._open = None
        if not exchange.keep:
            self.transport.close()

    # ---------------------------------------------------------------- for the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        others = self._server.connections
        if len(others) >= self._server.max_connections:
            idle = next((each for each in others if each._reading is None and each._open is None), None)
            if idle is not None:
                idle.transport.abort()
            else:
                exchange = self._open = Exchange(self)
                exchange.keep = False
                message = "this gateway has too many connections; try again"
                self._server.refuse(exchange, RequestRefused(message, status=503, code="overloaded"))
        others.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.connections.discard(self)
        if self._open is not None:
            self._server.gone(self._open)
            self._open.end()

    def data_received(self, data: bytes) -> None:
        self._unread += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:  # it was refused
            return
        except httptools.HttpParserError as error:
            cause = error.__context__
            if isinstance(cause, Exception) and not isinstance(cause, httptools.HttpParserError):
                raise cause from error  # a fault of Libra's, in one of the methods below
            if self._open is None:
                self.write(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
            self.transport.close()
            return
        if self._unread > HEAD_BYTES:
            self.transport.abort()

    # ---------------------------------------------------------------- for the parser

    def on_message_begin(self) -> None:
        if self._open is None:
            self._reading = Exchange(self)
        else:
            self._open.keep = False

    def on_url(self, url: bytes) -> None:
        if self._reading is not None:
            self._reading.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._reading is None:
            return
        name = name.lower()
        if name in self._server.read_headers:
            self._reading.headers[name] = value
        elif name == b"expect" and value.lower() == b"100-continue":
            self.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_headers_complete(self) -> None:
        exchange, parser = self._reading, self._parser
        if exchange is None:
            return
        exchange.method = parser.get_method()
        upgrade = parser.should_upgrade()  # the parser does not read its body then
        exchange.keep = parser.should_keep_alive() and not upgrade
        exchange.chunked = parser.get_http_version() == "1.1"
        self._open = exchange
        if upgrade:
            message = "upgrade: HTTP/1.1 is spoken here, and nothing else; send the request without this header"
            self._server.refuse(exchange, RequestRefused(message, "upgrade"))
        else:
            self._server.arrived(exchange)

    def on_body(self, body: bytes) -> None:
        self._unread = 0
        exchange = self._reading
        if exchange is None or exchange.done:
            return
        exchange.parts.append(body)
        exchange.size += len(body)
        if exchange.size > MAX_BODY_BYTES:
            message = f"the body has more than {MAX_BODY_BYTES:,} bytes"
            self._server.refuse(exchange, RequestRefused(message, status=413, code="request_too_large"))

    def on_message_complete(self) -> None:
        exchange, self._reading = self._reading, None
        self._unread = 0
        if exchange is not None and not exchange.done:
            self._server.complete(exchange)

"""The HTTP server at which agents query the model, one per worker that runs agents.

A request waits in its trajectory's `Session` until a quantum has answered it. Tokens have 128 bits
and are found by their digest, so that the time of a look-up reveals nothing. Paths::

    /t/<token>/reward, /end, /inference/v1/generate
    /t/<token>/v1/chat/completions, /v1/responses, /v1/messages, /v1/models

A client may send the token as Bearer or x-api-key instead of in the path.

Invariants
----------
1. The gateway has a bounded number of connections: a further connection ends an idle one, or gets
   status 503.
2. A request's head, the gap between two parts of its body, and the bytes after it have at most
   `HEAD_BYTES`; a body has at most `MAX_BODY_BYTES`.
3. A connection has one request at a time. Bytes that a client sends before the answer to its last
   request are dropped, and the connection ends after that answer.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import re
import secrets
import socket
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from typing import Any
from urllib.parse import unquote

import msgspec

from libra.agents.agent_session import LONG, Ended, Pending, Session, as_float, by_size
from libra.agents.dialects import DIALECTS, Dialect, refusal, sse
from libra.agents.messages import ModelRequest, Reply
from libra.agents.request_bodies import Known, decoded, storable_json
from libra.errors import ConfigError, RequestRefused, pip_install
from libra.untrusted import repr_text

try:
    import httptools
except ImportError as missing:  # the extra `agents`
    raise ConfigError(
        f"agent: {missing.name!r} is not installed, which its gateway needs; type {pip_install('agents')}"
    ) from missing

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 2048
HEAD_BYTES = 64 << 10
"""Bytes of a head, and of sizes and trailers of chunks."""
MAX_BODY_BYTES = 16 << 20
"""Largest body of a request."""
READ_HEADERS = frozenset({b"x-api-key", b"authorization", b"x-stainless-retry-count"})
HEARTBEAT_S = 15.0
"""Seconds between two heartbeats to a waiting client."""
KEPT_ENDED = 4096
"""Most tokens of ended trajectories that are answered with status 409."""

_TOKEN = re.compile("/t/([^/]+)")
_STREAM, _JSON = b"text/event-stream", b"application/json"
_REASONS = {status.value: status.phrase.encode() for status in HTTPStatus}


@dataclass(slots=True, eq=False)
class _Asked:
    path: str
    session: Session
    dialect: Dialect | None
    request: ModelRequest | None = None
    pending: Pending | None = None
    alive: asyncio.TimerHandle | None = None

    def leave(self) -> None:
        if self.alive is not None:
            self.alive.cancel()
        if self.pending is not None:
            self.session.leave(self.pending)
            self.pending = None


class _Posted(msgspec.Struct):
    reward: Any = None
    result: Any = None


@dataclass(slots=True, eq=False)
class Exchange:
    """One request and its answer. ``headers`` has the `READ_HEADERS`; the gateway sets
    ``asked``."""

    connection: Connection
    url: bytes = b""
    method: bytes = b""
    headers: dict[bytes, bytes] = field(default_factory=dict)
    parts: list[bytes] = field(default_factory=list)
    size: int = 0
    keep: bool = True
    chunked: bool = True
    started: bool = False
    done: bool = False
    asked: _Asked | None = None

    def answer(self, status: int, body: bytes, kind: bytes = b"application/json", more: bytes = b"") -> None:
        """Write the whole answer; ``more`` are header lines."""
        head = b"HTTP/1.1 %d %s\r\ncontent-type: %s\r\ncontent-length: %d\r\n%s%s\r\n" % (
            status, _REASONS.get(status, b""), kind, len(body), more, b"" if self.keep else b"connection: close\r\n",
        )  # fmt: skip
        self.connection.write(head + body)
        self.end()

    def begin(self, kind: bytes) -> None:
        """Write the head of a streamed answer with status 200."""
        self.started = True
        self.keep &= self.chunked
        length = b"transfer-encoding: chunked\r\n" if self.chunked else b""
        close = b"" if self.keep else b"connection: close\r\n"
        self.connection.write(b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\n%s%s\r\n" % (kind, length, close))

    def part(self, data: bytes, *, last: bool = False) -> None:
        """Write a part of a streamed answer; ``last`` ends the answer."""
        if self.chunked:
            data = b"%x\r\n%s\r\n%s" % (len(data), data, b"0\r\n\r\n" if last else b"")
        self.connection.write(data)
        if last:
            self.end()

    def abort(self) -> None:
        """Break the connection in the middle of the answer."""
        self.connection.transport.abort()

    def end(self) -> None:
        """Record that the answer is written, or that the client has gone."""
        self.done = True
        self.parts.clear()
        self.connection.answered(self)


class Connection(asyncio.Protocol):
    """One connection."""

    transport: asyncio.Transport

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._parser = httptools.HttpRequestParser(self)
        self._unread = 0  # bytes since the end of the last request, or the last part of a body
        self._reading: Exchange | None = None  # the request whose end has not come
        self._open: Exchange | None = None  # the request whose head has come, and that has no answer

    def write(self, data: bytes) -> None:
        """Write to the client if it is still connected."""
        if not self.transport.is_closing():
            self.transport.write(data)

    def answered(self, exchange: Exchange) -> None:
        """Record that the answer of the open request has been written."""
        self._open = None
        if not exchange.keep:
            self.transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        others = self._gateway.connections
        if len(others) >= self._gateway.max_connections:
            idle = next((each for each in others if each._reading is None and each._open is None), None)
            if idle is not None:
                idle.transport.abort()
            else:
                exchange = self._open = Exchange(self)
                exchange.keep = False
                message = "this gateway has too many connections; try again"
                self._gateway.refuse(exchange, RequestRefused(message, status=503, code="overloaded"))
        others.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._gateway.connections.discard(self)
        if self._open is not None:
            self._gateway.gone(self._open)
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
        if name in READ_HEADERS:
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
            self._gateway.refuse(exchange, RequestRefused(message, "upgrade"))
        else:
            self._gateway.arrived(exchange)

    def on_body(self, body: bytes) -> None:
        self._unread = 0
        exchange = self._reading
        if exchange is None or exchange.done:
            return
        exchange.parts.append(body)
        exchange.size += len(body)
        if exchange.size > MAX_BODY_BYTES:
            message = f"the body has more than {MAX_BODY_BYTES:,} bytes"
            self._gateway.refuse(exchange, RequestRefused(message, status=413, code="request_too_large"))

    def on_message_complete(self) -> None:
        exchange, self._reading = self._reading, None
        self._unread = 0
        if exchange is not None and not exchange.done:
            self._gateway.complete(exchange)


class Gateway:
    """A server on ``host``, at a free port, in the event loop that started it."""

    def __init__(
        self, host: str = "127.0.0.1", heartbeat_s: float = HEARTBEAT_S, max_connections: int = MAX_CONNECTIONS
    ) -> None:
        self.host, self.port = host, 0
        self.heartbeat_s, self.max_connections = heartbeat_s, max_connections
        self.connections = set[Connection]()
        self._server: asyncio.Server | None = None
        self.counts = Counter[str]()
        """Numbers of requests, retries, refusals, and clients that left without an answer."""
        self._sessions: dict[bytes, Session] = {}
        self._ended: dict[bytes, str] = {}
        self._logged: set[str] = set()

    async def start(self) -> None:
        """Start serving."""
        made, loop = partial(Connection, self), asyncio.get_running_loop()
        self._server = await loop.create_server(made, self.host, 0, family=socket.AF_INET, backlog=2048)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Stop serving and refuse open requests."""
        for token in list(self._sessions):
            self._drop(token, "the run has ended")
        if self._server is not None:
            self._server.close()
        await asyncio.sleep(0)  # answers that are there are written
        for each in list(self.connections):
            each.transport.close()
        if self.counts:
            said = ", ".join(f"{name} {count:,}" for name, count in sorted(self.counts.items()))
            logger.info("the run has ended: the gateway at port %d closes (%s)", self.port, said)

    def open(self, name: str, max_model_len: int) -> tuple[str, Session]:
        """Open an agent's session; returns its token and the session."""
        token = secrets.token_urlsafe(16)
        session = self._sessions[_digest(token)] = Session(name, max_model_len)
        return token, session

    def drop(self, token: str, why: str) -> None:
        """End a session: refuse its open requests, and answer its token with status 409."""
        self._drop(_digest(token), why)

    def environ(self, token: str) -> dict[str, str]:
        """Environment variables by which clients find this server."""
        url = f"http://{self.host}:{self.port}/t/{token}"
        return {
            "OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_BASE": f"{url}/v1", "OPENAI_API_KEY": token,
            "ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": token, "LIBRA_GATEWAY_URL": url,
        }  # fmt: skip

    def _drop(self, token: bytes, why: str) -> None:
        session = self._sessions.pop(token, None)
        if session is not None:
            session.close(why)
            self._ended[token] = session.name
            if len(self._ended) > KEPT_ENDED:
                del self._ended[next(iter(self._ended))]

    # ---------------------------------------------------------------- for the connections

    def arrived(self, exchange: Exchange) -> None:
        """Find the session of a request, or refuse the request before its body comes."""
        path = unquote(exchange.url.partition(b"?")[0].decode("latin-1"))
        if not path.startswith("/"):  # a whole URL
            path = "/" + path.partition("://")[2].partition("/")[2]
        if (in_path := _TOKEN.match(path)) is not None:
            path, token = path[in_path.end() :], in_path[1]
        else:
            headers = exchange.headers
            given = headers.get(b"x-api-key") or headers.get(b"authorization", b"").removeprefix(b"Bearer ")
            token = given.decode("latin-1")
        dialect, models = DIALECTS.get(path), path == "/v1/models" or path.startswith("/v1/models/")
        if dialect is None and not models and path not in ("/reward", "/end"):
            refused = _no_path(exchange, path, 404)
        elif exchange.method != (b"GET" if models else b"POST"):
            refused = _no_path(exchange, path, 405)
        elif (session := self._sessions.get(digest := _digest(token))) is not None:
            exchange.asked = _Asked(path, session, dialect)
            return
        elif digest in self._ended:
            refused = RequestRefused(f"{self._ended[digest]} has ended", status=409, code="trajectory_ended")
        else:
            refused = RequestRefused("no trajectory has this token", status=401, code="invalid_api_key")
        self.refuse(exchange, refused, path)

    def complete(self, exchange: Exchange) -> None:
        """Answer a request, or give it to its session."""
        assert exchange.asked is not None
        asked = exchange.asked
        if asked.dialect is not None:
            read = partial(_read, asked.dialect, b"".join(exchange.parts), asked.session.known)
            if exchange.size < LONG:
                self._take(exchange, asked, read)
            else:
                reading = asyncio.ensure_future(by_size(exchange.size, read))
                reading.add_done_callback(lambda made: self._take(exchange, asked, made.result))
            return
        try:
            answer = self._models(asked) if "models" in asked.path else self._posted(asked, b"".join(exchange.parts))
            exchange.answer(200, msgspec.json.encode(answer))
        except RequestRefused as refused:
            self.refuse(exchange, refused)

    def refuse(self, exchange: Exchange, refused: RequestRefused, path: str = "") -> None:
        """Answer a request with an error, in the client's dialect."""
        asked = exchange.asked
        path = path or (asked.path if asked is not None else "")
        body = msgspec.json.encode(refusal(refused, anthropic=path.endswith(("/messages", "/messages/count_tokens"))))
        more = b"x-should-retry: false\r\n" if refused.status < 500 else b""
        self.counts["refused"] += 1
        if asked is not None:
            asked.leave()
        exchange.answer(refused.status, body, more=more)

    def gone(self, exchange: Exchange) -> None:
        """Drop the request of a client that has gone."""
        asked = exchange.asked
        if asked is not None and asked.pending is not None:
            self.counts["gone"] += not asked.pending.answer.done()
            asked.leave()

    def _models(self, asked: _Asked) -> dict[str, Any]:
        name = asked.path.removeprefix("/v1/models").removeprefix("/")
        model = {
            "id": name or "policy", "object": "model", "created": 0, "owned_by": "libra",
            "max_model_len": asked.session.max_model_len,
        }  # fmt: skip
        return model if name else {"object": "list", "data": [model]}

    def _posted(self, asked: _Asked, body: bytes) -> dict[str, Any]:
        posted, session = decoded(_Posted, storable_json(body) or b"{}"), asked.session
        if asked.path == "/end":
            session.end(Ended(posted.result))
            return {"ended": session.name}
        value = posted.reward
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(as_float(value)):
            raise RequestRefused(f"reward: got {repr_text(value)}; one finite number is needed", "reward")
        session.reward = float(value)
        return {"reward": session.reward}

    def _take(self, exchange: Exchange, asked: _Asked, read: Callable[[], ModelRequest]) -> None:
        if exchange.done:  # its client has gone
            return
        try:
            asked.request = request = read()
            for name in set(request.ignored) - self._logged:
                self._logged.add(name)
                logger.info("%s: an agent asks for its own %s; the run's is used", asked.session.name, name)
            retry = exchange.headers.get(b"x-stainless-retry-count", b"0") not in (b"", b"0")
            self.counts["requests"] += 1
            self.counts["retries"] += retry
            asked.pending = pending = asked.session.take(request, retry=retry)
        except RequestRefused as refused:
            self.refuse(exchange, refused)
            return
        except BaseException:
            exchange.abort()  # so that the client does not wait
            raise
        asked.alive = asyncio.get_running_loop().call_later(self.heartbeat_s, self._alive, exchange, asked)
        pending.answer.add_done_callback(partial(self._answered, exchange, asked))

    def _alive(self, exchange: Exchange, asked: _Asked) -> None:
        """Write a heartbeat, which sends the status. A later error therefore becomes an event of a
        stream. Any other connection is broken, so that the client retries and reads the error."""
        assert asked.request is not None and asked.dialect is not None
        streams = asked.request.stream and asked.dialect.stream is not None
        if not exchange.started:
            exchange.begin(_STREAM if streams else _JSON)
        exchange.part(asked.dialect.ping if streams else b"\n")
        asked.alive = asyncio.get_running_loop().call_later(self.heartbeat_s, self._alive, exchange, asked)

    def _answered(self, exchange: Exchange, asked: _Asked, answer: asyncio.Future[Reply]) -> None:
        if asked.pending is None:
            return
        asked.leave()
        request, dialect = asked.request, asked.dialect
        assert request is not None and dialect is not None
        stream = dialect.stream if request.stream else None
        try:
            reply = answer.result()
            if stream is None:
                body = msgspec.json.encode(dialect.write(request, reply))
            else:
                body = b"".join(stream(request, reply))
        except RequestRefused as refused:
            if not exchange.started:
                self.refuse(exchange, refused)
                return
            self.counts["refused"] += 1
            if stream is None:
                exchange.abort()
                return
            body = sse(refusal(refused, anthropic=asked.path.endswith("/messages")), "error")
        except BaseException:
            exchange.abort()  # so that the client does not wait
            raise
        if exchange.started:
            exchange.part(body, last=True)
        else:
            exchange.answer(200, body, _JSON if stream is None else _STREAM)


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


def _read(dialect: Dialect, data: bytes, known: Known) -> ModelRequest:
    request = dialect.read(storable_json(data), known)
    assert request.fingerprint  # computed here, where a thread may do it
    return request


def _no_path(exchange: Exchange, path: str, status: int) -> RequestRefused:
    known = "/v1/chat/completions, /v1/responses, /v1/messages, /v1/models, /inference/v1/generate, /reward, /end"
    method = exchange.method.decode("latin-1")
    message = f"{method} {path[:200]}: not answered here; allowed are {known}, by POST, and /v1/models by GET"
    return RequestRefused(message, status=status, code="unknown_path")

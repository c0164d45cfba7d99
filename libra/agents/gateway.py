"""The HTTP server at which agents ask the model, one per worker that runs agents.

A request waits in its trajectory's `Session` until a quantum has answered it. What comes in is
hostile until checked: bodies have a bounded size and depth, connections a bounded number, and
tokens have 128 bits. The gateway finds tokens by their digest, so the time of a look-up reveals
nothing. Paths::

    /t/<token>/v1/chat/completions, /v1/responses, /v1/messages, /v1/models, /inference/v1/generate, /reward, /end

The token may come as Bearer or x-api-key instead of in the path.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import re
import secrets
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
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
    from libra.agents.connections import Exchange, HttpServer
except ImportError as missing:  # the extra `agents`
    raise ConfigError(
        f"agent: {missing.name!r} is not installed, which its gateway needs; type {pip_install('agents')}"
    ) from missing

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 2048
HEARTBEAT_S = 15.0
"""Seconds between two heartbeats to a waiting client."""
KEPT_ENDED = 4096
"""Tokens of ended trajectories that are still known to have ended."""

_TOKEN = re.compile("/t/([^/]+)")
_STREAM, _JSON = b"text/event-stream", b"application/json"


@dataclass(slots=True, eq=False)
class _Asked:
    """A request of a session; ``pending`` once the session has taken it."""

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


class Gateway(HttpServer):
    """A server on ``host``, at a free port. Call its methods in the event loop that started it."""

    read_headers = frozenset({b"x-api-key", b"authorization", b"x-stainless-retry-count"})

    def __init__(
        self, host: str = "127.0.0.1", heartbeat_s: float = HEARTBEAT_S, max_connections: int = MAX_CONNECTIONS
    ) -> None:
        super().__init__(host, max_connections)
        self.heartbeat_s = heartbeat_s
        self.counts = Counter[str]()
        """Numbers of requests, retries, refusals, and clients that went without an answer."""
        self._sessions: dict[bytes, Session] = {}
        self._ended: dict[bytes, str] = {}
        self._logged: set[str] = set()

    async def close(self) -> None:
        """Stop serving; requests under way are refused."""
        for token in list(self._sessions):
            self._drop(token, "the run has ended")
        await super().close()
        if self.counts:
            said = ", ".join(f"{name} {count:,}" for name, count in sorted(self.counts.items()))
            logger.info("the run has ended: the gateway at port %d closes (%s)", self.port, said)

    def open(self, name: str, max_model_len: int) -> tuple[str, Session]:
        """Open an agent's session; returns its token, too."""
        token = secrets.token_urlsafe(16)
        session = self._sessions[_digest(token)] = Session(name, max_model_len)
        return token, session

    def drop(self, token: str, why: str) -> None:
        """End a session: refuse its open requests, and answer its token with status 409 from now
        on."""
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
        """Find the session of a request; refuse a request without one before its body comes."""
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
            exchange.mine = _Asked(path, session, dialect)
            return
        elif digest in self._ended:
            refused = RequestRefused(f"{self._ended[digest]} has ended", status=409, code="trajectory_ended")
        else:
            refused = RequestRefused("no trajectory has this token", status=401, code="invalid_api_key")
        self.refuse(exchange, refused, path)

    def complete(self, exchange: Exchange) -> None:
        """Answer a request, or have its session answer it."""
        asked: _Asked = exchange.mine
        if asked.dialect is not None:
            read = partial(_read, asked.dialect, exchange.body(), asked.session.known)
            if exchange.size < LONG:
                self._take(exchange, asked, read)
            else:
                reading = asyncio.ensure_future(by_size(exchange.size, read))
                reading.add_done_callback(lambda made: self._take(exchange, asked, made.result))
            return
        try:
            answer = self._models(asked) if "models" in asked.path else self._posted(asked, exchange.body())
            exchange.answer(200, msgspec.json.encode(answer))
        except RequestRefused as refused:
            self.refuse(exchange, refused)

    def refuse(self, exchange: Exchange, refused: RequestRefused, path: str = "") -> None:
        """Answer a request with an error, in the client's dialect."""
        asked: _Asked | None = exchange.mine
        path = path or (asked.path if asked is not None else "")
        body = msgspec.json.encode(refusal(refused, anthropic=path.endswith(("/messages", "/messages/count_tokens"))))
        more = b"x-should-retry: false\r\n" if refused.status < 500 else b""
        self.counts["refused"] += 1
        if asked is not None:
            asked.leave()
        exchange.answer(refused.status, body, more=more)

    def gone(self, exchange: Exchange) -> None:
        """Drop the request of a client that has gone."""
        asked: _Asked | None = exchange.mine
        if asked is not None and asked.pending is not None:
            self.counts["gone"] += not asked.pending.answer.done()
            asked.leave()

    # ---------------------------------------------------------------- inside

    def _models(self, asked: _Asked) -> dict[str, Any]:
        name = asked.path.removeprefix("/v1/models").removeprefix("/")
        model = {
            "id": name or "policy", "object": "model", "created": 0, "owned_by": "libra",
            "max_model_len": asked.session.max_model_len,
        }  # fmt: skip
        return model if name else {"object": "list", "data": [model]}

    def _posted(self, asked: _Asked, body: bytes) -> dict[str, Any]:
        """The answer to /reward and /end."""
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
        """Write a heartbeat. This sends the status: a later error becomes an event of a stream,
        and breaks any other connection, so that the client tries again and reads the error."""
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

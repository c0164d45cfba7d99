"""The HTTP server at which agents ask the model, one per worker that runs agents.

It holds no GPU state: a request waits in its trajectory's `Session` until a quantum has answered it. What comes in is hostile
until checked: bodies have a cap and a depth, connections a number, tokens 128 bits. Tokens are looked up by their digest, so the
time of a look-up says nothing about them. Paths::

    /t/<token>/v1/chat/completions, /v1/responses, /v1/messages, /v1/models, /inference/v1/generate, /reward, /end

The token may come as Bearer or x-api-key instead of in the path.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import math
import re
import secrets
import socket
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

from libra.agents.chat_dialect import read_chat, read_generate, sse, stream_chat, write_chat, write_generate
from libra.agents.long_work import by_size
from libra.agents.messages import levels
from libra.agents.messages_dialect import read_messages, stream_messages, write_messages
from libra.agents.requests import ModelRequest, Reply
from libra.agents.responses_dialect import read_responses, stream_responses, write_responses
from libra.agents.session import Ended, Pending, Session, as_float
from libra.errors import ConfigError, RequestRefused
from libra.untrusted import MAX_DEPTH, repr_text, storable

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.datastructures import Headers
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response, StreamingResponse
    from starlette.routing import Route
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from libra.agents.connections import HEAD_BYTES, IDLE_S, Connection, Places
except ImportError as missing:  # the extra `agents`
    raise ConfigError(
        f"agent: {missing.name!r} is not installed, which its gateway needs; type pip install 'libra-rl[agents]'"
    ) from missing

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 16 << 20
"""Largest body of a request."""
BODY_S = 60.0
"""Seconds in which a body has to come."""
MAX_CONNECTIONS = 2048
"""Most connections at once; further ones take the place of idle ones (`libra.agents.connections`), or get status 503."""
HEARTBEAT_S = 15.0
"""Seconds after which a waiting client gets a sign of life, and between two of them."""
KEPT_ENDED = 4096
"""Tokens of ended trajectories that are still known as such."""

_ESCAPED = re.compile(rb"\\u(?:00[0189]|d[89a-f])|[\x7f]|\xc2[\x80-\x9f]", re.IGNORECASE)
"""How a body of valid JSON spells characters that cannot be stored."""

_TOKEN = re.compile("/t/([^/]+)")

Read = Callable[[Mapping[str, Any]], ModelRequest]
Write = Callable[[ModelRequest, Reply], dict[str, Any]]
Stream = Callable[[ModelRequest, Reply], Iterator[str]]
_DIALECTS: Mapping[str, tuple[Read, Write, Stream | None]] = {
    "/v1/chat/completions": (read_chat, write_chat, stream_chat),
    "/v1/responses": (read_responses, write_responses, stream_responses),
    "/v1/messages": (read_messages, write_messages, stream_messages),
    "/inference/v1/generate": (read_generate, write_generate, None),
    "/v1/inference/v1/generate": (read_generate, write_generate, None),
}


class Gateway:
    """A server on ``host``, at a free port; its methods are called in the event loop that it was started in."""

    def __init__(
        self, host: str = "127.0.0.1", heartbeat_s: float = HEARTBEAT_S, max_connections: int = MAX_CONNECTIONS
    ) -> None:
        self.host, self.port = host, 0
        self.heartbeat_s, self._max_connections = heartbeat_s, max_connections
        self.counts = Counter[str]()
        """Requests, and of these retries, refused ones, and ones whose client had gone."""
        self._sessions: dict[bytes, Session] = {}
        self._ended: OrderedDict[bytes, str] = OrderedDict()
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self._told: set[str] = set()
        self._places = Places(max_connections - 1)  # uvicorn turns away the connection that reaches its number

    async def start(self) -> None:
        """Begin to serve."""
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.bind((self.host, 0))
        self.port = listener.getsockname()[1]
        routes = [Route(path, self._asked, methods=["POST"]) for path in _DIALECTS]
        routes += [Route("/v1/models", self._models), Route("/v1/models/{model:path}", self._models)]
        routes += [Route("/reward", self._reward, methods=["POST"]), Route("/end", self._end, methods=["POST"])]
        named = [
            Route("/t/{token}" + route.path, route.endpoint, methods=list(route.methods or ())) for route in routes
        ]
        app = Starlette(routes=[*named, *routes], exception_handlers={404: _no_path, 405: _no_path})
        logging.getLogger("uvicorn.error").addFilter(_not_refused)
        config = uvicorn.Config(
            partial(self._placed, app), interface="asgi3", http=partial(Connection, idle=OrderedDict()),  # type: ignore[arg-type]
            log_config=None, log_level="warning", access_log=False, lifespan="off", limit_concurrency=self._max_connections,
            timeout_keep_alive=IDLE_S, timeout_graceful_shutdown=1, h11_max_incomplete_event_size=HEAD_BYTES, ws="none",
        )  # fmt: skip
        self._server = _Server(config)
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]))
        while not self._server.started and not self._serving.done():  # noqa: ASYNC110 - uvicorn has no event for it
            await asyncio.sleep(0.005)

    async def close(self) -> None:
        """Stop serving; requests under way are refused."""
        for token in list(self._sessions):
            self._drop(token, "the run has ended")
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            with contextlib.suppress(Exception, asyncio.CancelledError):
                await self._serving
        if self.counts:
            said = ", ".join(f"{name} {count:,}" for name, count in sorted(self.counts.items()))
            logger.info("the run has ended: the gateway at port %d closes (%s)", self.port, said)

    def open(self, name: str, max_model_len: int) -> tuple[str, Session]:
        """A session for an agent, and its token."""
        token = secrets.token_urlsafe(16)
        session = self._sessions[_digest(token)] = Session(name, max_model_len)
        return token, session

    def drop(self, token: str, why: str) -> None:
        """End a session: what it still asks is refused, and its token gets status 409 from now on."""
        self._drop(_digest(token), why)

    def environ(self, token: str) -> dict[str, str]:
        """The variables by which clients find this server."""
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
            while len(self._ended) > KEPT_ENDED:
                self._ended.popitem(last=False)

    # ---------------------------------------------------------------- routes

    async def _placed(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request in a place of its trajectory's."""
        token = _digest(_token(scope))
        if token not in self._sessions:  # it is refused without a look at its body
            await app(scope, receive, send)
            return
        with ExitStack() as place:
            try:
                held = place.enter_context(self._places.one(token))
            except RequestRefused as refused:
                self.counts["refused"] += 1
                await _error(refused, anthropic=scope["path"].endswith("/messages"))(scope, receive, send)
                return

            async def received() -> Message:
                message = await receive()
                held.take(len(message.get("body", b"")))
                return message

            await app(scope, received, send)

    def _session(self, request: Request) -> Session:
        token = _digest(_token(request.scope))
        session = self._sessions.get(token)
        if session is not None:
            return session
        if token in self._ended:
            raise RequestRefused(f"{self._ended[token]} has ended", status=409, code="trajectory_ended")
        raise RequestRefused("no trajectory has this token", status=401, code="invalid_api_key")

    async def _asked(self, http: Request) -> Response:
        path = http.scope["path"].removeprefix(f"/t/{http.path_params.get('token')}")
        read, write, stream = _DIALECTS[path]
        anthropic = path == "/v1/messages"
        try:
            session = self._session(http)
            data = await _body(http)
            request = await by_size(len(data), partial(_read_request, read, data))
            self._tell(session, request)
            retry = http.headers.get("x-stainless-retry-count", "0") not in ("", "0")
            self.counts.update(requests=1, retries=int(retry))
            pending = session.take(request, retry=retry)
        except RequestRefused as refused:
            self.counts["refused"] += 1
            return _error(refused, anthropic=anthropic)
        return await self._answer(http, session, pending, request, write, stream if request.stream else None, anthropic)

    async def _answer(
        self, http: Request, session: Session, pending: Pending, request: ModelRequest, write: Write, stream: Stream | None,
        anthropic: bool,
    ) -> Response:  # fmt: skip
        """The answer, when there is one; a sign of life before, once that takes long."""
        gone = asyncio.create_task(_disconnected(http))
        try:
            both: set[asyncio.Future[Any]] = {pending.answer, gone}
            await asyncio.wait(both, timeout=self.heartbeat_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
        if not pending.answer.done():
            if gone.done() and not gone.cancelled():
                session.leave(pending)
                self.counts["gone"] += 1
                return Response(status_code=499)
            kind = "application/json" if stream is None else "text/event-stream"
            return StreamingResponse(
                self._late(session, pending, request, write, stream, anthropic),
                media_type=kind,
            )
        session.leave(pending)
        try:
            reply = pending.answer.result()
        except RequestRefused as refused:
            self.counts["refused"] += 1
            return _error(refused, anthropic=anthropic)
        if stream is None:
            return JSONResponse(write(request, reply))
        return StreamingResponse(stream(request, reply), media_type="text/event-stream")

    async def _late(
        self, session: Session, pending: Pending, request: ModelRequest, write: Write, stream: Stream | None, anthropic: bool
    ) -> AsyncIterator[str]:  # fmt: skip
        """Signs of life, then the answer. The status is sent already: an error is an event of a stream, and breaks any other
        connection, so that the client tries again and is told."""
        alive = "\n" if stream is None else 'event: ping\ndata: {"type": "ping"}\n\n' if anthropic else ": waiting\n\n"
        try:
            while not pending.answer.done():
                yield alive
                await asyncio.wait({pending.answer}, timeout=self.heartbeat_s)
            reply = pending.answer.result()
        except RequestRefused as refused:
            self.counts["refused"] += 1
            if stream is None:
                raise
            yield sse(_told(refused, anthropic=anthropic), "error")
            return
        finally:
            self.counts["gone"] += not pending.answer.done()
            session.leave(pending)
        if stream is None:
            yield json.dumps(write(request, reply))
            return
        for event in stream(request, reply):
            yield event

    def _tell(self, session: Session, request: ModelRequest) -> None:
        """Log once what a client asks for and the run decides."""
        for name in request.ignored:
            if name not in self._told:
                self._told.add(name)
                logger.info("%s: an agent asks for its own %s; the run's is used", session.name, name)

    async def _models(self, http: Request) -> Response:
        try:
            session = self._session(http)
        except RequestRefused as refused:
            return _error(refused)
        model = {
            "id": http.path_params.get("model", "policy"), "object": "model", "created": 0, "owned_by": "libra",
            "max_model_len": session.max_model_len,
        }  # fmt: skip
        return JSONResponse(model if "model" in http.path_params else {"object": "list", "data": [model]})

    async def _reward(self, http: Request) -> Response:
        try:
            session = self._session(http)
            body = await _json_body(http)
            value = body.get("reward")
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(as_float(value)):
                raise RequestRefused(f"reward: got {repr_text(value)}; one finite number is needed", "reward")
            session.reward = float(value)
        except RequestRefused as refused:
            return _error(refused)
        return JSONResponse({"reward": session.reward})

    async def _end(self, http: Request) -> Response:
        try:
            session = self._session(http)
            body = await _json_body(http)
            session.end(Ended(body.get("result")))
        except RequestRefused as refused:
            return _error(refused)
        return JSONResponse({"ended": session.name})


class _Server(uvicorn.Server):
    """Uvicorn inside another program: signals are that program's."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _token(scope: Scope) -> str:
    """The token of a request: in its path, or a header."""
    in_path, headers = _TOKEN.match(scope["path"]), Headers(scope=scope)
    if in_path is not None:
        return in_path[1]
    return headers.get("x-api-key") or headers.get("authorization", "").removeprefix("Bearer ")


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


async def _body(http: Request) -> bytes:
    """The bytes of a body; RequestRefused if they are too many, or take too long."""
    data = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for chunk in http.stream():
                data += chunk
                if len(data) > MAX_BODY_BYTES:
                    raise RequestRefused(
                        f"the body has more than {MAX_BODY_BYTES:,} bytes", status=413, code="request_too_large"
                    )
    except TimeoutError:
        raise RequestRefused(f"the body did not come within {BODY_S:g} s", status=408, code="request_timeout") from None
    return bytes(data)


async def _json_body(http: Request) -> Mapping[str, Any]:
    """The body as a JSON object; RequestRefused as of `_body` and `_as_object`."""
    data = await _body(http)
    return await by_size(len(data), partial(_as_object, data))


def _read_request(read: Read, data: bytes) -> ModelRequest:
    """A request, with what will be compared of it; RequestRefused if it cannot be answered as it is."""
    try:
        request = read(_as_object(data))
        assert request.fingerprint
    except (RecursionError, TypeError, AttributeError) as error:
        raise RequestRefused(f"the request has a form that is not known: {error}") from error
    return request


def _as_object(data: bytes) -> Mapping[str, Any]:
    """A body as a JSON object; RequestRefused if it is none, or too deep."""
    try:
        body = json.loads(data.decode("utf-8-sig") or "{}")  # no other encoding: `_ESCAPED` reads this one
        if _ESCAPED.search(data):
            body = _storable(body)
    except (ValueError, RecursionError) as error:
        raise RequestRefused(f"the body is not JSON: {str(error)[:200]}") from error
    if not isinstance(body, dict):
        raise RequestRefused(f"the body is a JSON {type(body).__name__}; an object is needed")
    if levels(body, MAX_DEPTH) > MAX_DEPTH:
        raise RequestRefused(f"the body has more than {MAX_DEPTH} levels of lists and objects")
    return body


def _storable(value: Any) -> Any:
    """A JSON value whose texts can be stored."""
    if isinstance(value, str):
        return storable(value)
    if isinstance(value, dict):
        return {storable(key): _storable(each) for key, each in value.items()}
    return [_storable(each) for each in value] if isinstance(value, list) else value


async def _disconnected(http: Request) -> None:
    """Return once the client has gone."""
    while (await http.receive())["type"] != "http.disconnect":
        pass


def _told(refused: RequestRefused, *, anthropic: bool) -> dict[str, Any]:
    """An error in the client's dialect, as JSON."""
    kinds = {
        401: "authentication_error",
        404: "not_found_error",
        409: "conflict_error",
        413: "request_too_large",
        503: "overloaded_error",
    }
    kind = kinds.get(refused.status, "invalid_request_error")
    if anthropic:
        return {"type": "error", "error": {"type": kind, "message": str(refused)}}
    return {"error": {"message": str(refused), "type": kind, "param": refused.param or None, "code": refused.code}}


def _error(refused: RequestRefused, *, anthropic: bool = False) -> Response:
    """The response to a request that is refused."""
    headers = {"x-should-retry": "false"} if refused.status < 500 else None
    return JSONResponse(_told(refused, anthropic=anthropic), status_code=refused.status, headers=headers)


async def _no_path(http: Request, error: Exception) -> Response:
    """What a path that is not there, or another method, gets."""
    path = re.sub("^/t/[^/]*", "", http.scope["path"])
    known = "/v1/chat/completions, /v1/responses, /v1/messages, /v1/models, /inference/v1/generate, /reward, /end"
    status = getattr(error, "status_code", 404)
    told = f"{http.method} {path[:200]}: not answered here; allowed are {known}, by POST, and /v1/models by GET"
    refused = RequestRefused(told, status=status, code="unknown_path")
    return _error(refused, anthropic=path.endswith(("/messages", "/messages/count_tokens")))


def _not_refused(record: logging.LogRecord) -> bool:
    """Whether a record of the server is about anything but a refusal that ended a response under way, which is no fault."""
    return record.exc_info is None or not isinstance(record.exc_info[1], RequestRefused)

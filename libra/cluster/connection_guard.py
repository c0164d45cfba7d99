"""Bounds unauthenticated connections to Dask's servers: TLS handshakes have a deadline and a limit.

Importing this module replaces Dask's ``tls://`` listener in this process. So every server of a
local cluster preloads it (`libra.cluster.local`), as do ``dask scheduler`` and ``dask worker``
(``DASK_CONFIG`` of ``libra cluster tls``). A preload also guards the server's HTTP pages.

Invariants
----------
1. At most `MAX_UNPROVEN` connections of a listener are in their handshake. A further connection
   closes the oldest of them.
2. A whole handshake has `HANDSHAKE_S`. Nothing that a peer sends before its end reaches Dask.
3. An HTTP server has at most `MAX_PAGES` connections. A further connection closes the oldest that
   is not a websocket, else the oldest. A whole request has `REQUEST_S`.
4. Accepting survives every error: without file descriptors the listener closes the oldest unproven
   connection, waits `RETRY_S`, and continues.
5. A flood logs one warning per listener. A connection that its peer closes logs none, because
   Dask's own processes give up waiting during a busy start.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from typing import Any

from distributed.comm.registry import backends
from distributed.comm.tcp import TLSBackend, TLSListener
from tornado.httpserver import HTTPServer
from tornado.ioloop import IOLoop
from tornado.iostream import IOStream, StreamClosedError
from tornado.tcpserver import TCPServer

from libra.cluster.page_names import check_names

logger = logging.getLogger(__name__)
MAX_UNPROVEN = 64
HANDSHAKE_S = 20.0
MAX_PAGES = 128
REQUEST_S = 30.0
"""Longest seconds to wait for and receive a request; not applied to a page's websocket."""
MAX_REQUEST_BYTES = 2**20
RETRY_S = 0.1
ACCEPTED_AT_ONCE = 128
LEFT = (ssl.SSLEOFError, ssl.SSLZeroReturnError, ConnectionError, StreamClosedError)
"""Errors of a handshake whose peer closed the connection."""


class GuardedListener(TLSListener):
    """A ``tls://`` listener with a deadline and a limit for handshakes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._unproven: dict[IOStream, None] = {}
        self._refused = 0

    async def start(self) -> None:
        """Listen, and keep accepting when file descriptors run out."""
        await super().start()
        assert self.tcp_server is not None
        accept_for_ever(self.tcp_server, self._give_up_oldest)

    async def _prepare_stream(self, stream: Any, address: str) -> Any:
        if len(self._unproven) >= MAX_UNPROVEN:
            self._give_up_oldest()
        self._unproven[stream] = None
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                await stream.wait_for_handshake()
        except OSError as error:  # TimeoutError is one
            cause = getattr(error, "real_error", None) or error
            self._log_refusal(cause, address, given_up=stream not in self._unproven)
            stream.close()
            return None
        finally:
            self._unproven.pop(stream, None)
        return stream

    def _log_refusal(self, cause: Exception, address: str, *, given_up: bool) -> None:
        if given_up or not isinstance(cause, LEFT):
            self._refused += 1
            level = logging.WARNING if self._refused == 1 else logging.DEBUG
            others = f"{MAX_UNPROVEN} others prove nothing either"
            reason = others if given_up else str(cause) or f"no proof within {HANDSHAKE_S:g} s"
            logger.log(
                level, "a connection of %s to %s without its key was closed: %s", address, self.listen_address, reason
            )

    def _give_up_oldest(self) -> None:
        if (oldest := next(iter(self._unproven), None)) is not None:
            del self._unproven[oldest]
            oldest.close()


class GuardedBackend(TLSBackend):
    """Dask's ``tls://`` with `GuardedListener`."""

    _listener_class = GuardedListener


def accept_for_ever(server: TCPServer, make_room: Callable[[], None]) -> None:
    """Make a started server keep accepting after errors, which would end Tornado's own loop.
    ``make_room`` is called after each error, such as too few file descriptors."""
    for number, listener in server._sockets.items():
        server._handlers.pop(number)()
        server._handlers[number] = _accepting(listener, server._handle_connection, make_room)


def _accepting(
    listener: socket.socket, take: Callable[[socket.socket, Any], None], make_room: Callable[[], None]
) -> Callable[[], None]:
    """Register with the event loop; returns the function that unregisters."""
    loop = IOLoop.current()
    stopped = failing = False

    def accept(_listener: Any, _events: int) -> None:
        nonlocal failing
        for _ in range(ACCEPTED_AT_ONCE):
            if stopped:
                return
            try:
                connection, address = listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:
                if not failing:
                    logger.warning("cannot accept connections: %s; trying again", error)
                failing = True
                make_room()
                loop.remove_handler(listener)
                loop.call_later(RETRY_S, listen)
                return
            failing = False
            take(connection, address)

    def listen() -> None:
        if not stopped:
            loop.add_handler(listener, accept, IOLoop.READ)

    def stop() -> None:
        nonlocal stopped
        stopped = True
        loop.remove_handler(listener)  # does nothing while it waits to listen again

    listen()
    return stop


def guard_pages(server: HTTPServer) -> None:
    """Bound the connections and requests of a started HTTP server."""
    connections: dict[IOStream, None] = {}
    take = server.handle_stream
    parameters = server.conn_params
    parameters.header_timeout = parameters.body_timeout = REQUEST_S
    parameters.max_body_size = MAX_REQUEST_BYTES

    def make_room() -> None:
        asking = {connection.stream for connection in server._connections}  # without websockets
        oldest = next((stream for stream in connections if stream in asking), next(iter(connections), None))
        if oldest is not None:
            del connections[oldest]
            oldest.close()

    def handle(stream: IOStream, address: Any) -> None:
        for closed in [each for each in connections if each.closed()]:
            del connections[closed]
        if len(connections) >= MAX_PAGES:
            make_room()
        connections[stream] = None
        take(stream, address)

    server.handle_stream = handle  # type: ignore[method-assign]
    accept_for_ever(server, make_room)


def dask_setup(server: Any) -> None:
    """Called by Dask when a scheduler or worker has started."""
    if (pages := getattr(server, "http_server", None)) is not None:
        guard_pages(pages)
        check_names(server.http_application)


backends["tls"] = GuardedBackend()

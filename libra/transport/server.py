"""A server of authenticated channels: one thread accepts, one thread per connection serves.

Invariants
----------
1. At most `MAX_UNPROVEN` connections have not proven that they know the secret. One more closes the
   oldest: proving takes one round trip, so silent connections cannot keep clients out.
2. Accepting survives every error: without file descriptors (EMFILE, ENFILE) or threads it closes an
   unproven connection, waits `RETRY_S` and continues.
3. A handler's failure ends its own connection and no other.
4. A flood of unproven connections leaves one warning, not one for each.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Callable

from libra.errors import TransportError
from libra.transport.channel import SILENCE_S, Address, Channel, accept

logger = logging.getLogger(__name__)

MAX_UNPROVEN = 64
RETRY_S = 0.1
BACKLOG = 128


class Server:
    """Listens from a thread of its own until `close`; clients connect to ``address``. Port 0 is any free
    one.

    ``handle`` serves one channel in that connection's thread, which ends when it returns; it also gets
    the client's host and port. Its TransportError, ValueError, LookupError and TypeError are logged.
    """

    def __init__(
        self, handle: Callable[[Channel, str], None], *, secret: str, purpose: str, host: str, port: int = 0,
        silence_s: float | None = SILENCE_S,
    ) -> None:  # fmt: skip
        self._handle, self._secret, self._purpose, self._silence_s = handle, secret, purpose, silence_s
        self._listener = socket.create_server((host, port), backlog=BACKLOG)
        self.address: Address = (host, self._listener.getsockname()[1])
        self._lock = threading.Lock()
        self._is_proven: dict[socket.socket, bool] = {}
        self._refused = 0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._accept, name=f"libra-{purpose}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening, and end all connections."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._thread.join()
        self._listener.close()
        with self._lock:
            for connection in self._is_proven:
                _shut_down(connection)

    def _accept(self) -> None:
        failing = False
        while not self._closed.is_set():
            try:
                connection, (host, port) = self._listener.accept()
                self._start(connection, f"{host}:{port}")
                failing = False
            except (OSError, RuntimeError) as error:  # RuntimeError: no thread can be started
                if not failing and not self._closed.is_set():
                    logger.warning("%s server: cannot accept connections: %s", self._purpose, error)
                failing = True
                with self._lock:
                    self._shut_down_oldest()
                self._closed.wait(RETRY_S)

    def _start(self, connection: socket.socket, client: str) -> None:
        with self._lock:
            if list(self._is_proven.values()).count(False) >= MAX_UNPROVEN:
                self._shut_down_oldest()
            self._is_proven[connection] = False
        name = f"libra-{self._purpose}-{client}"
        try:
            threading.Thread(target=self._serve, args=(connection, client), name=name, daemon=True).start()
        except RuntimeError:
            self._forget(connection)
            raise

    def _shut_down_oldest(self) -> None:
        oldest = next((connection for connection, proven in self._is_proven.items() if not proven), None)
        if oldest is not None:
            del self._is_proven[oldest]
            _shut_down(oldest)

    def _serve(self, connection: socket.socket, client: str) -> None:
        try:
            channel = accept(connection, self._secret, purpose=self._purpose, silence_s=self._silence_s)
            with self._lock:
                if connection not in self._is_proven or self._closed.is_set():
                    return
                self._is_proven[connection] = True
            self._handle(channel, client)
        except (TransportError, ValueError, LookupError, TypeError) as error:
            if self._closed.is_set():
                return
            with self._lock:
                proven = self._is_proven.get(connection, False)
                self._refused += not proven
                log = logger.warning if proven or self._refused == 1 else logger.debug
            log("%s server: the connection to %s ended: %s", self._purpose, client, error)
        finally:
            self._forget(connection)

    def _forget(self, connection: socket.socket) -> None:
        with self._lock:
            self._is_proven.pop(connection, None)
        connection.close()


def _shut_down(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it is down already
        connection.shutdown(socket.SHUT_RDWR)

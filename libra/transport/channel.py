"""A connection between two processes that share a run's secret: short JSON frames, and raw bytes.

::

    client -> 32 random bytes
    server -> 32 random bytes, HMAC-SHA256 of both by the secret
    client -> HMAC-SHA256 of both by the secret
    frame     uint32 length | JSON object | 32 bytes HMAC, by a key of this connection

Invariants
----------
1. Nothing is unpickled. The secret does not cross the connection. A proof names its side and the
   server's purpose, so it can be neither reflected nor relayed to a server of another kind.
2. The whole handshake takes at most `HANDSHAKE_S`. Before it ends, at most 64 bytes are read and
   nothing is allocated.
3. A frame has at most `MAX_FRAME_BYTES`. Its HMAC covers the frame's number in its direction, so a
   changed, repeated, dropped or inserted frame is a TransportError.
4. Bytes are sent from and received into the caller's memory, without a copy. The crc32 of
   ``checked`` bytes follows in a frame: it detects faults, not forgery. Nothing is encrypted.
5. A server has at most `MAX_UNPROVEN` connections that have not proven the secret; another closes
   the oldest, so silent connections cannot keep clients out. A flood of them logs one warning.
6. Accepting survives every error: without file descriptors (EMFILE, ENFILE) or threads the server
   closes an unproven connection, waits `RETRY_S` and continues. A failing handler ends only its own
   connection.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import logging
import os
import secrets
import socket
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, BinaryIO

from libra.errors import TransportError
from libra.seals import parsed_json

logger = logging.getLogger(__name__)

Address = tuple[str, int]
"""Host and port."""

WINDOW_BYTES = 2**20
"""Bytes passed to the kernel, and checksummed, at once: they are still in the processor's cache then."""
WINDOW_VIEWS = 512
"""Runs of bytes passed at once; Linux accepts 1,024."""
FILE_WINDOW_BYTES = 2**30
"""Bytes of a file passed at once; Linux accepts just under 2 GiB."""
MAX_FRAME_BYTES = 16 * 2**20
HANDSHAKE_S = 20.0
"""Limit of connecting and of both proofs together."""
SILENCE_S = 30.0
"""Time without progress after which a peer in a transfer counts as dead."""
MAX_UNPROVEN = 64
RETRY_S = 0.1
BACKLOG = 128
_NONCE_BYTES = _MAC_BYTES = 32
_LENGTH = struct.Struct("!I")


def new_secret() -> str:
    return secrets.token_hex(32)


class Channel:
    """One end of an authenticated connection, for one sending and one receiving thread.

    ``sent_bytes`` and ``received_bytes`` count frames and raw bytes, not files.
    """

    def __init__(self, connection: socket.socket, key: bytes, *, is_server: bool) -> None:
        self.sent_bytes = self.received_bytes = 0
        self._socket, self._key = connection, key
        self._mine, self._theirs = (b"S", b"C") if is_server else (b"C", b"S")
        self._sent = self._received = 0  # frames

    def send_frame(self, **fields: Any) -> None:
        """Send fields that JSON can encode."""
        text = json.dumps(fields).encode()
        if len(text) > MAX_FRAME_BYTES:
            raise TransportError(f"a frame has {len(text)} bytes, allowed are {MAX_FRAME_BYTES}; request less at once")
        with _broken():
            self._socket.sendall(_LENGTH.pack(len(text)) + text + self._mac(self._mine, self._sent, text))
        self._sent += 1
        self.sent_bytes += _LENGTH.size + len(text) + _MAC_BYTES

    def recv_frame(self) -> dict[str, Any] | None:
        """The fields of the next frame; None if the peer closed the connection."""
        start = bytearray(_LENGTH.size)
        if not (got := self._recv_all(memoryview(start))):
            return None
        (length,) = _LENGTH.unpack(start)  # incomplete if the connection ended
        if length > MAX_FRAME_BYTES:
            raise TransportError(f"a frame of {length} bytes is announced, allowed are {MAX_FRAME_BYTES}")
        frame = bytearray(length + _MAC_BYTES)
        if got < len(start) or self._recv_all(memoryview(frame)) < len(frame):
            raise TransportError("the peer closed the connection during a frame")
        text, mac = bytes(memoryview(frame)[:length]), frame[length:]
        if not hmac.compare_digest(mac, self._mac(self._theirs, self._received, text)):
            raise TransportError("a frame was changed, repeated or left out, or its sender does not know the secret")
        self._received += 1
        self.received_bytes += len(start) + len(frame)
        try:
            fields = parsed_json(text)
        except ValueError as error:
            raise TransportError(f"a frame is not JSON: {error}") from error
        if not isinstance(fields, dict):
            raise TransportError(f"a frame is a JSON object, got {type(fields).__name__}")
        return fields

    def send_bytes(self, views: Sequence[memoryview], *, checked: bool = False) -> None:
        """Send all bytes of ``views``; with ``checked``, then their crc32 in a frame."""
        crc = 0
        self.sent_bytes += sum(map(len, views))
        for window in _windows(views):
            crc = _crc32(window, crc) if checked else 0
            with _broken():
                while window:
                    window = _after(window, self._socket.sendmsg(window))
        if checked:
            self.send_frame(crc32=crc)

    def recv_bytes(self, views: Sequence[memoryview], *, checked: bool = False) -> None:
        """Fill ``views``; with ``checked``, then verify their crc32 from a frame."""
        crc = 0
        self.received_bytes += sum(map(len, views))
        for window in _windows(views):
            left = window
            with _broken():
                while left:
                    got = self._socket.recvmsg_into(left, 0, socket.MSG_WAITALL)[0]
                    if not got:
                        raise TransportError("the peer closed the connection during a transfer")
                    left = _after(left, got)
            crc = _crc32(window, crc) if checked else 0
        if checked and (sent := (self.recv_frame() or {}).get("crc32")) != crc:
            raise TransportError(f"bytes with crc32 {crc} arrived, sent were {sent}")

    def recv_some(self, view: memoryview) -> int:
        """Receive into ``view``; returns the bytes received, fewer only if the connection ends."""
        if not (got := self._recv_all(view)):
            raise TransportError("the peer closed the connection during a transfer")
        return got

    def send_file(self, file: BinaryIO, offset: int, num_bytes: int) -> None:
        with _broken():
            while num_bytes:
                sent = os.sendfile(self._socket.fileno(), file.fileno(), offset, min(num_bytes, FILE_WINDOW_BYTES))
                if not sent:
                    raise TransportError(f"{file.name} became shorter by {num_bytes} bytes during a transfer")
                offset, num_bytes = offset + sent, num_bytes - sent

    def close(self) -> None:
        """End the connection; threads that wait on it, at either end, get a TransportError."""
        with contextlib.suppress(OSError):  # it is down already
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _mac(self, sender: bytes, number: int, text: bytes) -> bytes:
        return hmac.digest(self._key, sender + number.to_bytes(8, "big") + text, "sha256")

    def _recv_all(self, view: memoryview) -> int:
        filled = 0
        with _broken():
            while filled < len(view) and (got := self._socket.recv_into(view[filled:], 0, socket.MSG_WAITALL)):
                filled += got
        return filled


def connect(address: Address, secret: str, *, purpose: str, silence_s: float | None = SILENCE_S) -> Channel:
    """A channel to the server at ``address``. Raises TransportError if none proves the secret."""
    deadline_s = time.monotonic() + HANDSHAKE_S
    try:
        connection = socket.create_connection(address, timeout=HANDSHAKE_S)
    except OSError as error:
        raise TransportError(f"no server answers at {address[0]}:{address[1]}: {error}") from error
    return _handshake(connection, secret, purpose, deadline_s, silence_s, is_server=False)


def accept(connection: socket.socket, secret: str, *, purpose: str, silence_s: float | None = SILENCE_S) -> Channel:
    """The channel to a client. Raises TransportError if the client does not prove ``secret``.

    Both ends name the same ``purpose``. Transfers fail after ``silence_s`` seconds without
    progress.
    """
    return _handshake(connection, secret, purpose, time.monotonic() + HANDSHAKE_S, silence_s, is_server=True)


def _handshake(
    connection: socket.socket, secret: str, purpose: str, deadline_s: float, silence_s: float | None, *, is_server: bool
) -> Channel:
    def digest_of(role: str) -> bytes:
        return hmac.digest(secret.encode(), f"libra {purpose} {role} ".encode() + both, "sha256")

    try:
        with _broken("no handshake"):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            nonce = os.urandom(_NONCE_BYTES)
            if is_server:
                both = _recv_until(deadline_s, connection, _NONCE_BYTES) + nonce
                connection.sendall(nonce + digest_of("server"))
                proof, expected = _recv_until(deadline_s, connection, _MAC_BYTES), digest_of("client")
            else:
                connection.sendall(nonce)
                answer = _recv_until(deadline_s, connection, _NONCE_BYTES + _MAC_BYTES)
                both, proof = nonce + answer[:_NONCE_BYTES], answer[_NONCE_BYTES:]
                expected = digest_of("server")
            if not hmac.compare_digest(proof, expected):
                raise TransportError("the peer does not know this run's secret; it is of another run or start")
            if not is_server:
                connection.sendall(digest_of("client"))
            # From here on kernel timeouts: with a Python timeout no call can wait until all bytes have arrived.
            connection.settimeout(None)
            value = struct.pack("ll", *divmod(round((silence_s or 0) * 1e6), 10**6))  # 0: none
            for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                connection.setsockopt(socket.SOL_SOCKET, option, value)
    except TransportError:
        connection.close()
        raise
    return Channel(connection, digest_of("session"), is_server=is_server)


def _recv_until(deadline_s: float, connection: socket.socket, num_bytes: int) -> bytes:
    found = b""
    while len(found) < num_bytes:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("timed out")
        connection.settimeout(left_s)
        got = connection.recv(num_bytes - len(found))
        if not got:
            raise TransportError("the peer closed the connection during the handshake")
        found += got
    return found


@contextlib.contextmanager
def _broken(what: str = "the connection broke") -> Iterator[None]:
    try:
        yield
    except TransportError:
        raise
    except BlockingIOError as error:
        raise TransportError(f"{what}: the peer was silent for too long") from error
    except OSError as error:
        raise TransportError(f"{what}: {error}") from error


def _windows(views: Sequence[memoryview]) -> Iterator[list[memoryview]]:
    window: list[memoryview] = []
    room = WINDOW_BYTES
    for view in views:
        at = 0
        while at < len(view):
            part = view[at : at + room]
            window.append(part)
            at += len(part)
            room -= len(part)
            if not room or len(window) == WINDOW_VIEWS:
                yield window
                window, room = [], WINDOW_BYTES
    if window:
        yield window


def _crc32(window: Sequence[memoryview], crc: int) -> int:
    for view in window:
        crc = zlib.crc32(view, crc)
    return crc


def _after(views: list[memoryview], num_bytes: int) -> list[memoryview]:
    for index, view in enumerate(views):
        if num_bytes < len(view):
            return [view[num_bytes:], *views[index + 1 :]]
        num_bytes -= len(view)
    return []


class Server:
    """Listens at ``address`` in its own thread until `close`; port 0 picks a free port.

    ``handle`` receives a channel and the client's host and port, in that connection's thread; its
    return ends the connection. Its TransportError, ValueError, LookupError and TypeError are
    logged.
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

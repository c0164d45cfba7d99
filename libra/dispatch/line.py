"""A connection between two workers that both know a run's secret: short JSON frames, and runs of bytes with a checksum.

::

    asker  -> 32 random bytes
    holder -> 32 random bytes, HMAC-SHA256 of both by the secret
    asker  -> HMAC-SHA256 of both by the secret
    frame     uint32 length | JSON | 32 bytes HMAC, by a key of this connection

Invariants
----------
1. Nothing is unpickled; frames are JSON. The secret does not cross the wire.
2. Before both ends have proven that they know the secret, at most 64 bytes are read and nothing is allocated.
3. The HMAC of a frame counts frames: one changed, repeated, left out, or put in by another is a DispatchError.
4. Bytes are received into the memory they are for, sent from the memory they lie in, and checked: the crc32 of all of them
   comes in a frame after them. That finds faults, not forgers; where the network is not trusted, encrypt it.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import socket
import struct
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

from libra.errors import DispatchError

WINDOW_BYTES = 2**20
"""Bytes handed to the kernel, and checked, at once: they are still in the processor's cache then."""
WINDOW_VIEWS = 512
"""Runs of bytes handed over at once; Linux takes 1,024."""
TIMEOUT_S = 30.0
"""Silence after which the other end is taken for dead."""
MAX_FRAME_BYTES = 16 * 2**20
_NONCE_BYTES = _MAC_BYTES = 32
_LENGTH = struct.Struct("!I")


class Line:
    """One end of such a connection, for one thread."""

    def __init__(self, connection: socket.socket, key: bytes, *, is_holder: bool) -> None:
        self._socket, self._key = connection, key
        self._mine, self._theirs = (b"H", b"A") if is_holder else (b"A", b"H")
        self._sent = self._received = 0

    def say(self, **fields: Any) -> None:
        """Send a frame."""
        text = json.dumps(fields).encode()
        if len(text) > MAX_FRAME_BYTES:
            raise DispatchError(
                f"dispatch: a frame of {len(text)} bytes, allowed are {MAX_FRAME_BYTES}; ask for less at once"
            )
        mac = hmac.digest(self._key, self._mine + self._sent.to_bytes(8, "big") + text, "sha256")
        self._sent += 1
        try:
            self._socket.sendall(_LENGTH.pack(len(text)) + text + mac)
        except OSError as fault:
            raise _broken(fault) from fault

    def hear(self) -> dict[str, Any] | None:
        """The next frame; None where the other end has closed instead."""
        start = _read(self._socket, _LENGTH.size, may_end=True)
        if not start:
            return None
        (length,) = _LENGTH.unpack(start)
        if length > MAX_FRAME_BYTES:
            raise DispatchError(f"dispatch: a frame of {length} bytes, allowed are {MAX_FRAME_BYTES}")
        text, mac = _read(self._socket, length), _read(self._socket, _MAC_BYTES)
        if not hmac.compare_digest(
            mac, hmac.digest(self._key, self._theirs + self._received.to_bytes(8, "big") + text, "sha256")
        ):
            raise DispatchError("dispatch: a frame out of turn, or from somebody who does not know the secret")
        self._received += 1
        fields: dict[str, Any] = json.loads(text)
        return fields

    def send(self, views: Sequence[memoryview]) -> int:
        """Send all bytes of ``views``; returns their crc32."""
        crc = 0
        for window in _windows(views):
            for view in window:
                crc = zlib.crc32(view, crc)
            while window:
                try:
                    window = _after(window, self._socket.sendmsg(window))
                except OSError as fault:
                    raise _broken(fault) from fault
        return crc

    def receive(self, views: Sequence[memoryview]) -> int:
        """Fill ``views`` with what comes; returns its crc32."""
        crc = 0
        for window in _windows(views):
            left = window
            while left:
                try:
                    got = self._socket.recvmsg_into(left, 0, socket.MSG_WAITALL)[0]
                except OSError as fault:
                    raise _broken(fault) from fault
                if not got:
                    raise DispatchError("dispatch: the other end is gone in the middle of a move")
                left = _after(left, got)
            for view in window:
                crc = zlib.crc32(view, crc)
        return crc

    def close(self) -> None:
        """End the connection."""
        self._socket.close()


def connect(address: tuple[str, int], secret: str) -> Line:
    """A line to the holder at ``address``; DispatchError where nobody answers or it does not know the secret."""
    try:
        connection = socket.create_connection(address, timeout=TIMEOUT_S)
    except OSError as fault:
        raise DispatchError(f"dispatch: nobody answers at {address[0]}:{address[1]}: {fault}") from fault
    return _introduced(connection, secret, is_holder=False)


def accept(connection: socket.socket, secret: str) -> Line:
    """The line to whoever connected, once it has proven that it knows the secret; DispatchError where it has not."""
    return _introduced(connection, secret, is_holder=True)


def _introduced(connection: socket.socket, secret: str, *, is_holder: bool) -> Line:
    try:
        # Deadlines of the kernel's: with a time-out of Python's, no call may wait until all bytes are there.
        connection.settimeout(None)
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            connection.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(TIMEOUT_S), 0))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        mine, key = os.urandom(_NONCE_BYTES), secret.encode()
        if is_holder:
            both = _read(connection, _NONCE_BYTES) + mine
            connection.sendall(mine + hmac.digest(key, b"holder" + both, "sha256"))
            proof, expected = _read(connection, _MAC_BYTES), hmac.digest(key, b"asker" + both, "sha256")
        else:
            connection.sendall(mine)
            both = mine + _read(connection, _NONCE_BYTES)
            proof, expected = _read(connection, _MAC_BYTES), hmac.digest(key, b"holder" + both, "sha256")
            connection.sendall(hmac.digest(key, b"asker" + both, "sha256"))
        if not hmac.compare_digest(proof, expected):
            raise DispatchError("dispatch: the other end does not know this run's secret; it is of another run")
    except OSError as fault:
        connection.close()
        if isinstance(fault, DispatchError):
            raise
        raise _broken(fault) from fault
    return Line(connection, hashlib.sha256(key + both).digest(), is_holder=is_holder)


def _read(connection: socket.socket, num_bytes: int, *, may_end: bool = False) -> bytes:
    buffer = bytearray(num_bytes)
    view, filled = memoryview(buffer), 0
    while filled < num_bytes:
        try:
            got = connection.recv_into(view[filled:])
        except OSError as fault:
            raise _broken(fault) from fault
        if not got:
            if may_end and not filled:
                return b""
            raise DispatchError("dispatch: the other end is gone")
        filled += got
    return bytes(buffer)


def _broken(fault: OSError) -> DispatchError:
    silent = f"nothing moved for {TIMEOUT_S:g} s" if isinstance(fault, BlockingIOError) else str(fault)
    return DispatchError(f"dispatch: the connection broke: {silent}")


def _windows(views: Sequence[memoryview]) -> Iterator[list[memoryview]]:
    """The bytes of ``views`` in order, in lists of at most `WINDOW_VIEWS` views and `WINDOW_BYTES` bytes."""
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


def _after(views: list[memoryview], num_bytes: int) -> list[memoryview]:
    """What is left of ``views`` after so many bytes."""
    for index, view in enumerate(views):
        if num_bytes < len(view):
            return [view[num_bytes:], *views[index + 1 :]]
        num_bytes -= len(view)
    return []

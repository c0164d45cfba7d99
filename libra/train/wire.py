"""A connection between two replicas: messages of a few JSON fields and raw tensors, both ends proven to know a token.

::

    frame    "LBR1" | uint32 length of the header | header, JSON | 32 bytes HMAC | tensors, one after the other
    header   {"kind": ..., "tensors": [[name, dtype, shape], ...], **fields}

Invariants
----------
1. Nothing is unpickled, and no code travels: a header is JSON, a tensor is the bytes of its elements in the order of the
   header, of one of `DTYPES` (bfloat16 included).
2. Before both ends have proven that they know the token (HMAC-SHA256 over a number used once from each side), at most
   `HELLO_BYTES` are read and nothing is allocated for a tensor.
3. The HMAC of a header counts frames: one repeated, left out, or put in by another is a TransferError. Elements are not
   covered, as torch.distributed's are not; where the network is not trusted, encrypt it.
4. A message is received whole or not at all; a broken connection is a TransferError, never a short tensor.

Tensors are sent and received in chunks of `CHUNK_BYTES`, from and into their own memory; there is no second copy.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import math
import os
import socket
import struct
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from libra.errors import TransferError

CHUNK_BYTES = 4 * 2**20
HELLO_BYTES = 64
MAX_HEADER_BYTES = 4 * 2**20
HANDSHAKE_S = 10.0
"""How long a stranger may take to prove that it is none."""
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.int64,
        torch.int32,
        torch.bool,
        torch.uint8,
    )
}
_MAGIC = b"LBR1"
_LENGTH = struct.Struct("!4sI")
_MAC_BYTES = 32


@dataclass(frozen=True, slots=True)
class Message:
    """What came over a wire: ``num_bytes`` is its size with header and elements."""

    kind: str
    fields: dict[str, Any]
    tensors: dict[str, Tensor] = field(default_factory=dict)
    num_bytes: int = 0


class Wire:
    """One end of an authenticated connection. One thread sends at a time (a lock sees to it), one receives."""

    def __init__(self, connection: socket.socket, key: bytes, *, is_server: bool) -> None:
        self._socket = connection
        self._key = key
        self._mine, self._theirs = (b"S", b"C") if is_server else (b"C", b"S")
        self._sent = self._received = 0
        self._sending = threading.Lock()

    def send(
        self, kind: str, fields: Mapping[str, Any] | None = None, tensors: Mapping[str, Tensor] | None = None
    ) -> int:
        """Send one message; returns its bytes. TransferError where the other end is gone."""
        plain = {name: tensor.detach().to("cpu").contiguous() for name, tensor in (tensors or {}).items()}
        described = [[name, _dtype_name(name, tensor), list(tensor.shape)] for name, tensor in plain.items()]
        header = json.dumps({"kind": kind, "tensors": described, **(fields or {})}).encode()
        if len(header) > MAX_HEADER_BYTES:
            raise TransferError(
                f"wire: a header of {len(header)} bytes, allowed are {MAX_HEADER_BYTES}; send it as a tensor"
            )
        total = _LENGTH.size + len(header) + _MAC_BYTES
        with self._sending:
            try:
                mac = self._mac(self._mine, self._sent, header)
                self._socket.sendall(_LENGTH.pack(_MAGIC, len(header)) + header + mac)
                for tensor in plain.values():
                    view = _bytes_of(tensor)
                    for at in range(0, len(view), CHUNK_BYTES):
                        self._socket.sendall(view[at : at + CHUNK_BYTES])
                    total += len(view)
            except OSError as fault:
                raise TransferError(f"wire: sending {kind!r} failed: {fault}") from fault
            self._sent += 1
        return total

    def receive(self) -> Message:
        """The next message, waiting for it. TransferError where the connection ends, or what comes is no message of ours."""
        magic, length = _LENGTH.unpack(self._read(_LENGTH.size))
        if magic != _MAGIC or length > MAX_HEADER_BYTES:
            raise TransferError(f"wire: {magic!r} and a header of {length} bytes are no message of ours")
        header = self._read(length)
        if not hmac.compare_digest(self._read(_MAC_BYTES), self._mac(self._theirs, self._received, header)):
            raise TransferError("wire: a message out of turn, or from somebody who does not know the token")
        self._received += 1
        fields = json.loads(header)
        total = _LENGTH.size + length + _MAC_BYTES
        tensors: dict[str, Tensor] = {}
        for name, dtype, shape in fields.pop("tensors"):
            if dtype not in DTYPES:
                raise TransferError(f"wire: tensor {name} is of {dtype!r}; allowed are {', '.join(DTYPES)}")
            tensor = tensors[name] = torch.empty(shape, dtype=DTYPES[dtype])
            view = _bytes_of(tensor)
            for at in range(0, len(view), CHUNK_BYTES):
                self._read_into(view[at : at + CHUNK_BYTES])
            total += len(view)
        return Message(fields.pop("kind"), fields, tensors, total)

    def close(self) -> None:
        """End the connection; whoever waits in `receive` at either end gets a TransferError."""
        with contextlib.suppress(OSError):  # it is down already
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _mac(self, sender: bytes, number: int, header: bytes) -> bytes:
        return hmac.digest(self._key, sender + number.to_bytes(8, "big") + header, "sha256")

    def _read(self, num_bytes: int) -> bytes:
        buffer = bytearray(num_bytes)
        self._read_into(memoryview(buffer))
        return bytes(buffer)

    def _read_into(self, view: memoryview) -> None:
        _read_into(self._socket, view)


def accept(connection: socket.socket, token: str) -> Wire:
    """The wire to whoever connected, once it has proven that it knows ``token``; TransferError where it has not."""
    return _handshake(connection, token, is_server=True)


def connect(address: tuple[str, int], token: str) -> Wire:
    """A wire to the listener at ``address``; TransferError where nobody answers or it does not know ``token``."""
    try:
        connection = socket.create_connection(address, timeout=HANDSHAKE_S)
    except OSError as fault:
        raise TransferError(f"wire: nobody answers at {address[0]}:{address[1]}: {fault}") from fault
    return _handshake(connection, token, is_server=False)


def _handshake(connection: socket.socket, token: str, *, is_server: bool) -> Wire:
    secret = hashlib.sha256(token.encode()).digest()
    mine, theirs = (b"core", b"hybrid") if is_server else (b"hybrid", b"core")
    try:
        connection.settimeout(HANDSHAKE_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        nonce = os.urandom(HELLO_BYTES // 2)
        connection.sendall(nonce)
        other = bytearray(len(nonce))
        _read_into(connection, memoryview(other))
        both = nonce + bytes(other) if is_server else bytes(other) + nonce
        connection.sendall(hmac.digest(secret, mine + both, "sha256"))
        proof = bytearray(_MAC_BYTES)
        _read_into(connection, memoryview(proof))
        if not hmac.compare_digest(bytes(proof), hmac.digest(secret, theirs + both, "sha256")):
            raise TransferError("wire: the other end does not know this group's token; it is of another run or epoch")
        connection.settimeout(None)
    except OSError as fault:
        connection.close()
        if isinstance(fault, TransferError):
            raise
        raise TransferError(f"wire: no handshake with the other end: {fault}") from fault
    return Wire(connection, hmac.digest(secret, b"session" + both, "sha256"), is_server=is_server)


def _read_into(connection: socket.socket, view: memoryview) -> None:
    while len(view):
        try:
            got = connection.recv_into(view, min(len(view), CHUNK_BYTES))
        except OSError as fault:
            raise TransferError(f"wire: the connection broke: {fault}") from fault
        if not got:
            raise TransferError("wire: the other end is gone")
        view = view[got:]


def _bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor, whatever its dtype; a copy of one that is on a GPU."""
    if not math.prod(tensor.shape):
        return memoryview(b"")
    return tensor.reshape(-1).view(torch.uint8).cpu().numpy().data


def _dtype_name(name: str, tensor: Tensor) -> str:
    found = str(tensor.dtype).removeprefix("torch.")
    if found not in DTYPES:
        raise TransferError(f"wire: tensor {name} is of {found}; allowed are {', '.join(DTYPES)}")
    return found

"""What a worker holds of batches, given to whoever knows the run's secret: a thread per asker, nothing copied.

Invariants
----------
1. A block is what it was when it was offered: whoever offers memory does not change it before `withdraw`.
2. Only whole runs inside a block can be asked for; anything else is answered with an error, and nothing is sent.
3. A block that is withdrawn while it is sent is sent to the end: its memory lives as long as somebody reads it.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import socketserver
import threading
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from libra.dispatch.batch_layout import Block, Row
from libra.dispatch.line import Line, accept
from libra.dispatch.process_memory_copy import machine, offered
from libra.errors import DispatchError, LayoutError

logger = logging.getLogger(__name__)

Buffer = Any
"""Anything whose memory can be read in place: bytes, a numpy array, a memoryview."""


@dataclass(frozen=True, slots=True)
class _Held:
    """Memory of a block: runs one after the other, and where each begins."""

    views: tuple[memoryview, ...]
    begins: tuple[int, ...]
    num_bytes: int

    def cut(self, offset: int, num_bytes: int) -> list[memoryview]:
        """``num_bytes`` from ``offset`` on, where they lie."""
        if offset < 0 or num_bytes < 0 or offset + num_bytes > self.num_bytes:
            raise LayoutError(f"got bytes {offset} to {offset + num_bytes} of a block of {self.num_bytes}")
        found, index = [], bisect_right(self.begins, offset) - 1
        while num_bytes:
            at = offset - self.begins[index]
            part = self.views[index][at : at + num_bytes]
            if len(part):
                found.append(part)
            offset, num_bytes, index = offset + len(part), num_bytes - len(part), index + 1
        return found


class DispatchServer:
    """Offers blocks of batches from threads of its own.

    Parameters
    ----------
    worker : str
        Name of this worker in layouts.
    secret : str
        Only who knows it is given anything.
    host : str
        Address to listen at.
    port : int
        0: any free one.

    Attributes
    ----------
    address : tuple of str and int
    sent_bytes : int
        Payload given to other workers so far, over the network or from memory to memory.
    """

    def __init__(self, worker: str, secret: str, host: str, port: int = 0) -> None:
        self.worker, self.secret = worker, secret
        self.sent_bytes = 0
        self._held: dict[str, _Held] = {}
        self._lock = threading.Lock()
        self._server = _Server((host, port), _Conversation)
        self._server.owner = self
        self.address: tuple[str, int] = (host, self._server.server_address[1])
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.05,), name="libra-dispatch", daemon=True
        )
        self._thread.start()

    def offer(self, name: str, rows: Sequence[Row], memory: Sequence[Buffer]) -> Block:
        """Hold a block of rows, each in memory of its own; what the controller is told of it is returned."""
        views = [memoryview(buffer).cast("B") for buffer in memory]
        block = Block(self.worker, name, tuple(rows), tuple(len(view) for view in views))
        self._hold(name, views)
        return block

    def offer_array(self, name: str, rows: Sequence[Row], array: Buffer) -> Block:
        """Hold a C-contiguous array with one row of the batch for each of its first axis."""
        whole = memoryview(array)
        if not whole.c_contiguous or not whole.shape or whole.shape[0] != len(rows):
            raise LayoutError(
                f"block {name}: got an array of shape {whole.shape} for {len(rows)} rows; allowed is a C-contiguous one whose "
                "first axis is the rows"
            )
        num_bytes = whole.nbytes // len(rows) if len(rows) else 0
        block = Block(self.worker, name, rows, (num_bytes,) * len(rows))
        self._hold(name, [whole.cast("B")] if whole.nbytes else [])
        return block

    def withdraw(self, name: str) -> None:
        """Hold a block no longer; it need not be there."""
        with self._lock:
            self._held.pop(name, None)

    def __contains__(self, name: object) -> bool:
        with self._lock:
            return name in self._held

    def cut(self, name: str, offset: int, num_bytes: int) -> list[memoryview]:
        """A run of bytes of a block, where they lie; LayoutError where it is not held or is shorter."""
        with self._lock:
            held = self._held.get(name)
        if held is None:
            raise LayoutError(f"{self.worker} holds no block {name!r}: it was withdrawn, or never offered here")
        return held.cut(offset, num_bytes)

    def close(self) -> None:
        """Stop listening, and break off what is under way."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        self._server.break_off()

    def _hold(self, name: str, views: Sequence[memoryview]) -> None:
        begins, at = [], 0
        for view in views:
            begins.append(at)
            at += len(view)
        with self._lock:
            if name in self._held:
                raise LayoutError(
                    f"{self.worker} holds a block {name!r} already; withdraw it, or give this one another name"
                )
            self._held[name] = _Held(tuple(views), tuple(begins), at)

    def count(self, num_bytes: int) -> None:
        """Add to `sent_bytes`."""
        with self._lock:
            self.sent_bytes += num_bytes


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 128
    owner: DispatchServer

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.open: set[socket.socket] = set()

    def break_off(self) -> None:
        for connection in list(self.open):
            with contextlib.suppress(OSError):  # it is down already
                connection.shutdown(socket.SHUT_RDWR)


class _Conversation(socketserver.BaseRequestHandler):
    """Moves asked for over one connection, one after the other."""

    def handle(self) -> None:
        server = cast(_Server, self.server)
        server.open.add(self.request)
        try:
            line = accept(self.request, server.owner.secret)
            while (asked := line.hear()) is not None:
                self._answer(server.owner, line, asked)
        except (DispatchError, ValueError, KeyError, TypeError) as fault:
            logger.warning("dispatch: a conversation with %s ended early: %s", self.client_address, fault)
        finally:
            server.open.discard(self.request)

    def _answer(self, owner: DispatchServer, line: Line, asked: dict[str, Any]) -> None:
        try:
            views = [
                view
                for name, offset, num_bytes in asked["pieces"]
                for view in owner.cut(str(name), int(offset), int(num_bytes))
            ]
        except LayoutError as fault:
            line.say(error=str(fault))
            return
        num_bytes = sum(map(len, views))
        if asked.get("machine") == machine():
            line.say(num_bytes=num_bytes, memory=offered(views))
            answer = line.hear()  # until it comes, ``views`` keep the memory
            if answer is None:
                return
            streams = not answer["read"]
        else:
            line.say(num_bytes=num_bytes)
            streams = True
        if streams:
            line.say(crc32=line.send(views))
        owner.count(num_bytes)

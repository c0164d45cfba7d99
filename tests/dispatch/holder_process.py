"""A process that holds blocks of a batch: ``python holder_process.py NAME SECRET SEED FAULT ROW...``.

Prints its port and waits to be killed. Row r is 1 MiB + r bytes that follow from SEED and r. FAULT is what it does when it is to
send a move: "none", "dies" (SIGKILL to itself after the first window of bytes), "garbles" (one byte is not what it was).
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from libra.dispatch import DispatchServer
from libra.dispatch.line import WINDOW_BYTES, Line


def row(seed: int, number: int) -> NDArray[np.uint8]:
    """The bytes of a row."""
    return np.random.default_rng((seed, number)).integers(0, 256, 2**20 + number, dtype=np.uint8)


def dies(line: Line, views: Sequence[memoryview]) -> int:
    """Send a window and die."""
    whole(line, [views[0][:WINDOW_BYTES]])
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("still alive")


def garbles(line: Line, views: Sequence[memoryview]) -> int:
    """Send one wrong byte, and the checksum of the right ones."""
    import zlib

    right = b"".join(bytes(view) for view in views)
    whole(line, [memoryview(bytes([right[0] ^ 1]) + right[1:])])
    return zlib.crc32(right)


whole = Line.send

if __name__ == "__main__":
    name, secret, seed, fault, *rows = sys.argv[1:]
    if fault != "none":
        Line.send = {"dies": dies, "garbles": garbles}[fault]  # type: ignore[method-assign]
    server = DispatchServer(name, secret, "127.0.0.1")
    numbers = [int(number) for number in rows]
    server.offer("part", numbers, [row(int(seed), number) for number in numbers])
    print(server.address[1], flush=True)  # noqa: T201 - how whoever started it hears of the port
    threading.Event().wait()

"""A process that offers blocks of a batch: ``python server_process.py NAME SECRET SEED FAULT ROW...``.

Prints its port and waits to be killed. Row r is 1 MiB + r bytes that follow from SEED and r. FAULT is what it does when it is to
send a move: "none", "dies" (SIGKILL to itself after the first window of bytes), "garbles" (one byte is not what it was).
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import zlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from libra.dispatch import DispatchServer
from libra.transport import Channel
from libra.transport.channel import WINDOW_BYTES


def row(seed: int, number: int) -> NDArray[np.uint8]:
    """The bytes of a row."""
    return np.random.default_rng((seed, number)).integers(0, 256, 2**20 + number, dtype=np.uint8)


def dies(channel: Channel, views: Sequence[memoryview], *, checked: bool) -> None:
    """Send a window and die."""
    whole(channel, [views[0][:WINDOW_BYTES]])
    os.kill(os.getpid(), signal.SIGKILL)


def garbles(channel: Channel, views: Sequence[memoryview], *, checked: bool) -> None:
    """Send one wrong byte, and the checksum of the right ones."""
    right = b"".join(bytes(view) for view in views)
    whole(channel, [memoryview(bytes([right[0] ^ 1]) + right[1:])])
    channel.send_frame(crc32=zlib.crc32(right))


whole = Channel.send_bytes

if __name__ == "__main__":
    name, secret, seed, fault, *rows = sys.argv[1:]
    if fault != "none":
        Channel.send_bytes = {"dies": dies, "garbles": garbles}[fault]  # type: ignore[method-assign]
    server = DispatchServer(name, secret, "127.0.0.1")
    numbers = [int(number) for number in rows]
    server.offer("part", numbers, [row(int(seed), number) for number in numbers])
    print(server.address[1], flush=True)  # noqa: T201 - the test reads the port
    threading.Event().wait()

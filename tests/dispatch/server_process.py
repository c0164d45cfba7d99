"""A process that offers blocks of a batch: ``python server_process.py NAME SECRET SEED FAULT ROW...``.

Prints its port and waits to be killed. Row r is 1 MiB + r bytes that follow from SEED and r. FAULT of a move that it sends:
"none", "dies" (SIGKILL to itself after the first window of bytes), "garbles" (one byte is wrong).
"""

import os
import signal
import sys
import threading
import zlib

import numpy as np

from libra.dispatch import DispatchServer
from libra.transport import Channel
from libra.transport.channel import WINDOW_BYTES


def row(seed, number):
    return np.random.default_rng((seed, number)).integers(0, 256, 2**20 + number, dtype=np.uint8)


def dies(channel, views, *, checked):
    whole(channel, [views[0][:WINDOW_BYTES]])
    os.kill(os.getpid(), signal.SIGKILL)


def garbles(channel, views, *, checked):
    right = b"".join(bytes(view) for view in views)
    whole(channel, [memoryview(bytes([right[0] ^ 1]) + right[1:])])
    channel.send_frame(crc32=zlib.crc32(right))


whole = Channel.send_bytes

if __name__ == "__main__":
    name, secret, seed, fault, *rows = sys.argv[1:]
    if fault != "none":
        Channel.send_bytes = {"dies": dies, "garbles": garbles}[fault]
    server = DispatchServer(name, secret, "127.0.0.1")
    numbers = [int(number) for number in rows]
    server.offer("part", numbers, [row(int(seed), number) for number in numbers])
    print(server.address[1], flush=True)  # noqa: T201 - the test reads the port
    threading.Event().wait()

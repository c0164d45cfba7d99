"""A process that offers rows: ``python row_sender.py SECRET FAULT ROW...``.

Prints its port and waits to be killed. Row r is 1 MiB + r bytes that follow from r. FAULT of an answer that it sends:
"none", "dies" (SIGKILL to itself after the first window of bytes), "garbles" (one byte is wrong).
"""

import os
import signal
import sys
import threading
import zlib

import numpy as np

from libra.transport import Channel
from libra.transport.channel import WINDOW_BYTES
from libra.transport.rows import RowServer


def row(number):
    return np.random.default_rng(number).integers(0, 256, 2**20 + number, dtype=np.uint8)


def dies(channel, views, *, checked):
    whole(channel, [views[0][:WINDOW_BYTES]])
    os.kill(os.getpid(), signal.SIGKILL)


def garbles(channel, views, *, checked):
    right = b"".join(bytes(view) for view in views)
    whole(channel, [memoryview(bytes([right[0] ^ 1]) + right[1:])])
    channel.send_frame(crc32=zlib.crc32(right))


whole = Channel.send_bytes

if __name__ == "__main__":
    secret, fault, *rows = sys.argv[1:]
    if fault != "none":
        Channel.send_bytes = {"dies": dies, "garbles": garbles}[fault]
    server = RowServer(secret, "127.0.0.1")
    server.offer({number: row(int(number)) for number in rows})
    print(server.address[1], flush=True)  # noqa: T201 - the test reads the port
    threading.Event().wait()

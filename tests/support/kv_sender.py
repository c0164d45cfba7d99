"""A process that gives KV objects badly: ``python kv_sender.py SECRET HOW``; prints its port."""

import signal
import sys
import threading

import numpy as np

from libra.rollout.kv_objects import KVObject
from libra.transport import Server
from libra.worker.engine.kv_transfer import PURPOSE, give

KV = KVObject.of("a", 0, np.arange(8), "layout", np.arange(2**20, dtype=np.uint32).view(np.uint8))


def say(what):
    sys.stdout.write(f"{what}\n")
    sys.stdout.flush()


def main(secret, how):
    def serve(channel, client):
        request = channel.recv_frame() or {}
        if how == "good":
            say("kept" if give(channel, request, KV) else "not kept")
            return
        request.pop("machine")
        if how == "corrupt":
            KV.data[1000] ^= 1  # after its checksum was taken
            give(channel, request, KV)
        elif how == "truncated":
            channel.send_frame(num_bytes=KV.num_bytes - 4, kv=KV.header())
            channel.send_bytes([KV.data[4:].data], checked=True)
        else:  # half of the bytes, and then nothing until it is killed
            channel.send_frame(num_bytes=KV.num_bytes, kv=KV.header())
            channel.send_bytes([KV.data[: KV.num_bytes // 2].data])
            say("half")
            threading.Event().wait()

    server = Server(serve, secret=secret, purpose=PURPOSE, host="127.0.0.1")
    say(server.address[1])
    signal.pause()


if __name__ == "__main__":
    main(*sys.argv[1:])

import contextlib
import logging
import os
import socket
import subprocess
import sys
import threading

import pytest

from libra.errors import TransportError
from libra.transport import Server, connect
from libra.transport import channel as channel_module

SECRET = "known to the processes of one run"
FEW_FILES = """
import contextlib, logging, os, resource, sys
from libra.transport import Server

def echo(channel, client):
    while (frame := channel.recv_frame()) is not None:
        channel.send_frame(**frame)

server = Server(echo, secret=sys.argv[1], purpose="test", host="127.0.0.1")

class Announced(logging.Handler):
    def emit(self, record):
        print(record.getMessage(), flush=True)

logging.getLogger("libra.transport.channel").addHandler(Announced())
resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 4, 4096))
print(server.address[1], flush=True)
sys.stdin.read()
"""


def proven(address):
    channel = connect(address, SECRET, purpose="test")
    channel.send_frame(hello=1)
    assert channel.recv_frame() == {"hello": 1}
    return channel


def check_serves(address):
    proven(address).close()


def ends(connection):
    connection.settimeout(60)
    with contextlib.suppress(ConnectionResetError):
        while connection.recv(4096):
            pass
    return True


@pytest.mark.parametrize("garbage", [b"x" * 64, b"GET / HTTP/1.1\r\n\r\n" * 9, bytes(10)])
def test_garbage_and_half_messages_end_their_own_connection(serve, garbage):
    server = serve()
    with socket.create_connection(server.address) as connection:
        connection.sendall(garbage)
        with contextlib.suppress(OSError):  # the server may have ended it already
            connection.shutdown(socket.SHUT_WR)
        assert ends(connection)
    check_serves(server.address)


def test_silent_connections_cannot_keep_clients_out(serve):
    others = threading.active_count()
    server = serve()
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(socket.create_connection(server.address)) for _ in range(200)]
        check_serves(server.address)
        assert all(map(ends, connections[: 200 - channel_module.MAX_UNPROVEN])), "the oldest are closed"
        assert threading.active_count() - others < channel_module.MAX_UNPROVEN + 50
        check_serves(server.address)


def test_proven_connections_are_not_given_up_for_silent_ones(serve):
    server = serve()
    channels = [proven(server.address) for _ in range(channel_module.MAX_UNPROVEN + 10)]
    with contextlib.ExitStack() as stack:
        for _ in range(channel_module.MAX_UNPROVEN + 10):
            stack.enter_context(socket.create_connection(server.address))
        for n, channel in enumerate(channels):
            channel.send_frame(n=n)
        assert [channel.recv_frame() for channel in channels] == [{"n": n} for n in range(len(channels))]
    for channel in channels:
        channel.close()


def test_a_handler_that_fails_ends_its_own_connection(serve, caplog):
    server = serve()
    other = connect(server.address, SECRET, purpose="test")
    failing = connect(server.address, SECRET, purpose="test")
    with caplog.at_level(logging.WARNING, "libra.transport.channel"):
        failing.send_frame(**{"raise": "no such request"})
        assert failing.recv_frame() is None
    assert "no such request" in caplog.text
    other.send_frame(n=1)
    assert other.recv_frame() == {"n": 1}
    other.close()


def test_closing_ends_connections_and_listening():
    served = threading.Event()

    def handle(channel, client):
        served.set()
        channel.recv_frame()

    server = Server(handle, secret=SECRET, purpose="test", host="127.0.0.1")
    channel = connect(server.address, SECRET, purpose="test")
    assert served.wait(60)
    server.close()
    with contextlib.suppress(TransportError):  # reset, or ended
        assert channel.recv_frame() is None
    with pytest.raises(TransportError):
        connect(server.address, SECRET, purpose="test")


@pytest.mark.live
def test_a_process_without_file_descriptors_serves_again_when_it_has_some(repository):
    given = {"env": {**os.environ, "PYTHONPATH": str(repository)}, "stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, "-c", FEW_FILES, SECRET], text=True, **given)
    try:
        address = ("127.0.0.1", int(process.stdout.readline()))
        channels = [proven(address) for _ in range(3)]
        with contextlib.ExitStack() as stack:
            for _ in range(8):
                stack.enter_context(socket.create_connection(address))
            assert "Too many open files" in process.stdout.readline()
            for n, channel in enumerate(channels):
                channel.send_frame(n=n)
                assert channel.recv_frame() == {"n": n}
                channel.close()
        check_serves(address)
    finally:
        process.communicate("")
    assert process.returncode == 0

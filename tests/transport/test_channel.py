import json
import os
import socket
import struct
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra.errors import TransportError
from libra.transport import accept, channel, connect, new_secret
from libra.transport.channel import MAX_FRAME_BYTES, WINDOW_BYTES

SECRET = "known to both"


class Relay:
    """A server's address whose first client's frames are replaced by what ``tamper`` returns, after the handshake."""

    def __init__(self, target, tamper):
        self.listener = socket.create_server(("127.0.0.1", 0))
        self._target, self._tamper = target, tamper
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self):
        client, _ = self.listener.accept()
        with client, self._target as server:
            for source, sink, num_bytes in ((client, server, 32), (server, client, 64), (client, server, 32)):
                sink.sendall(exactly(source, num_bytes))
            while start := client.recv(4, socket.MSG_WAITALL):
                server.sendall(self._tamper(start + exactly(client, struct.unpack("!I", start)[0] + 32)))


def exactly(connection, num_bytes):
    return connection.recv(num_bytes, socket.MSG_WAITALL)


def ends(*, secret=SECRET, purpose="test", tamper=None):
    """(server's, client's) end of a connection; secret and purpose are the client's."""
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as thread:
        address = listener.getsockname()
        if tamper is not None:
            address = Relay(socket.create_connection(address), tamper).listener.getsockname()
        accepted = thread.submit(lambda: accept(listener.accept()[0], SECRET, purpose="test"))
        client = connect(address, secret, purpose=purpose)
        return accepted.result(), client


@given(st.dictionaries(st.text(max_size=9), st.integers() | st.floats(allow_nan=False) | st.lists(st.text(max_size=5))))
def test_frames_arrive_in_both_directions(fields):
    fields.pop("self", None)
    server, client = ends()
    for one, other in ((server, client), (client, server)):
        for n in range(3):
            one.send_frame(**{**fields, "n": n})
        assert [other.recv_frame() for _ in range(3)] == [{**fields, "n": n} for n in range(3)]
        assert one.sent_bytes == other.received_bytes > 0
    client.close()
    assert server.recv_frame() is None
    server.close()


@given(st.lists(st.integers(0, 3 * WINDOW_BYTES // 2) | st.integers(0, 9), max_size=6), st.booleans(), st.data())
def test_runs_of_bytes_arrive_whatever_their_cuts(sizes, checked, data):
    sent = [np.random.default_rng(n).integers(0, 256, size, np.uint8) for n, size in enumerate(sizes)]
    total = sum(sizes)
    cut = data.draw(st.integers(0, total))
    got = np.zeros(total, np.uint8)
    server, client = ends()
    with ThreadPoolExecutor(1) as thread:
        sending = thread.submit(server.send_bytes, [part.data for part in sent], checked=checked)
        client.recv_bytes([got[:cut].data, got[cut:].data], checked=checked)
        sending.result()
    assert bytes(got) == b"".join(map(bytes, sent))
    server.send_bytes([memoryview(b"good")])
    server.send_frame(crc32=1)
    with pytest.raises(TransportError, match="crc32"):
        client.recv_bytes([memoryview(bytearray(4))], checked=True)
    client.close()
    server.close()


def test_a_file_is_sent_from_an_offset(tmp_path):
    content = np.random.default_rng(0).bytes(3 * WINDOW_BYTES + 5)
    (tmp_path / "file").write_bytes(content)
    server, client = ends()
    with ThreadPoolExecutor(1) as thread, (tmp_path / "file").open("rb") as file:
        sending = thread.submit(server.send_file, file, 7, len(content) - 7)
        got, at = bytearray(len(content) - 7), 0
        while at < len(got):
            at += client.recv_some(memoryview(got)[at:])
        sending.result()
    assert bytes(got) == content[7:]
    with (tmp_path / "file").open("rb") as file, pytest.raises(TransportError):
        server.send_file(file, len(content), 1)
    server.close()
    with pytest.raises(TransportError):
        client.recv_some(memoryview(bytearray(1)))


def test_ends_of_different_secrets_or_purposes_do_not_meet():
    for other in ({"secret": new_secret()}, {"purpose": "weights"}):
        with pytest.raises(TransportError, match="secret"):
            ends(**other)


def test_a_client_is_not_deceived_by_its_own_numbers():
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as thread:

        def reflect():
            with listener.accept()[0] as connection:
                nonce = exactly(connection, 32)
                connection.sendall(nonce + nonce)

        thread.submit(reflect)
        with pytest.raises(TransportError, match="secret"):
            connect(listener.getsockname(), SECRET, purpose="test")


@pytest.mark.parametrize(("tamper", "whole"), [
    (lambda frame: frame + frame, 1), (lambda frame: frame.replace(b"leave", b"loave"), 0),
    (lambda frame: frame[:-1] + bytes([frame[-1] ^ 1]), 0), (lambda frame: b"" if b"first" in frame else frame, 0),
])  # fmt: skip
def test_a_frame_that_was_repeated_changed_or_left_out_is_refused(tamper, whole):
    server, client = ends(tamper=tamper)
    client.send_frame(kind="leave", first=True)
    client.send_frame(kind="leave")
    for _ in range(whole):
        assert server.recv_frame() == {"kind": "leave", "first": True}
    with pytest.raises(TransportError):
        server.recv_frame()


@pytest.mark.parametrize("tamper", [lambda frame: struct.pack("!I", 2**32 - 1), lambda frame: frame[:-40]])
def test_a_frame_of_a_wrong_length_is_refused(tamper):
    server, client = ends(tamper=tamper)
    client.send_frame(text="x" * 100)
    with pytest.raises(TransportError, match=str(MAX_FRAME_BYTES)):
        client.send_frame(text="x" * MAX_FRAME_BYTES)
    client.close()
    with pytest.raises(TransportError):
        server.recv_frame()


def test_a_frame_is_a_json_object(monkeypatch):
    server, client = ends()
    for text in ("[1]", "{"):
        monkeypatch.setattr(json, "dumps", lambda fields, text=text: text)
        client.send_frame()
        with pytest.raises(TransportError, match="JSON"):
            server.recv_frame()


def test_a_silent_peer_is_given_up():
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as thread:
        accepted = thread.submit(lambda: accept(listener.accept()[0], SECRET, purpose="test", silence_s=0.05))
        client = connect(listener.getsockname(), SECRET, purpose="test", silence_s=0.05)
        server = accepted.result()
    for act in (client.recv_frame, lambda: server.send_bytes([memoryview(bytes(2**26))])):
        with pytest.raises(TransportError, match="silent"):
            act()


@pytest.mark.parametrize("is_server", [True, False])
def test_the_handshake_has_one_deadline_however_often_a_byte_comes(is_server, monkeypatch):
    monkeypatch.setattr(channel, "HANDSHAKE_S", 0.3)
    ended = threading.Event()

    def drip(connection):
        with connection:
            while not ended.wait(0.02):
                try:
                    connection.sendall(os.urandom(1))
                except OSError:
                    return

    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as thread:
        address = listener.getsockname()
        dripping = thread.submit(lambda: drip(socket.create_connection(address) if is_server else listener.accept()[0]))
        with pytest.raises(TransportError, match="timed out"):
            accept(listener.accept()[0], SECRET, purpose="test") if is_server else connect(
                address, SECRET, purpose="test"
            )
        ended.set()
        dripping.result()

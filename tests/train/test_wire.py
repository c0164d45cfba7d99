"""What two replicas say to each other arrives as it was, or not at all; strangers are not listened to."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable

import pytest
import torch

from libra.errors import TransferError
from libra.train import Sample, sample_of
from libra.train.minibatch_slices import from_tensors, split, to_tensors
from libra.train.wire import CHUNK_BYTES, DTYPES, Wire, accept, connect


@pytest.fixture
def wires() -> Callable[..., tuple[Wire, Wire]]:
    """Maker of both ends of a connection; tokens may differ."""

    def make(token: str = "ours", other: str = "ours") -> tuple[Wire, Wire]:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            found: list[Wire | TransferError] = []

            def serve() -> None:
                try:
                    found.append(accept(listener.accept()[0], token))
                except TransferError as error:
                    found.append(error)

            thread = threading.Thread(target=serve)
            thread.start()
            try:
                client = connect(listener.getsockname(), other)
            finally:
                thread.join()
        assert isinstance(found[0], Wire)
        return found[0], client

    return make


def test_tensors_of_every_dtype_arrive_bit_for_bit(wires: Callable[..., tuple[Wire, Wire]]) -> None:
    core, hybrid = wires()
    bits = torch.randint(0, 256, (CHUNK_BYTES * 2 + 24,), dtype=torch.uint8)  # more than two chunks
    tensors = {name: (bits % 2 if dtype is torch.bool else bits).view(dtype) for name, dtype in DTYPES.items()}
    tensors |= {"scalar": torch.tensor(-0.0), "empty": torch.zeros(0, 3), "strided": torch.arange(12).view(3, 4).T}
    sending = threading.Thread(target=core.send, args=("state", {"version": 3, "x": 0.1}, tensors))
    sending.start()
    message = hybrid.receive()
    sending.join()
    assert (message.kind, message.fields) == ("state", {"version": 3, "x": 0.1})
    assert list(message.tensors) == list(tensors)
    for name, tensor in tensors.items():
        got = message.tensors[name]
        assert (got.dtype, got.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(got.reshape(-1).view(torch.uint8), tensor.contiguous().reshape(-1).view(torch.uint8))


def test_who_does_not_know_the_token_is_told_nothing(wires: Callable[..., tuple[Wire, Wire]]) -> None:
    with pytest.raises(TransferError, match=r"does not know this group's token|no handshake"):
        wires("ours", "theirs")


def test_a_message_that_comes_twice_or_was_changed_is_refused(wires: Callable[..., tuple[Wire, Wire]]) -> None:
    for tamper, whole in ((lambda frame: frame + frame, 1), (lambda frame: frame.replace(b"leave", b"loave"), 0)):
        core, hybrid = wires()
        ours, theirs = socket.socketpair()
        real, hybrid._socket = hybrid._socket, ours
        hybrid.send("leave")
        ours.close()
        frame = b"".join(iter(lambda end=theirs: end.recv(4096), b""))
        real.sendall(tamper(frame))
        for _ in range(whole):
            assert core.receive().kind == "leave"
        with pytest.raises(TransferError, match="out of turn"):
            core.receive()


def test_a_broken_connection_is_no_short_tensor(wires: Callable[..., tuple[Wire, Wire]]) -> None:
    core, hybrid = wires()
    header = json.dumps({"kind": "state", "tensors": [["w", "float32", [1000]]]}).encode()
    mac = core._mac(b"S", 0, header)
    core._socket.sendall(b"LBR1" + len(header).to_bytes(4, "big") + header + mac + bytes(1000))
    core.close()
    with pytest.raises(TransferError, match="the other end is gone"):
        hybrid.receive()
    with pytest.raises(TransferError, match="failed"):
        core.send("leave")


def test_a_slice_comes_back_as_it_was(batch: list, trajectory: Callable[..., object]) -> None:
    samples = [sample_of(one, 0) for one in batch]
    samples[3] = Sample(
        **{**{n: getattr(samples[3], n) for n in Sample.__slots__}, "proximal_logp": samples[3].behaviour_logp}
    )
    for given in (samples, samples[:1], []):
        for one, other in zip(given, from_tensors(to_tensors(given)), strict=True):
            for name in Sample.__slots__:
                mine, theirs = getattr(one, name), getattr(other, name)
                assert (mine is None) == (theirs is None)
                if mine is not None:
                    assert (
                        (mine == theirs)
                        if name == "advantage"
                        else (mine.dtype, mine.tolist()) == (theirs.dtype, theirs.tolist())
                    )


@pytest.mark.parametrize("num_slices", [1, 2, 5, 12, 20])
def test_slices_hold_every_sample_once_and_balance_tokens(batch: list, num_slices: int) -> None:
    samples = [sample_of(one, 0) for one in batch]
    slices = split(samples, num_slices)
    assert len(slices) == num_slices
    assert sorted(id(s) for part in slices for s in part) == sorted(map(id, samples))
    tokens = [sum(s.num_tokens for s in part) for part in slices]
    assert max(tokens) - min(tokens) <= max(s.num_tokens for s in samples)
    assert split([], 3) == [[], [], []]

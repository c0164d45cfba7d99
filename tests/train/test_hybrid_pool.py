import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from queue import SimpleQueue

import numpy as np
import pytest
import torch
from torch import Tensor

from libra.errors import TransferError
from libra.train import Sample, sample_of
from libra.train.hybrid_pool import DTYPES, PURPOSE, HybridPool, Wire, connect, from_tensors, to_tensors
from libra.transport import Server
from libra.transport.channel import WINDOW_BYTES
from libra.types import Taught


@pytest.fixture
def wires():
    accepted = SimpleQueue()
    ended = threading.Event()

    def handle(channel, client):
        accepted.put(channel)
        ended.wait()

    server = Server(handle, secret="ours", purpose=PURPOSE, host="127.0.0.1")
    hybrid = connect(server.address, "ours")
    yield Wire(accepted.get()), hybrid
    ended.set()
    hybrid.close()
    server.close()


def test_tensors_of_every_dtype_arrive_bit_for_bit(wires):
    core, hybrid = wires
    bits = torch.randint(0, 256, (2 * WINDOW_BYTES + 24,), dtype=torch.uint8)  # more than two windows
    tensors = {name: (bits % 2 if dtype is torch.bool else bits).view(dtype) for name, dtype in DTYPES.items()}
    tensors |= {"scalar": torch.tensor(-0.0), "empty": torch.zeros(0, 3), "strided": torch.arange(12).view(3, 4).T}
    with ThreadPoolExecutor(1) as thread:
        sending = thread.submit(core.send, "state", {"version": 3, "x": 0.1}, tensors)
        message = hybrid.receive()
        assert message.num_bytes == sending.result()
    assert (message.kind, message.fields) == ("state", {"version": 3, "x": 0.1})
    assert list(message.tensors) == list(tensors)
    for name, tensor in tensors.items():
        got = message.tensors[name]
        assert (got.dtype, got.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(got.reshape(-1).view(torch.uint8), tensor.contiguous().reshape(-1).view(torch.uint8))


def test_a_broken_connection_is_no_short_tensor(wires):
    core, hybrid = wires
    core._channel.send_frame(kind="state", tensors=[["w", "float32", [1000]]], fields={})
    core._channel.send_bytes([memoryview(bytes(1000))])
    core.close()
    with pytest.raises(TransferError):
        hybrid.receive()
    with pytest.raises(TransferError):
        core.send("leave")


@pytest.mark.parametrize("tensor", [["w", "float32", [-1]], ["w", "float32", [2**60]], ["w", "object", [1]], ["w"]])
def test_a_tensor_that_cannot_be_is_refused(wires, tensor):
    core, hybrid = wires
    core._channel.send_frame(kind="state", tensors=[tensor], fields={})
    with pytest.raises(TransferError):
        hybrid.receive()


def test_a_slice_comes_back_as_it_was(batch, trajectory):
    samples = [sample_of(one, 0) for one in batch]
    samples[3] = replace(samples[3], proximal_logp=samples[3].behaviour_logp, counted=False, engines=("good", "bad"))
    samples[4] = replace(samples[4], routes=np.ones((samples[4].num_tokens, 2, 2), np.int16))
    samples[1] = replace(samples[1], token_advantage=np.linspace(-1.0, 1.0, samples[1].num_actions))
    samples[2] = replace(samples[2], kept=np.arange(samples[2].num_actions) % 2 == 0)
    for number in (0, 5):
        logp = np.random.default_rng(number).normal(size=(samples[number].num_actions, 3)).astype(np.float32)
        samples[number] = replace(samples[number], taught=Taught(logp.astype(np.int32), logp, logp[:, 0], None, -logp))
    for given in (samples, samples[:1], []):
        for one, other in zip(given, from_tensors(to_tensors(given)), strict=True):
            for name in Sample.__slots__:
                mine, theirs = getattr(one, name), getattr(other, name)
                assert (mine is None) == (theirs is None)
                if name == "taught" and mine is not None:
                    mine, theirs = ([each if each is None else each.tolist() for each in t] for t in (mine, theirs))
                if isinstance(mine, np.ndarray):
                    mine, theirs = (mine.dtype, mine.tolist()), (theirs.dtype, theirs.tolist())
                assert mine == theirs, name


class Watched(Mapping[str, Tensor]):
    """Tensors of which the second is handed out only when a step has begun to wait; what was asked for."""

    def __init__(self):
        self.begun, self.step = threading.Event(), threading.Event()
        self.asked = []

    def __iter__(self):
        return map(str, range(10**6))

    def __len__(self):
        return 10**6

    def __getitem__(self, name):
        self.asked.append(name)
        if name == "1":
            self.begun.set()
            assert self.step.wait(60)
        return torch.zeros(2)


def test_a_copy_for_a_joiner_gives_way_to_the_step_that_begins():
    weights = Watched()
    pool = HybridPool("token", {"settings": 1}, source=lambda: weights)
    joiner = connect(pool.address, "token")
    joiner.send("hello", {"name": "slow", "description": {"settings": 1}})
    assert weights.begun.wait(60)
    weights.step.set()
    with pool.undisturbed():
        assert len(weights.asked) < len(weights)
        assert pool.stale, "what comes out of the step is published instead"
    assert pool.traffic()["hybrid_blocked_s"] > 0.0
    joiner.close()
    pool.close()

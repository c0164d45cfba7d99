"""The core's side of hybrid replicas by itself: a step never waits for a copy that a joiner asked for."""

import threading
from collections.abc import Mapping

import torch
from torch import Tensor

from libra.train.hybrid_pool import HybridPool
from libra.train.wire import connect


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


def test_weights_are_published_between_steps():
    pool = HybridPool("token", {})
    with pool.undisturbed():
        assert pool.stale, "a step changes the weights"
    pool.publish({"a": torch.ones(2)})
    assert not pool.stale
    pool.close()

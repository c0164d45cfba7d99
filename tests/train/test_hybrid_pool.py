"""The core's side of hybrid replicas by itself: a step never waits for a copy that a joiner asked for."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from libra.train.hybrid_pool import HybridPool


class Watched(Mapping[str, Tensor]):
    """Three tensors, of which the second is handed out only when a step is about to begin; what was asked for."""

    def __init__(self) -> None:
        self.begun, self.step = threading.Event(), threading.Event()
        self.asked: list[str] = []

    def __iter__(self) -> Iterator[str]:
        return iter("abc")

    def __len__(self) -> int:
        return 3

    def __getitem__(self, name: str) -> Tensor:
        self.asked.append(name)
        if name == "b":
            self.begun.set()
            assert self.step.wait(60)
        return torch.zeros(2)


def test_a_copy_for_a_joiner_gives_way_to_the_step_that_begins():
    weights = Watched()
    pool = HybridPool("token", {}, source=lambda: weights)
    hurry = pool._hurry

    class Tells(threading.Event):
        """Lets the copy go on once the training thread has said that it wants to begin."""

        def set(self) -> None:
            hurry.set()
            weights.step.set()

        def is_set(self) -> bool:
            return hurry.is_set()

        def clear(self) -> None:
            hurry.clear()

    pool._hurry = Tells()
    joins = threading.Thread(target=pool._offer_between_steps)
    joins.start()
    assert weights.begun.wait(60)
    with pool.undisturbed():
        assert weights.asked == ["a", "b"]  # and never the third
        assert pool.stale, "what comes out of the step is published instead"
    joins.join()
    assert pool.traffic()["hybrid_blocked_s"] > 0.0
    pool.close()


def test_weights_are_copied_between_steps_and_not_in_one():
    weights: Any = {"a": torch.ones(2)}
    pool = HybridPool("token", {}, source=lambda: weights)
    with pool.undisturbed():
        other = threading.Thread(target=pool._offer_between_steps)
        other.start()
        other.join()
        assert pool.stale, "a step changes the weights"
    pool._offer_between_steps()
    assert not pool.stale
    pool.close()

"""A late correction adds to the gradient of the policy loss what the reward changes, and counts in no denominator."""

from __future__ import annotations

from dataclasses import replace as changed
from typing import Any

import numpy as np
import pytest
import torch

from libra.train import Replica, sample_of
from libra.train.aggregation import AGGREGATIONS
from libra.train.lazy_batch import LazyBatch, RowFacts
from libra.train.minibatch_slices import from_tensors, to_tensors
from libra.types import Trajectory


def gradient_of(replica: Replica, batch: list[Trajectory]) -> torch.Tensor:
    """The gradient of step 0, before it is clipped."""
    found: list[torch.Tensor] = []
    replica.apply_gradient = lambda step, tally: found.append(  # type: ignore[method-assign]
        torch.cat([p.grad.flatten().clone() for p in replica.optimized().values() if p.grad is not None])
    )
    replica.step(batch, 0)
    (gradient,) = found
    return gradient


def corrections(batch: list[Trajectory], more: np.ndarray) -> list[Trajectory]:
    return [changed(one, advantage=float(a), counted=False) for one, a in zip(batch, more, strict=True)]


@pytest.mark.parametrize("mode", AGGREGATIONS)
@pytest.mark.parametrize("terms", [{}, {"entropy_coef": 0.1, "kl_coef": 0.05}])
def test_provisional_advantages_and_their_corrections_give_the_gradient_of_the_final_ones(mode, terms, replica, batch):
    settings: dict[str, Any] = {"aggregation": mode, "loss_divisor": 100.0, "old_logp": "exact", **terms}
    more = np.random.default_rng(5).normal(size=len(batch))
    final = [changed(one, advantage=one.advantage + float(a)) for one, a in zip(batch, more, strict=True)]
    wanted = gradient_of(replica(torch.float64, **settings), final)
    found = gradient_of(replica(torch.float64, **settings), [*batch, *corrections(batch, more)])
    torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-12)
    assert not torch.allclose(found, gradient_of(replica(torch.float64, **settings), batch), rtol=1e-3)


def test_a_correction_survives_a_slice_and_a_fetch(batch):
    (late,) = corrections(batch[:1], np.array([0.5]))
    (sample,) = from_tensors(to_tensors([sample_of(late, 3)]))
    assert not sample.counted and sample.advantage == 0.5
    assert from_tensors(to_tensors([sample_of(batch[1], 3)]))[0].counted
    own = sample_of(batch[0], 3)
    facts = [RowFacts("a", own.num_tokens, own.num_actions, 0.5, counted=False)]
    lazy = LazyBatch(facts, 1, lambda rows: batch[:1])
    (absent,) = lazy.samples(3)
    assert not absent.counted
    lazy.get([absent])  # type: ignore[list-item]
    assert not lazy.fetched["a"].counted and lazy.fetched["a"].advantage == 0.5

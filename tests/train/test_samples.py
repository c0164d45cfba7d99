from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
import torch

from libra.config.algorithms import AggregationMode
from libra.errors import TrainError
from libra.train import Replica, TrainSettings, sample_of
from libra.train.packing import split
from libra.train.samples import LazyBatch, RowFacts, present
from libra.types import FailureClass


@pytest.fixture
def batch(trajectory):
    made = [trajectory(seed, 0.5 - seed % 3, lengths=(3 + seed, 2 + 3 * seed, 2, 4)) for seed in range(5)]
    failed, silent = trajectory(5), trajectory(6, lengths=(9,))
    failed.failure = FailureClass.ENGINE
    return [*made, failed, silent]


class Elsewhere:
    """Who has the rows, and what was asked for."""

    def __init__(self, trajectories):
        self.rows = {str(t.trajectory_id): t for t in trajectories}
        self.asked = []

    def __call__(self, rows):
        self.asked += rows
        return [replace(self.rows[row], advantage=0.0) for row in rows]

    def batch(self):
        useful = [(n, t) for n, t in self.rows.items() if t.failure.trains and t.num_action_tokens]
        samples = [(name, sample_of(t, 0)) for name, t in useful]
        facts = [RowFacts(name, s.num_tokens, s.num_actions, s.advantage) for name, s in samples]
        return LazyBatch(facts, len(self.rows), self)


@pytest.mark.parametrize("settings", [{"epochs": 2}, {"old_logp": "proximal"}, {"exact_logprobs": True}])
def test_a_step_is_the_same(model_dir, batch, settings):
    reports, elsewhere, settings = [], Elsewhere(batch), settings | {"minibatches": 2}
    for given in (batch, elsewhere.batch()):
        replica = Replica(model_dir, TrainSettings(lr=1e-3, **settings), dtype=torch.float64, threads=1)
        reports.append(replica.step(given, 0).as_dict())
    measured = ("_s", "peak_bytes")
    here, there = ({n: v for n, v in report.items() if not n.endswith(measured)} for report in reports)
    assert here == there
    assert here["excluded_sequences"] == 2
    assert sorted(elsewhere.asked) == sorted(str(t.trajectory_id) for t in batch[:5])


def test_slices_follow_from_lengths_and_only_the_own_one_is_fetched(batch):
    elsewhere = Elsewhere(batch)
    slices = split(elsewhere.batch().samples(0), 2)
    whole = split([sample_of(t, 0) for t in batch[:5]], 2)
    mine = present(slices[1])
    assert [s.num_tokens for s in slices[0]] == [s.num_tokens for s in whole[0]]
    assert [s.token_ids.tolist() for s in mine] == [s.token_ids.tolist() for s in whole[1]]
    assert [s.advantage for s in mine] == [s.advantage for s in whole[1]]
    assert len(elsewhere.asked) == len(mine) < 5
    assert present(slices[1]) == mine  # not fetched again
    assert len(elsewhere.asked) == len(mine)


def test_another_trajectory_than_announced_is_refused(batch, trajectory):
    elsewhere = Elsewhere(batch)
    samples = elsewhere.batch().samples(0)
    elsewhere.rows[str(batch[0].trajectory_id)] = trajectory(0, lengths=(3, 3))
    with pytest.raises(TrainError):
        present(samples)


def gradient_of(replica, batch):
    found = []
    replica.apply_gradient = lambda step, tally: found.append(
        torch.cat([p.grad.flatten().clone() for p in replica.optimized().values() if p.grad is not None])
    )
    replica.step(batch, 0)
    (gradient,) = found
    return gradient


def corrections(batch, more):
    return [replace(one, advantage=float(a), counted=False) for one, a in zip(batch, more, strict=True)]


@pytest.mark.parametrize("mode", get_args(AggregationMode))
def test_provisional_advantages_and_their_corrections_give_the_gradient_of_the_final_ones(mode, replica, batch):
    settings = {"aggregation": mode, "loss_divisor": 100.0, "old_logp": "exact", "entropy_coef": 0.1, "kl_coef": 0.05}
    more = np.random.default_rng(5).normal(size=len(batch))
    final = [replace(one, advantage=one.advantage + float(a)) for one, a in zip(batch, more, strict=True)]
    wanted = gradient_of(replica(torch.float64, **settings), final)
    found = gradient_of(replica(torch.float64, **settings), [*batch, *corrections(batch, more)])
    torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-12)
    assert not torch.allclose(found, gradient_of(replica(torch.float64, **settings), batch), rtol=1e-3)


def test_a_correction_survives_a_fetch(batch):
    own = sample_of(batch[0], 3)
    lazy = LazyBatch([RowFacts("a", own.num_tokens, own.num_actions, 0.5, counted=False)], 1, lambda rows: batch[:1])
    (absent,) = lazy.samples(3)
    lazy.get([absent])
    assert not absent.counted and not lazy.fetched["a"].counted and lazy.fetched["a"].advantage == 0.5

"""A step on a batch that lies elsewhere is the step on its trajectories, and fetches what it computes only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from libra.errors import TrainError
from libra.train import Replica, TrainSettings, sample_of
from libra.train.lazy_batch import LazyBatch, RowFacts, present
from libra.train.minibatch_slices import split
from libra.types import FailureClass, Trajectory


@pytest.fixture
def batch(trajectory):
    """Seven trajectories of different lengths; one failed, one has no generated token."""
    made = [trajectory(seed, 0.5 - seed % 3, lengths=(3 + seed, 2 + 3 * seed, 2, 4)) for seed in range(5)]
    failed, silent = trajectory(5), trajectory(6, lengths=(9,))
    failed.failure = FailureClass.ENGINE
    return [*made, failed, silent]


class Elsewhere:
    """Who has the rows, and what was asked for."""

    def __init__(self, trajectories: Sequence[Trajectory]) -> None:
        self.rows = {str(t.trajectory_id): t for t in trajectories}
        self.asked: list[str] = []

    def __call__(self, rows: Sequence[str]) -> list[Trajectory]:
        self.asked += rows
        return [replace(self.rows[row], advantage=0.0) for row in rows]

    def batch(self) -> LazyBatch:
        useful = [(n, t) for n, t in self.rows.items() if t.failure.trains and t.num_action_tokens]
        samples = [(name, sample_of(t, 0)) for name, t in useful]
        facts = [RowFacts(name, s.num_tokens, s.num_actions, s.advantage) for name, s in samples]
        return LazyBatch(facts, len(self.rows), self)


@pytest.mark.parametrize(
    "settings",
    [{}, {"minibatches": 2, "epochs": 2}, {"minibatches": 2, "old_logp": "proximal"}, {"exact_logprobs": True}],
)
def test_a_step_is_the_same(model_dir, batch, settings):
    reports = []
    elsewhere = Elsewhere(batch)
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
    with pytest.raises(TrainError, match="not the one of this batch"):
        present(samples)

"""A batch whose trajectories are on other workers: lengths and advantages are here, tokens are fetched slice by slice.

Invariants
----------
1. A step on a lazy batch is the step on its trajectories, bit for bit: slices are computed from the announced lengths; a
   sample that arrives with another length is a TrainError.
2. A row is fetched once at most, and only for a slice of this replica or of a hybrid that it feeds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from libra.errors import TrainError
from libra.train.samples import Sample, sample_of
from libra.types import Trajectory

Fetch = Callable[[Sequence[str]], Sequence[Trajectory]]
"""Trajectories of rows by name, in that order, without their advantages. Raises TrainError if one cannot be fetched."""

_NONE = np.zeros(0, np.int64)
_NO_LOGP, _NO_FLAGS = np.zeros(0, np.float32), np.zeros(0, np.bool_)


@dataclass(frozen=True, slots=True)
class RowFacts:
    """The row of a trajectory that trains, the lengths and advantage of its `Sample`, and whether it is counted."""

    row: str
    num_tokens: int
    num_actions: int
    advantage: float
    counted: bool = True


class LazyBatch:
    """A batch's trajectories for `Replica.step`, fetched on demand.

    Parameters
    ----------
    facts : sequence of RowFacts
        Of trajectories that train, in the order of the batch.
    num_trajectories : int
        Including those that do not train.
    fetch : callable
    """

    def __init__(self, facts: Sequence[RowFacts], num_trajectories: int, fetch: Fetch) -> None:
        self.facts = facts
        self.num_trajectories = num_trajectories
        self.fetched: dict[str, Sample] = {}
        self._fetch = fetch

    def __len__(self) -> int:
        return self.num_trajectories

    def samples(self, step: int) -> list[Sample]:
        """One placeholder for each sample; `present` has the samples themselves."""
        return [_Absent.of(fact, self, step) for fact in self.facts]

    def get(self, absent: Sequence[_Absent]) -> None:
        """Fetch the samples of those rows that are not in `fetched` yet."""
        missing = [sample for sample in absent if sample.fact.row not in self.fetched]
        for sample, trajectory in zip(missing, self._fetch([sample.fact.row for sample in missing]), strict=True):
            fact = sample.fact
            trajectory.advantage, trajectory.counted = fact.advantage, fact.counted
            arrived = sample_of(trajectory, sample.step)
            if (arrived.num_tokens, arrived.num_actions) != (fact.num_tokens, fact.num_actions):
                raise TrainError(
                    f"trajectory {trajectory.trajectory_id}: it has {arrived.num_tokens} tokens and {arrived.num_actions} "
                    f"actions where {fact.num_tokens} and {fact.num_actions} were announced; it is not the one of this batch"
                )
            self.fetched[fact.row] = arrived


@dataclass(frozen=True, slots=True, eq=False)
class _Absent(Sample):
    """A sample that was not fetched: lengths and advantage are right, arrays are empty."""

    fact: RowFacts = RowFacts("", 0, 0, 0.0)
    batch: LazyBatch | None = None
    step: int = -1

    @classmethod
    def of(cls, fact: RowFacts, batch: LazyBatch, step: int) -> _Absent:
        """For one row of ``batch``."""
        arrays = (_NONE, _NONE, _NONE, _NO_LOGP, _NO_FLAGS)
        return cls(*arrays, fact.advantage, counted=fact.counted, fact=fact, batch=batch, step=step)

    @property
    def num_tokens(self) -> int:
        """Inputs."""
        return self.fact.num_tokens

    @property
    def num_actions(self) -> int:
        """Tokens scored."""
        return self.fact.num_actions


def samples_of(batch: Sequence[Trajectory] | LazyBatch, step: int, *, whole: bool) -> list[Sample]:
    """The samples of a batch for the step that trains weights ``step``; for a lazy batch placeholders, unless ``whole``."""
    if isinstance(batch, LazyBatch):
        samples = batch.samples(step)
        return present(samples) if whole else samples
    trained = (trajectory for trajectory in batch if trajectory.failure.trains)
    return [sample_of(trajectory, step) for trajectory in trained if trajectory.num_action_tokens]


def present(samples: Sequence[Sample]) -> list[Sample]:
    """``samples``, with all placeholders fetched at once."""
    absent = [sample for sample in samples if isinstance(sample, _Absent)]
    if not absent:
        return list(samples)
    batch = absent[0].batch
    assert batch is not None and all(sample.batch is batch for sample in absent), "a step has one batch"
    batch.get(absent)
    return [batch.fetched[sample.fact.row] if isinstance(sample, _Absent) else sample for sample in samples]

"""Writes checkpoints on the training worker without delaying publishing or the next step.

``checkpoint-k`` comes after ``publish-k`` and takes no training slot, so step k + 1 may begin
before it. The state is therefore copied by the first of two: the checkpoint's task, or the step
that would change it.

Invariants
----------
1. The checkpoint of version v is the replica's state after v steps, regardless of later steps.
2. A step may wait for a copy in memory, never for the disk; publishing waits for neither.
3. One checkpoint is written at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from libra.config import RunConfig
from libra.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

    from libra.train import Replica, StepReport
    from libra.train.checkpoint import ReplicaSnapshot
    from libra.train.samples import LazyBatch
    from libra.types import Trajectory

EVERY_STEPS = 10
"""Steps between checkpoints if neither ``checkpoint.every`` nor ``evaluation.every`` is set."""


def checkpoint_is_due(config: RunConfig, version: int) -> bool:
    """Whether the weights after ``version`` steps are to be saved."""
    every = config.checkpoint.every
    if every is None:
        every = config.evaluation.every or EVERY_STEPS
    return version == config.run.iterations or (every > 0 and version > 0 and version % every == 0)


class CheckpointWriter:
    """The replica's checkpoints of one run; its methods are called from several threads."""

    def __init__(self, replica: Replica, directory: Path, config: RunConfig) -> None:
        self.replica, self.directory, self.config = replica, directory, config
        self._state = threading.Lock()  # held by a step, and while its outcome is copied
        self._disk = threading.Lock()
        self.is_writer = True
        """Whether this is rank 0 of its group, which writes for all of them."""
        self.is_sharded = False
        """Whether each rank holds a shard, so that a copy is made by all of them together."""
        self._copies: dict[int, ReplicaSnapshot] = {}
        self._done: set[int] = set()

    def step(self, trajectories: list[Trajectory] | LazyBatch, step: int) -> StepReport:
        """One step of the replica, once a due state that it would change is copied."""
        return self._take(step, lambda: self.replica.step(trajectories, step))

    def accumulate(self, trajectories: list[Trajectory] | LazyBatch, step: int) -> int:
        """Add the gradient of the next wave of a step, which changes no weight; returns how many it has."""
        with self._state:
            return self.replica.accumulate(trajectories, step)

    def close(self, step: int) -> StepReport:
        """As `step`, on the waves that were added."""
        report = self.replica.last_report
        if report is not None and report.step == step == self.replica.steps_done - 1:
            return report  # other ranks may not be here
        return self._take(step, lambda: self.replica.close(step))

    def _take(self, step: int, taken: Callable[[], StepReport]) -> StepReport:
        with self._state:
            self._copy_if_due(step)
            result = taken()
            if self.is_sharded:  # now that every rank is here: the checkpoint's task is rank 0's alone
                self._copy_if_due(step + 1)
            return result

    def save_due(self, version: int) -> list[Path]:
        """Write the checkpoints due at or before ``version``, the replica's own, unless an earlier start wrote them."""
        with self._state:
            self._copy_if_due(version)
            due = sorted(self._copies)
        return [self.save(number) for number in due]

    def load(self, directory: Path) -> None:
        """Load a checkpoint of this run."""
        with self._state:
            self.replica.load(directory)

    def take_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Replace only the replica's weights."""
        with self._state:
            self.replica.take_weights(weights)

    def save(self, version: int) -> Path:
        """Write the checkpoint of ``version``; its directory.

        CheckpointError if the replica is past that version and has no copy, or the disk refuses.
        """
        from libra.train.checkpoint import checkpoint_name, save_checkpoint

        target = self.directory / checkpoint_name(version)
        with self._state:
            if not self.is_sharded:
                self._copy_if_due(version)
            if version in self._done:
                return target
            copy = self._copies.get(version)
        if copy is None:
            raise CheckpointError(
                f"checkpoint: {target} is to hold the weights after {version} steps, and the replica has taken "
                f"{self.replica.steps_done}; resume the run from the newest checkpoint there is"
            )
        with self._disk:
            save_checkpoint(target, copy)
        with self._state:
            self._copies.pop(version, None)
            self._done.add(version)
        return target

    def save_or_later(self, version: int) -> Path:
        """As `save`, or the checkpoint of the present state in a group whose rank 0 was lost before it copied that one."""
        try:
            return self.save(version)
        except CheckpointError:
            with self._state:
                later = self.replica.steps_done
                if later <= version or self.is_sharded:
                    raise
                self._copies[later] = self.replica.snapshot()
        return self.save(later)

    def _copy_if_due(self, version: int) -> None:
        from libra.train.checkpoint import checkpoint_name, has_optimizer

        if has_optimizer(self.directory / checkpoint_name(version)):
            self._done.add(version)  # by an earlier start, or before this worker was restarted
        due = (
            self.replica.steps_done == version
            and checkpoint_is_due(self.config, version)
            and version not in self._copies
            and version not in self._done
        )
        if self.is_sharded:
            due = self.replica.group.from_first(due)
        elif not self.is_writer:
            return
        if due:
            copy = self.replica.snapshot()
            if self.is_writer:
                self._copies[version] = copy

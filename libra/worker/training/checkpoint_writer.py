"""Writes checkpoints on the training worker without delaying publication or the next step.

``checkpoint-k`` follows ``publish-k`` and takes no training slot, so step k + 1 may start before
it. The state is copied by whichever comes first: the checkpoint's task, or the step that would
change the state.

Invariants
----------
1. The checkpoint of version v is the replica's state after v steps, unaffected by later steps.
2. A step may wait for a copy in memory, never for the disk; publication waits for neither.
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
    """Whether the weights after ``version`` steps are saved."""
    every = config.checkpoint.every
    if every is None:
        every = config.evaluation.every or EVERY_STEPS
    return version == config.run.iterations or (every > 0 and version > 0 and version % every == 0)


class CheckpointWriter:
    """Checkpoints of a run's replica. Thread-safe."""

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
        """Take one step; first copy the current state if its checkpoint is due."""
        return self._take(step, lambda: self.replica.step(trajectories, step))

    def accumulate(self, trajectories: list[Trajectory] | LazyBatch, step: int) -> int:
        """Add the gradient of a step's next wave; returns the number of waves added so far."""
        with self._state:
            return self.replica.accumulate(trajectories, step)

    def close(self, step: int) -> StepReport:
        """`step` on the accumulated waves."""
        report = self.replica.last_report
        if report is not None and report.step == step == self.replica.steps_done - 1:
            return report  # other ranks may not be here
        return self._take(step, lambda: self.replica.close(step))

    def _take(self, step: int, taken: Callable[[], StepReport]) -> StepReport:
        with self._state:
            self._copy_if_due(step)
            result = taken()
            if self.is_sharded:  # every rank is here now; the checkpoint's task runs on rank 0 alone
                self._copy_if_due(step + 1)
            return result

    def save_due(self, version: int) -> list[Path]:
        """Write this replica's unwritten checkpoints that are due at or before ``version``."""
        with self._state:
            self._copy_if_due(version)
            due = sorted(self._copies)
        return [self.save(number) for number in due]

    def load(self, directory: Path) -> None:
        with self._state:
            self.replica.load(directory)

    def take_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Replace the replica's weights; the optimizer is unchanged."""
        with self._state:
            self.replica.take_weights(weights)

    def save(self, version: int) -> Path:
        """Write the checkpoint of ``version``; returns its directory.

        Raises CheckpointError if the replica is past that version without a copy, or the disk
        fails.
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
        """`save`, or save the current state if rank 0 was lost before it copied ``version``."""
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

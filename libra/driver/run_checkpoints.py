"""The driver's view of a run's checkpoints: those being written, and those kept.

The driver waits for a checkpoint only when the next one is due, or the run ends; the disk delays nothing else.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from libra.driver.resume import prune_groups
from libra.train.checkpoint import complete, newest, step_of
from libra.train.checkpoint_directory import KeptCheckpoints
from libra.worker.checkpoint_writer import checkpoint_is_due
from libra.worker.run_spec import RunSpec

if TYPE_CHECKING:
    from distributed import Future


class RunCheckpoints:
    """Checkpoints of one start of a run.

    Parameters
    ----------
    spec : RunSpec
    result : callable
        Waits for a future of an iteration; `libra.driver.submitted_graphs.SubmittedGraphs.result`.

    Attributes
    ----------
    newest : Path or None
        The last one that is complete.
    """

    def __init__(self, spec: RunSpec, result: Callable[[Future[Any], int], Any]) -> None:
        self._spec, self._result = spec, result
        keep = spec.config.checkpoint
        self._kept = KeptCheckpoints(spec.checkpoints_dir, keep=keep.keep, keep_best=keep.keep_best)
        self.newest: Path | None = newest(spec.checkpoints_dir)
        self._saving: deque[tuple[int, Future[Any]]] = deque()
        self._pruned = 0  # batches whose group records are removed

    @property
    def best(self) -> Path | None:
        """The checkpoint with the best score, if ``checkpoint.keep_best`` is set."""
        return self._kept.best() if self._spec.config.checkpoint.keep_best else None

    def score(self, version: int, reward: float) -> None:
        """Record the reward of a version that has a checkpoint; see `libra.train.checkpoint_directory`."""
        if version and checkpoint_is_due(self._spec.config, version):
            self._kept.score(version, reward)
            self._kept.tidy()

    def follow(self, k: int, saving: Future[Any] | None, *, last: bool) -> None:
        """Follow the checkpoint of iteration ``k``; wait for all but the newest, after the ``last`` iteration for that too."""
        if saving is not None:
            self._saving.append((k, saving))
        allowed = 0 if last else 1
        while self._saving and (self._saving[0][1].done() or len(self._saving) > allowed):
            saved, future = self._saving.popleft()
            self.newest = Path(self._result(future, saved))
            self._kept.tidy()
            oldest = next(iter(complete(self._spec.checkpoints_dir)))
            self._pruned = prune_groups(self._spec, self._pruned, step_of(oldest))

    def release(self) -> None:
        """Release the futures of checkpoints that are being written."""
        for _, future in self._saving:
            future.release()

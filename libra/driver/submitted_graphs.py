"""A driver's submitted, unfinished graphs as futures, and its view of the run's checkpoints.

Invariants
----------
1. Futures of an iteration are released when its summary arrives, futures of unfinished groups when
   they finish: the scheduler holds a bounded number of tasks.
2. An error of any future ends every wait: a batch would wait forever for a lost group.
3. The driver waits for a checkpoint only when the next one is due, or the run ends.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distributed import Client, Future
from distributed.comm import CommClosedError

from libra.errors import ClusterError, LibraError
from libra.graph.iteration import iteration_graph, iteration_groups
from libra.store.run_records import group_path, read_batch_facts, scores_path
from libra.train.checkpoint import complete, newest, step_of
from libra.train.checkpoint_directory import KeptCheckpoints
from libra.worker.run_spec import RunSpec
from libra.worker.training.batch_rows import waiting_after
from libra.worker.training.checkpoint_writer import checkpoint_is_due

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dask.delayed import Delayed
    from distributed import Future

    from libra.driver.run_start import RunStart


LOOK_S = 5.0
"""Seconds between polls of a future: Dask does not notify of a result that was lost and computed again."""


@dataclass(frozen=True, slots=True)
class SubmittedIteration:
    """The futures of one iteration; ``checkpoint`` is None if none is due."""

    end: Future[Any]
    groups: list[Future[Any]]
    checkpoint: Future[Any] | None

    @property
    def all(self) -> list[Future[Any]]:
        return [self.end, *self.groups, *([self.checkpoint] if self.checkpoint is not None else [])]


class SubmittedGraphs:
    """Submits the graphs of one start of a run; ``pending`` iterations have no summary yet."""

    def __init__(self, client: Client, start: RunStart) -> None:
        self._client, self._start = client, start
        self.pending: dict[int, SubmittedIteration] = {}
        self._carried: list[Future[Any]] = []  # groups of finished iterations, for later batches
        self._wake = threading.Event()
        self._failed: Future[Any] | None = None

    def compute(self, end: Delayed) -> Any:
        return self._client.compute(end, optimize_graph=False).result()

    def submit(self, k: int) -> None:
        graph = iteration_graph(self._start.spec, k, score=self._start.score, point=self._start.point)
        saving = [graph.checkpoint] if graph.checkpoint is not None else []
        end, *rest = self._futures([graph.end, *graph.groups, *saving])
        num = len(graph.groups)
        self.pending[k] = SubmittedIteration(end, rest[:num], rest[num] if saving else None)

    def submit_left(self, k: int) -> None:
        """Submit the unconsumed groups of an iteration whose step is done."""
        groups = iteration_groups(self._start.spec, k, score=self._start.score, point=self._start.point)
        self._carried += self._futures(groups) if groups else []

    def finish(self, k: int) -> tuple[dict[str, Any], Future[Any] | None]:
        """Wait for iteration ``k``; returns its metrics and its checkpoint's future."""
        values: dict[str, Any] = self.result(self.pending[k].end, k)
        iteration = self.pending.pop(k)
        self._carried = [group for group in [*self._carried, *iteration.groups] if not group.done()]
        return values, iteration.checkpoint

    def result(self, future: Future[Any], k: int) -> Any:
        """Result of a future of iteration ``k``. Raises ClusterError if a worker's code failed."""
        while not future.done() and self._failed is None:
            self._wake.wait(LOOK_S)
            self._wake.clear()
        failed = self._failed or future
        try:
            return failed.result()
        except (LibraError, CancelledError):  # cancelled: the scheduler is lost (`libra.driver.run_client`)
            raise
        except Exception as error:  # the boundary to Dask: anything a worker raised
            if isinstance(error, CommClosedError) and failed.status != "error":
                raise  # not a task's: the scheduler is lost
            raise ClusterError(
                f"iteration {k}: {failed.key} failed with {type(error).__name__}: {error}; "
                f"see {self._start.spec.directory / 'events.jsonl'} and the workers' logs"
            ) from error

    def release(self) -> None:
        """Release every future explicitly: a traceback may reference futures and keep results."""
        if self._client.status == "running":
            for future in [*self._carried, *(f for iteration in self.pending.values() for f in iteration.all)]:
                future.release()

    def _futures(self, nodes: Sequence[Delayed]) -> list[Future[Any]]:
        futures: list[Future[Any]] = self._client.compute(nodes, optimize_graph=False)
        for future in futures:
            future.add_done_callback(self._done)
        return futures

    def _done(self, future: Future[Any]) -> None:
        if future.status == "error" and self._failed is None:
            self._failed = future
        self._wake.set()


class RunCheckpoints:
    """Checkpoints of one start; ``result`` awaits a future, ``newest`` is the last complete one."""

    def __init__(self, spec: RunSpec, result: Callable[[Future[Any], int], Any]) -> None:
        self._spec, self._result = spec, result
        self._kept = KeptCheckpoints(spec.checkpoints_dir, keep=spec.config.checkpoint.keep)
        self.newest: Path | None = newest(spec.checkpoints_dir)
        self._saving: deque[tuple[int, Future[Any]]] = deque()
        self._pruned = 0  # batches whose group records are removed

    @property
    def best(self) -> Path | None:
        return self._kept.best()

    def score(self, version: int, reward: float) -> None:
        """Record the reward of a version that has a checkpoint."""
        if version and checkpoint_is_due(self._spec.config, version):
            self._kept.score(version, reward)
            self._kept.tidy()

    def follow(self, k: int, saving: Future[Any] | None, *, last: bool) -> None:
        """Follow the checkpoint of iteration ``k``; wait for older ones, or for all if ``last``."""
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
        for _, future in self._saving:
            future.release()


def prune_groups(spec: RunSpec, first: int, before: int) -> int:
    """Remove group records of batches ``first`` to ``before - 1``; returns ``before``.

    The store has them, and no kept checkpoint needs them. Also removes records of older evaluations
    and waves, and keeps groups that wait for late rewards.
    """
    done = {
        (row["iteration"], row["group"])
        for batch in range(first, before)
        for row in read_batch_facts(spec.batches_dir, batch)["groups"]
    }
    if first < before and spec.config.trainer.late == "correct":
        done |= {(group.iteration, group.group) for group in waiting_after(spec, first - 1)}
        done -= {(group.iteration, group.group) for group in waiting_after(spec, before - 1)}
    for group in done:
        path = group_path(spec.groups_dir, *group)
        path.unlink(missing_ok=True)
        scores_path(path).unlink(missing_ok=True)
    for path in (*spec.waves_dir.glob("wave-*.json"), *spec.groups_dir.glob("eval-*.group")):
        if int(path.name.split("-")[1]) < before:
            path.unlink(missing_ok=True)
    return max(first, before)

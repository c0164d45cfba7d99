"""One RL iteration as one Dask graph. `iteration_graph` is the architecture.

No iteration depends on another through Dask. ``gate`` and ``batch`` wait parked until the plugin
opens them (staleness bound), and trajectories wait parked between quanta. ``batch`` does not depend
on its iteration's groups: it takes the committed groups that are due, and later batches take the
rest. With ``trainer.streaming`` the step is waves, which the plugin opens as groups complete.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import dask
from dask._task_spec import List, Task, TaskRef
from dask.delayed import Delayed
from dask.highlevelgraph import HighLevelGraph

from libra import keys
from libra.config.streaming import most_waves
from libra.graph import batch_nodes, rollout_nodes, training_nodes
from libra.policy.waves import GroupId
from libra.worker.run_spec import RunSpec
from libra.worker.training.checkpoint_writer import checkpoint_is_due

Score = Callable[[Delayed], Delayed]
"""Builds a user's own node: episodes of a group (list of `libra.types.Episode`) to numbers."""


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """State that earlier starts of a run committed (`libra.driver.run_start`); graphs leave it out.

    * ``members``: groups of each committed batch, in order.
    * ``committed``: (split, iteration, group) whose record exists; an evaluation's iteration is its
      version.
    * ``started``: version of the oldest token of each begun group in no committed batch.
    * ``waves``: groups of each committed wave of the next batch, in order, if its step is streamed.
    """

    members: list[tuple[GroupId, ...]] = field(default_factory=list)
    committed: frozenset[tuple[str, int, int]] = frozenset()
    started: dict[GroupId, int] = field(default_factory=dict)
    waves: list[tuple[GroupId, ...]] = field(default_factory=list)

    @property
    def batches(self) -> int:
        """Number of committed batches, which is the weight version at which the run continues."""
        return len(self.members)

    @property
    def consumed(self) -> frozenset[GroupId]:
        return frozenset(group for batch in self.members for group in batch)

    def left(self, iteration: int, groups: int) -> list[int]:
        """Groups of an iteration that are in no committed batch."""
        return [g for g in range(groups) if (iteration, g) not in self.consumed]

    def oldest_left(self, groups: int) -> int:
        """First started iteration with groups in no committed batch; else the next iteration."""
        consumed = self.consumed
        started = range(self.batches)
        return next((k for k in started if any((k, g) not in consumed for g in range(groups))), self.batches)


FRESH = ResumePoint()


@dataclass(frozen=True, slots=True)
class Graph:
    """Nodes that the driver computes: end of the iteration, groups (may end later), checkpoint."""

    end: Delayed
    groups: list[Delayed]
    checkpoint: Delayed | None = None


def parked() -> AbstractContextManager[Any]:
    """Context for tasks that wait in the scheduler until the plugin releases them."""
    return dask.annotate(resources={keys.PARK: 1})


def on(resource: str) -> AbstractContextManager[Any]:
    """Context for tasks that take one unit of a resource while they run."""
    return dask.annotate(resources={resource: 1})


def on_ranks(spec: RunSpec, resource: AbstractContextManager[Any]) -> AbstractContextManager[Any]:
    """Context for the training replica's tasks; the gang plugin places all ranks or none."""
    if spec.config.cluster.train_workers == 1:
        return resource
    return dask.annotate(resources={keys.GANG: 1})


def beside(resource: str) -> AbstractContextManager[Any]:
    """Context for tasks on a worker with a resource, using none (`libra.worker.dask_worker`)."""
    return dask.annotate(resources={resource: 0})


def node(function: Callable[..., Any], key: str, *args: Any, **kwargs: Any) -> Delayed:
    """One task with one of Libra's keys; an argument may be a node, or a list of nodes.

    `dask.delayed` would also search every argument for collections and hash it.
    """
    below: list[Any] = []

    def reference(value: Any) -> Any:
        if isinstance(value, Delayed):
            below.append(value)
            return TaskRef(value.key)
        return List(*map(reference, value)) if isinstance(value, list) and value else value

    task = Task(key, function, *map(reference, args), **{name: reference(value) for name, value in kwargs.items()})
    return Delayed(key, HighLevelGraph.from_collections(key, {key: task}, dependencies=below))


def iteration_graph(spec: RunSpec, k: int, *, score: Score | None = None, point: ResumePoint = FRESH) -> Graph:
    """The graph of iteration ``k``: B prompts x G samples, one optimizer step, one new version."""
    run = spec.run
    groups = iteration_groups(spec, k, score=score, point=point)

    batch, steps = streamed_step(spec, k) if most_waves(spec.config) else whole_step(spec, k)
    with on(keys.COMMIT):
        stored = node(batch_nodes.store, spec.key("store", k), run, batch)
    with on(keys.GRADE):
        updated = node(training_nodes.update, spec.key("update", k), run, steps)
    # The next step waits for the disk neither here (`training.publications`) nor there (`training.checkpoint_writer`):
    published = on_every_rank(spec, training_nodes.publish, "publish", (k,), updated, resource=beside(keys.TRAIN))
    with on_ranks(spec, beside(keys.TRAIN)):
        due = checkpoint_is_due(spec.config, k + 1)
        saved = node(training_nodes.checkpoint, spec.key("checkpoint", k), run, published) if due else None
    with on(keys.GRADE):
        end = node(training_nodes.summary, spec.key("summary", k), run, k, batch, updated, published, stored)
    return Graph(end, groups, saved)


def whole_step(spec: RunSpec, k: int) -> tuple[Delayed, list[Delayed]]:
    with parked():
        batch = node(batch_nodes.batch, spec.key("batch", k), spec.run, k)
    with on_ranks(spec, on(keys.TRAIN)):
        ranks = range(spec.config.cluster.train_workers)
        return batch, [node(training_nodes.step, spec.key("step", k, rank), spec.run, batch, rank) for rank in ranks]


def streamed_step(spec: RunSpec, k: int) -> tuple[Delayed, list[Delayed]]:
    """Batch ``k``, and its step on every rank in waves, which add their gradient during generation.

    Which groups a wave has is known when it runs; like ``batch``, each wave waits parked.
    """
    run, ranks, closed = spec.run, range(spec.config.cluster.train_workers), []
    with parked():
        waves = [node(batch_nodes.wave, spec.key("wave", k, j), run, k, j) for j in range(most_waves(spec.config))]
        batch = node(batch_nodes.batch, spec.key("batch", k), run, k, waves)
    with on_ranks(spec, on(keys.TRAIN)):
        for rank in ranks:
            added = [
                node(training_nodes.accumulate, spec.key("accumulate", k, j, rank), run, wave, rank)
                for j, wave in enumerate(waves)
            ]
            closed.append(node(training_nodes.close, spec.key("close", k, rank), run, batch, added, rank))
    return batch, closed


def on_every_rank(
    spec: RunSpec, function: Callable[..., Any], name: str, indices: tuple[int, ...], *args: Any, resource: Any = None
) -> Delayed:
    """Run a function of the training replica on every rank; the result is rank 0's.

    ``resource`` is for a single rank, by default one unit of TRAIN.
    """
    num_ranks = spec.config.cluster.train_workers
    with on_ranks(spec, on(keys.TRAIN) if resource is None else resource):
        if num_ranks == 1:
            return node(function, spec.key(name, *indices), spec.run, *args)
        answers = [node(function, spec.key(name, *indices, r), spec.run, *args, r) for r in range(num_ranks)]
    with on(keys.GRADE):
        return node(training_nodes.first, spec.key(f"{name}_done", *indices), answers)


def iteration_groups(spec: RunSpec, k: int, *, score: Score | None = None, point: ResumePoint = FRESH) -> list[Delayed]:
    """Groups of iteration ``k`` in no committed batch; recorded groups need no trajectories."""
    trainer, groups = spec.config.trainer, []
    prompts = _prompts(spec, k, "train", trainer.prompts)
    for g in point.left(k, trainer.prompts):
        groups.append(_group(spec, prompts, k, g, trainer.group_size, point, "train", score))
        if spec.config.distil.teacher is not None:
            with on(keys.TEACHER):
                groups.append(node(rollout_nodes.teach, spec.key("teach", k, g), spec.run, groups[-1], k, g))
    return groups


def _prompts(spec: RunSpec, k: int, split: str, count: int) -> Delayed:
    with parked():
        gate = node(rollout_nodes.gate, spec.key("gate", k, split=split), spec.run, k)
    with on(keys.GRADE):
        return node(rollout_nodes.prompts, spec.key("prompts", k, split=split), spec.run, gate, split, count)


def _group(
    spec: RunSpec, prompts: Delayed, k: int, g: int, samples: int, point: ResumePoint, split: str, score: Score | None
) -> Delayed:
    run, trajectories, extra = spec.run, [], None
    if (split, k, g) not in point.committed:
        with parked():
            for s in range(samples):
                key = spec.key("trajectory", k, g, s, split=split)
                trajectories.append(node(rollout_nodes.trajectory, key, run, prompts, k, g, s, split))
    asked: Delayed | list[Any] = prompts if trajectories else []
    with on(keys.GRADE):
        if score and trajectories:
            extra = score(node(rollout_nodes.episodes, spec.key("episodes", k, g), run, prompts, trajectories, k, g))
        key = spec.key("group", k, g, split=split)
        return node(rollout_nodes.group, key, run, asked, trajectories, k, g, split, extra=extra)


def evaluation_graph(spec: RunSpec, version: int, point: ResumePoint = FRESH) -> Graph:
    """The held-out prompts at ``version``: the same trajectories and groups, without a step."""
    count = spec.config.evaluation.prompts
    prompts = _prompts(spec, version, "eval", count)
    groups = [_group(spec, prompts, version, g, 1, point, "eval", None) for g in range(count)]
    with on(keys.COMMIT):
        end = node(batch_nodes.evaluation, spec.key("evaluation", version, split="eval"), spec.run, version, groups)
    return Graph(end, [])


def numbers_graph(spec: RunSpec, batch: int) -> Delayed:
    with on(keys.GRADE):
        return node(batch_nodes.batch_numbers, spec.key("numbers", batch), spec.run, batch)


def restored(spec: RunSpec, batches: int) -> Delayed:
    """Bring weights and store to ``batches`` committed batches (the version); 0 begins a run."""
    with on(keys.COMMIT):
        stored = node(batch_nodes.store_missing, spec.key("store_missing"), spec.run, batches)
    return on_every_rank(spec, training_nodes.restore, "restore", (), batches, stored)

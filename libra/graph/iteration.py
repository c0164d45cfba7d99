"""One RL iteration as one Dask graph. Read `iteration_graph` from top to bottom: it is the architecture.

No iteration depends on another through Dask. ``gate`` and ``batch`` wait parked until the plugin opens them (staleness
bound); trajectories wait parked between their quanta. ``batch`` does not depend on this iteration's groups: it takes
whichever committed groups are due, and what is left is carried over.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import dask
from dask import delayed
from dask.delayed import Delayed

from libra import keys
from libra.graph import nodes
from libra.graph.resume_point import ResumePoint
from libra.worker.checkpoint_writer import checkpoint_is_due
from libra.worker.run_spec import RunSpec

Score = Callable[[Delayed], Delayed]
"""Builds a user's own node: from the episodes of a group (list of `libra.types.Episode`) to one number per episode."""


@dataclass(frozen=True, slots=True)
class Graph:
    """What the driver computes: the node that ends it, and nodes that may outlive it (groups carried over)."""

    end: Delayed
    groups: list[Delayed]
    checkpoint: Delayed | None = None


def parked() -> AbstractContextManager[Any]:
    """Tasks that wait in the scheduler until the plugin releases them."""
    return dask.annotate(resources={keys.PARK: 1})


def on(resource: str) -> AbstractContextManager[Any]:
    """Tasks that take one unit of a resource for as long as they run."""
    return dask.annotate(resources={resource: 1})


def on_ranks(spec: RunSpec, resource: AbstractContextManager[Any]) -> AbstractContextManager[Any]:
    """Tasks of the training replica as ``resource`` says; of several, tasks that the gang places, all at once or none."""
    if spec.config.cluster.train_workers == 1:
        return resource
    return dask.annotate(resources={keys.GANG: 1})


def beside(resource: str) -> AbstractContextManager[Any]:
    """Tasks that run on a worker which declares a resource, and take nothing of it (contract in tests/graph/test_private.py)."""
    return dask.annotate(resources={resource: 0})


def node(function: Callable[..., Any], key: str, *args: Any, **kwargs: Any) -> Delayed:
    """One task with a key of ours."""
    return delayed(function, pure=False, traverse=False)(*args, **kwargs, dask_key_name=key)


FRESH = ResumePoint()
"""Nothing was committed before."""


def iteration_graph(spec: RunSpec, k: int, *, score: Score | None = None, point: ResumePoint = FRESH) -> Graph:
    """The graph of iteration ``k``: B prompts x G samples, one optimizer step, one new version."""
    run = spec.run
    groups = iteration_groups(spec, k, score=score, point=point)

    with parked():
        batch = node(nodes.batch, spec.key("batch", k), run, k)
    with on(keys.COMMIT):
        stored = node(nodes.store, spec.key("store", k), run, batch)
    with on_ranks(spec, on(keys.TRAIN)):
        ranks = range(spec.config.cluster.train_workers)
        steps = [node(nodes.step, spec.key("step", k, rank), run, batch, rank) for rank in ranks]
    with on(keys.GRADE):
        updated = node(nodes.update, spec.key("update", k), run, steps)
    published = on_every_rank(spec, nodes.publish, "publish", (k,), updated)
    with on_ranks(
        spec, beside(keys.TRAIN)
    ):  # the next step need not wait for the disk: see libra.worker.checkpoint_writer
        due = checkpoint_is_due(spec.config, k + 1)
        saved = node(nodes.checkpoint, spec.key("checkpoint", k), run, published) if due else None
    with on(keys.GRADE):
        end = node(nodes.summary, spec.key("summary", k), run, k, batch, updated, published, stored)
    return Graph(end, groups, saved)


def on_every_rank(
    spec: RunSpec, function: Callable[..., Any], name: str, indices: tuple[int, ...], *args: Any
) -> Delayed:
    """What the training replica makes of ``args``; of several, every rank is asked and rank 0 answers."""
    num_ranks = spec.config.cluster.train_workers
    with on_ranks(spec, on(keys.TRAIN)):
        if num_ranks == 1:
            return node(function, spec.key(name, *indices), spec.run, *args)
        answers = [node(function, spec.key(name, *indices, r), spec.run, *args, r) for r in range(num_ranks)]
    with on(keys.GRADE):
        return node(nodes.first, spec.key(f"{name}_done", *indices), answers)


def iteration_groups(spec: RunSpec, k: int, *, score: Score | None = None, point: ResumePoint = FRESH) -> list[Delayed]:
    """The groups of iteration ``k`` that no committed batch holds; one whose record exists needs no trajectories."""
    run, trainer = spec.run, spec.config.trainer
    with parked():
        gate = node(nodes.gate, spec.key("gate", k), run, k)
    with on(keys.GRADE):
        prompts = node(nodes.prompts, spec.key("prompts", k), run, gate)

    groups = []
    for g in point.left(k, trainer.prompts):
        trajectories, extra = [], None
        if ("train", k, g) not in point.committed:
            with parked():
                trajectories = [
                    node(nodes.trajectory, spec.key("trajectory", k, g, s), run, prompts, k, g, s)
                    for s in range(trainer.group_size)
                ]
        with on(keys.GRADE):
            if score and trajectories:
                extra = score(node(nodes.episodes, spec.key("episodes", k, g), run, trajectories))
            groups.append(node(nodes.group, spec.key("group", k, g), run, trajectories, k, g, extra=extra))
    return groups


def evaluation_graph(spec: RunSpec, version: int, point: ResumePoint = FRESH) -> Graph:
    """Held-out questions asked at ``version``: the same trajectories and groups, and no step."""
    run, count = spec.run, spec.config.evaluation.prompts
    with parked():
        gate = node(nodes.gate, spec.key("gate", version, split="eval"), run, version)
    with on(keys.GRADE):
        prompts = node(nodes.prompts, spec.key("prompts", version, split="eval"), run, gate, "eval", count)
    groups = []
    for g in range(count):
        asked = []
        if ("eval", version, g) not in point.committed:
            with parked():
                key = spec.key("trajectory", version, g, 0, split="eval")
                asked = [node(nodes.trajectory, key, run, prompts, version, g, 0, "eval")]
        with on(keys.GRADE):
            groups.append(
                node(nodes.group, spec.key("group", version, g, split="eval"), run, asked, version, g, "eval")
            )
    with on(keys.COMMIT):
        end = node(nodes.evaluation, spec.key("evaluation", version, split="eval"), run, version, groups)
    return Graph(end, [])


def restored(spec: RunSpec, batches: int) -> Delayed:
    """Weights and store as they are after ``batches`` committed batches, which is version ``batches``; 0 begins a run."""
    with on(keys.COMMIT):
        stored = node(nodes.store_missing, spec.key("store_missing"), spec.run, batches)
    return on_every_rank(spec, nodes.restore, "restore", (), batches, stored)

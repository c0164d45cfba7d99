"""The planner's input, and the numeric problem formulated from it.

Each TP degree is one kind of engine at the concurrency that KV memory allows. A trajectory takes
its share of the engine (`RolloutCost.engine_s`, which adds up), and at least its time alone.
`libra.planner.drain` finds the final concurrency, and the seconds with draining.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from libra.errors import ConfigError, PlanError
from libra.hardware import GPU, EngineSeconds, ModelShape, engine_seconds
from libra.planner.cost import Layout, TrainingCost, TrajectoryTotals, rollout_cost, training_table
from libra.planner.planning_problem import EngineClass, Floats, Problem
from libra.planner.services import Beside, ServiceModels, beside


@dataclass(frozen=True, slots=True)
class PlanningSnapshot:
    """Hardware, model, trajectories of one step, and constraints; see also `Problem`."""

    gpu: GPU
    shape: ModelShape
    num_gpus: int
    workload: TrajectoryTotals
    tp: tuple[int, ...] = (1, 2, 4, 8)  # degrees that do not divide or hold the model are left out
    gpus_per_node: int | None = None  # default: the GPU's datasheet
    training: Layout = field(default_factory=Layout)
    eta: int = 1
    update_s: float = 0.0
    beside_s: float = 0.0
    fixed_train_gpus: int | None = None
    fixed_engines: Mapping[int, int] = field(default_factory=dict)
    max_concurrency: int = 256  # trajectories per engine
    training_factor: float = 1.0  # multiplies the trainer's modelled seconds
    engines: Mapping[int, EngineSeconds] | None = None  # measured engines in place of the datasheet's
    trained_frac: float = 1.0  # share of trajectories with a gradient
    services: ServiceModels = field(default_factory=ServiceModels)  # including a teacher; may take GPUs

    @property
    def trained_tokens(self) -> Floats:
        """(m,) lengths of the trajectories that carry a gradient: an even sample over all lengths."""
        if self.trained_frac >= 1.0:
            return self.workload.final_context_tokens
        tokens: Floats = np.sort(self.workload.final_context_tokens)
        number = max(1, round(self.trained_frac * len(tokens)))
        return np.take(tokens, ((np.arange(number) + 0.5) * len(tokens) / number).astype(int))

    @property
    def node_gpus(self) -> int:
        """GPUs per node."""
        return self.gpus_per_node or self.gpu.gpus_per_node


@dataclass(frozen=True, slots=True, eq=False)
class Formulation:
    """A problem, and the costs behind its numbers."""

    problem: Problem
    engines: Mapping[int, EngineSeconds]  # by TP degree, in the order of ``Problem.kinds``
    training: Mapping[int, TrainingCost]  # by GPU count, including steps that do not fit
    left_out: Mapping[int, str]  # impossible degrees of the request, with reasons
    alone_s: Floats  # (K, N) without waits for a teacher or services
    beside: Beside

    @property
    def longest_s(self) -> float:
        """Seconds of the longest trajectory alone on its best engine."""
        return float(np.maximum(self.problem.load_s, self.alone_s).min(axis=0).max())


def formulate(snapshot: PlanningSnapshot) -> Formulation:
    """The problem of a snapshot; PlanError if no degree holds the model, or no GPU a teacher or service."""
    engines, left_out = _engines(snapshot)
    if not engines:
        reasons = "; ".join(f"TP{tp}: {reason}" for tp, reason in left_out.items())
        raise PlanError(f"planner.tp: no degree of {list(snapshot.tp)} holds the model; {reasons}")
    kinds, loads, alones = zip(*(_kind(snapshot, tp, engine) for tp, engine in engines.items()), strict=True)
    services, training = snapshot.services, _training(snapshot)
    others = beside(
        services, snapshot.gpu, snapshot.num_gpus, snapshot.workload, snapshot.training, snapshot.training_factor
    )
    headroom = np.array([cost.headroom_bytes for cost in training.values()])
    if 0 <= headroom.max(initial=-1) < others.trainer_bytes:
        teacher = (services.teacher,) if services.teaches else ()
        names = ", ".join(model.name for model in (*teacher, *services.models) if model is not None)
        raise PlanError(
            f"services.named: the weights of {names} take {others.trainer_bytes / 2**30:.3g} GiB on the GPU of a training worker, "
            f"where {headroom.max() / 2**30:.3g} GiB are free; type planner.num_gpus={snapshot.num_gpus + 1}, which gives them a "
            "GPU, a services.device_gib that leaves one out at a time, or a smaller model"
        )
    steps_s = np.where(headroom >= others.trainer_bytes, [cost.step_s for cost in training.values()], np.inf)
    problem = Problem(
        num_gpus=snapshot.num_gpus - sum(services.gpus(snapshot.num_gpus)),
        gpus_per_node=snapshot.node_gpus,
        kinds=kinds,
        load_s=np.stack(loads),
        alone_s=np.maximum(np.stack(alones), others.waited_s),
        train_gpus=np.array(list(training), dtype=np.int64),
        # With eta 0 the trainer idles while services use its GPU.
        train_s=steps_s * snapshot.training_factor + (others.trainer_s if snapshot.eta else 0.0),
        eta=snapshot.eta,
        update_s=snapshot.update_s,
        beside_s=snapshot.beside_s,
        fixed_train_gpus=snapshot.fixed_train_gpus,
        fixed_engines=dict(snapshot.fixed_engines),
    )
    return Formulation(problem, engines, training, left_out, np.stack(alones), others)


def _engines(snapshot: PlanningSnapshot) -> tuple[dict[int, EngineSeconds], dict[int, str]]:
    if snapshot.engines is not None:
        return {tp: snapshot.engines[tp] for tp in snapshot.tp if tp in snapshot.engines}, {}
    engines: dict[int, EngineSeconds] = {}
    left_out: dict[int, str] = {}
    for tp in snapshot.tp:
        if tp > snapshot.node_gpus:
            left_out[tp] = f"a node has {snapshot.node_gpus} GPUs"
            continue
        try:
            engines[tp] = engine_seconds(snapshot.gpu, snapshot.shape, tp)
        except ConfigError as error:
            left_out[tp] = str(error)
    return engines, left_out


def _kind(snapshot: PlanningSnapshot, tp: int, engine: EngineSeconds) -> tuple[EngineClass, Floats, Floats]:
    """This degree at its best throughput: engine class, loads (N,) and critical paths (N,), in seconds."""
    workload = snapshot.workload
    most = rollout_cost(workload, engine, max_sequences=snapshot.max_concurrency).max_concurrency
    concurrency = max(int(most), 1)
    cost = rollout_cost(workload, engine, concurrency=concurrency, max_sequences=snapshot.max_concurrency)
    load_s = np.where(cost.fits, np.maximum(cost.engine_s, 1e-9), np.inf)
    return EngineClass(tp, concurrency), load_s, np.where(cost.fits, cost.alone_s, np.inf)


def _training(snapshot: PlanningSnapshot) -> dict[int, TrainingCost]:
    """Training cost for each number of GPUs that divides a node evenly or fills whole nodes."""
    node, tokens = snapshot.node_gpus, snapshot.trained_tokens
    sheet = snapshot.gpu if snapshot.gpu.gpus_per_node == node else replace(snapshot.gpu, gpus_per_node=node)
    counts = [*range(1, min(node, snapshot.num_gpus)), *range(node, snapshot.num_gpus + 1, node)]
    return training_table(sheet, snapshot.shape, tokens, counts, snapshot.training)

"""Services with models in a plan: where they compute, and their cost.

Rewards and tools call services on tool workers. A teacher (``distil.teacher``) is a service with
function ``teach`` on the first tool worker, or has a worker and GPU of its own. Tool workers have a
GPU if engines and training leave one, else share a training worker's; on CPU cores no rank is
counted for them. A plan assumes one call per service and trajectory over all its tokens, and
instant restores of evicted weights.
"""

from __future__ import annotations

from dataclasses import dataclass

from libra.config.service_devices import GPU_FRAC, Place, place_of_services
from libra.errors import PlanError, enough_gib
from libra.hardware import GPU, ModelShape
from libra.planner.cost import Layout, TrajectoryTotals
from libra.planner.cost.training_cost import sequences_s

PASSES = {"judge": 2, "logprob": 1, "score": 1, "embed": 1, "teach": 1}
"""Forward passes over a trajectory of each of Libra's service functions; unknown for users' own."""


@dataclass(frozen=True, slots=True)
class ServiceModel:
    """One service with a model."""

    name: str  # empty: a teacher with its own worker
    shape: ModelShape
    passes: int = 1  # forward passes per answer; 0 if unknown
    weight_bytes: int = 2
    waits: bool = True  # whether reward or teacher scores of a trajectory wait for its answer

    @property
    def num_bytes(self) -> float:
        """Bytes of the model's weights."""
        return float(self.shape.num_params * self.weight_bytes)

    def batch_s(self, gpu: GPU, workload: TrajectoryTotals, training: Layout) -> float:
        """Device seconds for the trajectories of a batch."""
        return self.passes * float(sequences_s(gpu, self.shape, workload.final_context_tokens, training).sum())


@dataclass(frozen=True, slots=True)
class ServiceModels:
    """A run's services with models: those that rewards and tools call, and the teacher."""

    models: tuple[ServiceModel, ...] = ()
    teacher: ServiceModel | None = None
    room_bytes: float | None = None  # for weights on one worker's device (``services.device_gib``, if configured)
    workers: int = 1  # tool workers that share the device, each with its own copies
    of_others: int = 2  # fewest GPUs for engines, training and a teacher with its own worker
    on_cores: bool = False

    @property
    def teaches(self) -> bool:
        """Whether the teacher shares the device of the other services."""
        return self.teacher is not None and bool(self.teacher.name)

    def place(self, num_gpus: int) -> Place:
        """Where the services compute in a run on ``num_gpus`` GPUs (or ranks)."""
        return place_of_services(num_gpus, self.of_others, on_cores=self.on_cores) or Place.TRAINING

    def gpus(self, num_gpus: int) -> tuple[int, int]:
        """GPUs that a teacher takes from engines and training, and those of other services."""
        shared = self.place(num_gpus).gpus
        if self.teaches:
            return shared, 0
        return int(self.teacher is not None), shared if self.models else 0

    def resident_bytes(self) -> float:
        """Maximum bytes of weights on the device; a teacher's are on the first worker only."""
        room, mine = self.room_bytes or float("inf"), sum(model.num_bytes for model in self.models)
        taught = self.teacher.num_bytes if self.teacher is not None and self.teaches else 0.0
        return min(room, mine + taught) + (self.workers - 1) * min(room, mine)

    def check(self, gpu: GPU, num_gpus: int) -> None:
        """PlanError if a model or all models exceed their memory, or a teacher needs a GPU too many."""
        place, many = self.place(num_gpus), self.workers > 1
        if self.teacher is not None:
            self._check_teacher(self.teacher, gpu, num_gpus, on_gpu=not self.teaches or place is not Place.CORES)
        if not self.models or (place is Place.CORES and self.room_bytes is None):
            return
        fewer = ", or cluster.tool_workers=1, which then has all of it" if many else ""
        largest = max(self.models, key=lambda model: model.num_bytes)
        room, has = self.room_bytes, f"services.device_gib: {(self.room_bytes or 0.0) / 2**30:.3g}"
        advice = f"services.device_gib={enough_gib(largest.num_bytes)} or more"
        if room is None:
            room = gpu.memory_bytes * GPU_FRAC / self.workers
            share = f" for each of {self.workers} tool workers that share a GPU" if many else ""
            has, advice = (
                f"services.named: {room / 2**30:.3g} GiB{share}",
                "a smaller model, or a planner.gpu with more memory",
            )
            advice += fewer
        if largest.num_bytes > room:
            raise PlanError(
                f"{has}, and the weights of {largest.shape.name}, the model of service {largest.name!r}, take "
                f"{largest.num_bytes / 2**30:.3g} GiB; type {advice}"
            )
        needed = self.resident_bytes()
        if self.room_bytes is not None and place is Place.TOOLS and needed > gpu.memory_bytes:
            raise PlanError(
                f"{has} on each of {self.workers} tool workers that share a GPU lets weights take {needed / 2**30:.3g} GiB of its "
                f"{gpu.memory_bytes / 2**30:.3g} GiB; type services.device_gib="
                f"{GPU_FRAC * gpu.memory_bytes / self.workers / 2**30:.3g}{fewer}"
            )

    def _check_teacher(self, teacher: ServiceModel, gpu: GPU, num_gpus: int, *, on_gpu: bool) -> None:
        needed = teacher.num_bytes
        if num_gpus < 3 and not teacher.name:
            raise PlanError(
                f"planner.num_gpus: {num_gpus}, and training, rollout and the teacher (distil.teacher) take at least one each; "
                "type planner.num_gpus=3 or more, or distil.teacher={service: NAME}, which shares a GPU (docs/rewards.md)"
            )
        if teacher.name and self.room_bytes is not None and needed > self.room_bytes:
            raise PlanError(
                f"services.device_gib: {self.room_bytes / 2**30:.3g}, and the weights of {teacher.shape.name}, the model of "
                f"service {teacher.name!r} (distil.teacher), take {needed / 2**30:.3g} GiB; type services.device_gib="
                f"{enough_gib(needed)} or more, or name a smaller model"
            )
        if needed > gpu.memory_bytes and on_gpu:
            raise PlanError(
                f"distil.teacher: the weights of {teacher.shape.name} take {needed / 1e9:.0f} GB, and the one GPU of a teacher "
                f"({gpu.name}) has {gpu.memory_bytes / 1e9:.0f} GB; type a smaller distil.teacher, or a planner.gpu with more "
                "memory"
            )

    def teacher_on(self, num_gpus: int) -> str:
        """Text: where the teacher computes, and what a plan assumes of it; empty if on its own worker."""
        if self.teacher is None or not self.teaches:
            return ""
        many = "services" if len(self.models) > 1 else "service"
        more = f"; {many} {', '.join(model.name for model in self.models)} beside it" if self.models else ""
        return f"service {self.teacher.name}, {self._where(num_gpus, 'the first tool worker', 'its')}{more}"

    def services_on(self, num_gpus: int) -> str:
        """Text: where other services compute, and what a plan assumes of them; empty without services."""
        if not self.models:
            return ""
        unknown = [model.name for model in self.models if not model.passes]
        free = f"; {', '.join(unknown)} assumed to take no time" if unknown else ""
        late = "" if any(model.waits for model in self.models) else "; rewards do not wait for them"
        names, where = (
            ", ".join(model.name for model in self.models),
            self._where(num_gpus, "the tool workers", "their"),
        )
        return f"{names}, {where}; each asked once for a trajectory{late}{free}"

    def _where(self, num_gpus: int, workers: str, whose: str) -> str:
        return {
            Place.TOOLS: f"on the GPU of {workers}",
            Place.TRAINING: f"on the GPU of a training worker, which is assumed to take {whose} seconds as well",
            Place.CORES: f"on the cores of {workers}, for which no rank is counted",
        }[self.place(num_gpus)]


@dataclass(frozen=True, slots=True)
class Beside:
    """Seconds and bytes of a teacher and services, in addition to engines and training."""

    teacher_s: float = 0.0  # device seconds per batch
    services_s: float = 0.0  # device seconds per batch
    waited_s: float = 0.0  # no rollout ends earlier
    waited_for: str = ""  # ``teacher`` or ``services``
    trainer_s: float = 0.0  # taken from a training worker's GPU
    trainer_bytes: float = 0.0


def beside(
    services: ServiceModels, gpu: GPU, num_gpus: int, workload: TrajectoryTotals, training: Layout, factor: float
) -> Beside:
    """Cost of the services, with the teacher's seconds times ``factor``; PlanError if they do not fit."""
    services.check(gpu, num_gpus)
    teacher, models = services.teacher, services.models
    teacher_s = 0.0 if teacher is None else factor * teacher.batch_s(gpu, workload, training)
    services_s = sum(model.batch_s(gpu, workload, training) for model in models)
    scored_s = teacher_s if teacher is not None and teacher.waits else 0.0
    judged_s = services_s if any(model.waits for model in models) else 0.0
    if services.teaches and models and (scored_s or judged_s):  # batches on one device, in call order
        scored_s = judged_s = teacher_s + services_s
    on_trainer = bool(models or services.teaches) and services.place(num_gpus) is Place.TRAINING
    by_teacher = scored_s > judged_s or (scored_s == judged_s and teacher_s >= services_s)
    return Beside(
        teacher_s,
        services_s,
        max(scored_s, judged_s),
        "teacher" if by_teacher else "services",
        services_s + (teacher_s if services.teaches else 0.0) if on_trainer else 0.0,
        services.resident_bytes() if on_trainer else 0.0,
    )

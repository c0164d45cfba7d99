"""Services with models in a plan: rewards and tools ask them on the tool workers, beside a teacher that is one.

What a plan assumes: each is asked once for each trajectory of a batch, about all of its tokens, and answers in its declared
``answer_s``, else in the passes of the model that its function makes. Restoring weights that others evicted takes no time.
"""

from __future__ import annotations

from dataclasses import dataclass

from libra.config.service_devices import GPU_FRAC, Place, place_of_services
from libra.errors import PlanError, enough_gib
from libra.hardware import GPU, ModelShape
from libra.planner.cost import Layout, TrajectoryTotals
from libra.planner.cost.training_cost import sequences_s
from libra.planner.teacher import Teacher, weights_bytes

PASSES = {"judge": 2, "logprob": 1, "score": 1, "embed": 1}
"""Passes over a trajectory of each function of Libra's. Of a user's own nothing is known."""


@dataclass(frozen=True, slots=True)
class ServiceModel:
    """One service with a model.

    Attributes
    ----------
    name : str
    shape : ModelShape
    passes : int
        Forward passes of an answer; 0: not known.
    answer_s : float or None
        Seconds of an answer on its device, as they are declared.
    weight_bytes : int
        Of a number of its weights, in the type of its files.
    waits : bool
        A trajectory has no reward before it has answered.
    """

    name: str
    shape: ModelShape
    passes: int = 1
    answer_s: float | None = None
    weight_bytes: int = 2
    waits: bool = True

    @property
    def num_bytes(self) -> float:
        """Of its weights."""
        return float(self.shape.num_params * self.weight_bytes)

    def batch_s(self, gpu: GPU, workload: TrajectoryTotals, training: Layout) -> float:
        """Seconds of its device for the trajectories of a batch."""
        if self.answer_s is not None:
            return self.answer_s * len(workload)
        return self.passes * float(sequences_s(gpu, self.shape, workload.final_context_tokens, training).sum())


@dataclass(frozen=True, slots=True)
class ServiceModels:
    """The services with a model, without a teacher.

    Attributes
    ----------
    models : tuple of ServiceModel
    room_bytes : float or None
        What weights may take of the device of one worker (``services.device_gib``). None: it does not say.
    workers : int
        Tool workers that share the device; each has copies of its own there.
    of_others : int
        The fewest GPUs that engines, training and a teacher of its own take.
    on_cores : bool
        Workers have no GPUs.
    """

    models: tuple[ServiceModel, ...]
    room_bytes: float | None = None
    workers: int = 1
    of_others: int = 2
    on_cores: bool = False

    def place(self, num_gpus: int) -> Place:
        """Where they compute in a run on ``num_gpus`` GPUs, or ranks."""
        return place_of_services(num_gpus, self.of_others, on_cores=self.on_cores) or Place.TRAINING

    def batch_s(self, gpu: GPU, workload: TrajectoryTotals, training: Layout) -> float:
        """Seconds of the device for all of them and a batch."""
        return sum(model.batch_s(gpu, workload, training) for model in self.models)

    @property
    def waits(self) -> bool:
        """Whether rewards wait for one of them."""
        return any(model.waits for model in self.models)

    def resident_bytes(self, taught: float = 0.0) -> float:
        """The most that weights take of the device, of ``taught`` bytes of a teacher on the first worker, too."""
        room, mine = self.room_bytes or float("inf"), sum(model.num_bytes for model in self.models)
        return min(room, mine + taught) + (self.workers - 1) * min(room, mine)

    def check(self, gpu: GPU, num_gpus: int, taught: float = 0.0) -> None:
        """PlanError if a model does not fit into its room, or all that may be there do not fit on the device."""
        place = self.place(num_gpus)
        room = gpu.memory_bytes * GPU_FRAC / self.workers if self.room_bytes is None else self.room_bytes
        if place is Place.CORES and self.room_bytes is None:
            return
        fewer = ", or cluster.tool_workers=1, which then has all of it" if self.workers > 1 else ""
        for model in self.models:
            if model.num_bytes <= room:
                continue
            if self.room_bytes is None:
                share = f" for each of {self.workers} tool workers that share a GPU" if self.workers > 1 else ""
                has, advice = (
                    f"services.named: {room / 2**30:.3g} GiB{share}",
                    "a smaller model, or a planner.gpu with more memory",
                )
            else:
                has, advice = (
                    f"services.device_gib: {room / 2**30:.3g}",
                    f"services.device_gib={enough_gib(model.num_bytes)} or more",
                )
                fewer = ""
            raise PlanError(
                f"{has}, and the weights of {model.shape.name}, the model of service {model.name!r}, take "
                f"{model.num_bytes / 2**30:.3g} GiB; type {advice}{fewer}"
            )
        needed = self.resident_bytes(taught)
        if self.room_bytes is not None and place is Place.TOOLS and needed > gpu.memory_bytes:
            raise PlanError(
                f"services.device_gib: {room / 2**30:.3g} on each of {self.workers} tool workers that share a GPU lets weights "
                f"take {needed / 2**30:.3g} GiB of its {gpu.memory_bytes / 2**30:.3g} GiB; type services.device_gib="
                f"{GPU_FRAC * gpu.memory_bytes / self.workers / 2**30:.3g}{fewer}"
            )

    def assumed(self, num_gpus: int) -> str:
        """Where they compute, and what a plan assumes of that, in words."""
        words = {
            Place.TOOLS: "on the GPU of the tool workers",
            Place.TRAINING: "on the GPU of a training worker, which is assumed to take their seconds as well",
            Place.CORES: "on the cores of the tool workers, for which no rank is counted",
        }[self.place(num_gpus)]
        names = ", ".join(model.name for model in self.models)
        unknown = [model.name for model in self.models if model.answer_s is None and not model.passes]
        free = f"; {', '.join(unknown)} assumed to take no time: type answer_s in services.named" if unknown else ""
        late = "" if self.waits else "; rewards do not wait for them"
        return f"{names}, {words}; each asked once for a trajectory{late}{free}"


@dataclass(frozen=True, slots=True)
class Beside:
    """What a teacher and services take beside engines and training.

    Attributes
    ----------
    teacher_s, services_s : float
        Seconds of their devices for a batch.
    waited_s, waited_for : float, str
        No rollout is over before; and who takes them: ``teacher`` or ``services``.
    trainer_s, trainer_bytes : float
        Of the GPU of a training worker.
    """

    teacher_s: float = 0.0
    services_s: float = 0.0
    waited_s: float = 0.0
    waited_for: str = ""
    trainer_s: float = 0.0
    trainer_bytes: float = 0.0


def beside(
    gpu: GPU,
    num_gpus: int,
    workload: TrajectoryTotals,
    training: Layout,
    teacher: Teacher | None,
    teacher_s: float,
    services: ServiceModels | None,
) -> Beside:
    """What a teacher that takes ``teacher_s`` and services take; PlanError if services do not fit."""
    taught = weights_bytes(teacher, training) if teacher is not None and teacher.service else 0.0
    services_s, held, on_trainer = 0.0, taught, False
    if services is not None:
        services.check(gpu, num_gpus, taught)
        services_s, held = services.batch_s(gpu, workload, training), services.resident_bytes(taught)
        on_trainer = services.place(num_gpus) is Place.TRAINING
    scored_s = teacher_s if teacher is not None and teacher.waits else 0.0
    judged_s = services_s if services is not None and services.waits else 0.0
    together = teacher is not None and bool(teacher.service) and services is not None
    if together and (scored_s or judged_s):  # batches of one device, in the order of asking
        scored_s = judged_s = teacher_s + services_s
    on_trainer = on_trainer or (teacher is not None and teacher.place(num_gpus) is Place.TRAINING)
    by_teacher = scored_s > judged_s or (scored_s == judged_s and teacher_s >= services_s)
    return Beside(
        teacher_s,
        services_s,
        max(scored_s, judged_s),
        "teacher" if by_teacher else "services",
        (services_s + (teacher_s if taught else 0.0)) if on_trainer else 0.0,
        held if on_trainer else 0.0,
    )

"""The teacher of a run (``distil.teacher``) in a plan: where it lives, as `libra.cluster.local` starts it, and what it takes there.

A teacher of its own has a worker, ``teacher-0``, and a GPU. One that is a service lives on the first tool worker, with the other
services there. That worker has a GPU of its own if engines and training leave one, else it shares that of a training worker. On CPU
cores it takes those of the tool worker, for which no rank is counted.
"""

from __future__ import annotations

from dataclasses import dataclass

from libra.config.service_devices import Place, place_of_services
from libra.errors import PlanError, enough_gib
from libra.hardware import GPU, ModelShape
from libra.planner.cost import Layout, TrajectoryTotals
from libra.planner.cost.training_cost import sequences_s


@dataclass(frozen=True, slots=True)
class Teacher:
    """The teacher of a run, whole on one device.

    Attributes
    ----------
    shape : ModelShape
    waits : bool
        Batches wait for its scores.
    service : str
        The service that it is; empty: a worker of its own holds it.
    beside : tuple of str
        Other services with a model, which share its device.
    room_bytes : float or None
        What services may take of the device (``services.device_gib``). None: it does not say.
    on_cores : bool
        Workers have no GPUs.
    """

    shape: ModelShape
    waits: bool = True
    service: str = ""
    beside: tuple[str, ...] = ()
    room_bytes: float | None = None
    on_cores: bool = False

    def place(self, num_gpus: int) -> Place:
        """Where it computes in a run on ``num_gpus`` GPUs, or ranks."""
        if not self.service:
            return Place.OWN
        return place_of_services(num_gpus, 2, on_cores=self.on_cores) or Place.TRAINING

    def assumed(self, num_gpus: int) -> str:
        """Where it computes, and what a plan assumes of that, in words; empty for a worker of its own."""
        place = self.place(num_gpus)
        if place is Place.OWN:
            return ""
        words = {
            Place.TOOLS: "on the GPU of the first tool worker",
            Place.TRAINING: "on the GPU of a training worker, which is assumed to take its seconds as well",
            Place.CORES: "on the cores of the first tool worker, for which no rank is counted",
        }[place]
        many = "services" if len(self.beside) > 1 else "service"
        more = f"; {many} {', '.join(self.beside)} beside it" if self.beside else ""
        return f"service {self.service}, {words}{more}"


def teacher_s(teacher: Teacher, gpu: GPU, num_gpus: int, workload: TrajectoryTotals, training: Layout) -> float:
    """Seconds of a teacher for a whole batch: a forward pass of each trajectory, while others are generated.

    PlanError if its device does not hold it, or it takes one GPU too many.
    """
    shape, needed = teacher.shape, weights_bytes(teacher, training)
    if num_gpus < 3 and not teacher.service:
        raise PlanError(
            f"planner.num_gpus: {num_gpus}, and training, rollout and the teacher (distil.teacher) take at least one each; type "
            "planner.num_gpus=3 or more, or distil.teacher={service: NAME}, which shares a GPU (docs/services.md)"
        )
    if teacher.room_bytes is not None and needed > teacher.room_bytes:
        raise PlanError(
            f"services.device_gib: {teacher.room_bytes / 2**30:.3g}, and the weights of {shape.name}, the model of service "
            f"{teacher.service!r} (distil.teacher), take {needed / 2**30:.3g} GiB; type services.device_gib="
            f"{enough_gib(needed)} or more, or name a smaller model"
        )
    if needed > gpu.memory_bytes and teacher.place(num_gpus) is not Place.CORES:
        raise PlanError(
            f"distil.teacher: the weights of {shape.name} take {needed / 1e9:.0f} GB, and the one GPU of a teacher "
            f"({gpu.name}) has {gpu.memory_bytes / 1e9:.0f} GB; type a smaller distil.teacher, or a planner.gpu with more memory"
        )
    return float(sequences_s(gpu, shape, workload.final_context_tokens, training).sum())


def weights_bytes(teacher: Teacher, training: Layout) -> float:
    """Bytes of its weights on its device."""
    return float(teacher.shape.num_params * training.weight_bytes)

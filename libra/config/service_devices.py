"""The devices of services with models, for a local cluster's bindings and for plans."""

from __future__ import annotations

from enum import Enum

from libra.config.sections import RunSections

GPU_FRAC = 0.9
"""Share of a GPU's free memory that weights of services take where ``services.device_gib`` does not
say."""


class Place(Enum):
    """Where a teacher or services compute."""

    OWN = "a worker of its own"
    TOOLS = "the tool workers, on a GPU that no engine or training worker has"
    TRAINING = "the tool workers, on the GPU of a training worker"
    CORES = "the tool workers, on their CPU cores"

    @property
    def gpus(self) -> int:
        """GPUs that this place takes from engines and training."""
        return int(self in (Place.OWN, Place.TOOLS))


def place_of_services(num_gpus: int, of_others: int, *, on_cores: bool = False) -> Place | None:
    """Where services with models compute, on ``num_gpus`` GPUs; None if they must share.
    ``of_others`` is the number of GPUs for engines, training and a teacher's own worker."""
    if on_cores:
        return Place.CORES
    if num_gpus > of_others:
        return Place.TOOLS
    return Place.TRAINING if num_gpus == of_others else None


def least_of_others(config: RunSections) -> int:
    """Fewest GPUs for engines, training and a teacher's own worker."""
    return 2 + int(config.distil.teacher is not None and config.distil.service is None)


def service_models(config: RunSections) -> dict[str, str]:
    """Models by the names of their services; services without a model are left out."""
    return {name: entry.model for name, entry in config.services.named.items() if entry.model is not None}


def late_services(config: RunSections) -> set[str]:
    """Services for which no reward waits, according to ``environment.args``."""
    given = config.environment.args.get("reward")
    rewards = [each for each in (given if isinstance(given, list) else [given]) if isinstance(each, dict)]
    late: dict[str, bool] = {}
    for reward in rewards:
        if isinstance(name := reward.get("service"), str):
            late[name] = late.get(name, True) and reward.get("late") is True
    return {name for name, all_late in late.items() if all_late}


def asked_models(config: RunSections) -> dict[str, str]:
    """`service_models` without teachers: the services that rewards and tools may query."""
    named = config.services.named
    return {name: model for name, model in service_models(config).items() if named[name].function != "teach"}


def service_workers(config: RunSections) -> int:
    """Tool workers of a local cluster that load services' weights onto one device. Only the first
    tool worker serves a function ``teach``. A Slurm job has its own GPUs."""
    cluster = config.cluster
    if not asked_models(config) or cluster.scheduler is not None or config.slurm.of_role("tool").gpus:
        return 1
    return cluster.tool_workers_most or cluster.tool_workers


def teacher_model(config: RunSections) -> str | None:
    """Model of the teacher or its service, named like ``model.path``; None without a teacher."""
    teacher = config.distil.teacher
    if not isinstance(teacher, dict):
        return teacher
    return config.services.named[teacher["service"]].model


def draws_of_student(config: RunSections) -> bool:
    """Whether the divergence is estimated from tokens that the student samples as it generates."""
    distil = config.distil
    return distil.teacher is not None and (distil.divergence, distil.estimator) == ("reverse", "sampled")


def extra_draws(config: RunSections) -> int:
    """Tokens that an engine samples beside each generated token (``TurnRequest.draws``)."""
    return config.distil.tokens - 1 if draws_of_student(config) else 0

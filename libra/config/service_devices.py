"""Where services with models compute: what a local cluster binds their workers to, and what a plan
counts, by one rule."""

from __future__ import annotations

from enum import Enum

from libra.config.sections import RunSections

GPU_FRAC = 0.9
"""Share of a GPU's free memory that weights of services take where ``services.device_gib`` does not
say."""


class Place(Enum):
    """Where a teacher, or services, compute."""

    OWN = "a worker of its own"
    TOOLS = "the tool workers, on a GPU that no engine or training worker has"
    TRAINING = "the tool workers, on the GPU of a training worker"
    CORES = "the tool workers, on their CPU cores"

    @property
    def gpus(self) -> int:
        """GPUs that neither engines nor training have because of it."""
        return int(self in (Place.OWN, Place.TOOLS))


def place_of_services(num_gpus: int, of_others: int, *, on_cores: bool = False) -> Place | None:
    """Where services with models compute, on a machine or cluster with ``num_gpus`` GPUs of which
    engines, training and a teacher of its own take ``of_others``; If null, they have too few, and
    services share what there is."""
    if on_cores:
        return Place.CORES
    if num_gpus > of_others:
        return Place.TOOLS
    return Place.TRAINING if num_gpus == of_others else None


def least_of_others(config: RunSections) -> int:
    """The fewest GPUs that engines, training and a teacher of its own take."""
    return 2 + int(config.distil.teacher is not None and config.distil.service is None)


def service_models(config: RunSections) -> dict[str, str]:
    """Model of each service that has one, by the service's name."""
    return {name: entry.model for name, entry in config.services.named.items() if entry.model is not None}


def late_services(config: RunSections) -> set[str]:
    """Services that rewards do not wait for, as far as ``environment.args`` says."""
    given = config.environment.args.get("reward")
    rewards = [each for each in (given if isinstance(given, list) else [given]) if isinstance(each, dict)]
    late: dict[str, bool] = {}
    for reward in rewards:
        if isinstance(name := reward.get("service"), str):
            late[name] = late.get(name, True) and reward.get("late") is True
    return {name for name, all_late in late.items() if all_late}


def asked_models(config: RunSections) -> dict[str, str]:
    """The same of those that rewards and tools may ask, which a teacher is not."""
    named = config.services.named
    return {name: model for name, model in service_models(config).items() if named[name].function != "teach"}


def service_workers(config: RunSections) -> int:
    """Tool workers of a local cluster that restore weights of services to one device. A service
    with function ``teach`` is asked on the first of them alone, and a job of Slurm has GPUs of its
    own."""
    cluster = config.cluster
    if not asked_models(config) or cluster.scheduler is not None or config.slurm.of_role("tool").gpus:
        return 1
    return cluster.tool_workers_most or cluster.tool_workers


def teacher_model(config: RunSections) -> str | None:
    """The teacher's model, its own or that of its service, named as ``model.path`` is; If null, there
    is no teacher."""
    teacher = config.distil.teacher
    if not isinstance(teacher, dict):
        return teacher
    return config.services.named[teacher["service"]].model


def draws_of_student(config: RunSections) -> bool:
    """Whether the divergence is estimated from what the student draws as it generates."""
    distil = config.distil
    return distil.teacher is not None and (distil.divergence, distil.estimator) == ("reverse", "sampled")


def extra_draws(config: RunSections) -> int:
    """Tokens that an engine draws for each place beside the generated one (``TurnRequest.draws``)."""
    return config.distil.tokens - 1 if draws_of_student(config) else 0

"""What an accepted plan asks for, as values. A run logs them, and carries out what they come to (`libra.driver.replanning`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from libra.planner.plan import Plan


@dataclass(frozen=True, slots=True)
class SetRole:
    """Let so many GPUs more work as ``role`` ("train" or "rollout"), taken from the other one."""

    role: str
    num_gpus: int
    reason: str


@dataclass(frozen=True, slots=True)
class Rebucket:
    """Have this many engines of each TP degree, as (degree, number) pairs, and route by these generated tokens.

    ``boundaries_tokens`` are one fewer than the buckets, ascending with the degrees.
    """

    engines: tuple[tuple[int, int], ...]
    boundaries_tokens: tuple[float, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class SetConcurrency:
    """Let each engine of this TP degree generate for so many trajectories at once."""

    tp: int
    concurrency: int
    reason: str


@dataclass(frozen=True, slots=True)
class ShareGPUs:
    """Let so many GPUs do both within a step: roll out until the batch is complete, then train. 0: none any more."""

    num_gpus: int
    reason: str


Command = ShareGPUs | SetRole | Rebucket | SetConcurrency


@dataclass(frozen=True, slots=True)
class Deployed:
    """What runs now: GPUs of the trainer, engines and concurrency by TP degree, and how many GPUs are in both pools."""

    train_gpus: int
    engines: Mapping[int, int]
    concurrency: Mapping[int, int]
    shared_gpus: int = 0

    @classmethod
    def of(cls, plan: Plan) -> Deployed:
        """What runs once a plan is carried out."""
        return cls(
            plan.training.gpus,
            {bucket.tp: bucket.engines for bucket in plan.buckets},
            {bucket.tp: bucket.concurrency for bucket in plan.buckets},
            plan.shared_gpus,
        )

    def same_layout(self, other: Deployed) -> bool:
        """Whether split and engines are the same; concurrency may differ, it costs nothing to change."""
        mine, its = (self.train_gpus, self.shared_gpus), (other.train_gpus, other.shared_gpus)
        return mine == its and dict(self.engines) == dict(other.engines)


def commands(
    deployed: Deployed, wanted: Deployed, boundaries_tokens: tuple[float, ...], reason: str
) -> tuple[Command, ...]:
    """What turns ``deployed`` into ``wanted``: roles first, then engines, then concurrency; nothing for what stays.

    ``boundaries_tokens`` are those of the wanted buckets, as of `Rebucket`.
    """
    found = list[Command]()
    if wanted.shared_gpus != deployed.shared_gpus:
        found.append(ShareGPUs(wanted.shared_gpus, reason))
    moved = (wanted.train_gpus - wanted.shared_gpus) - (deployed.train_gpus - deployed.shared_gpus)
    if moved:
        found.append(SetRole("train" if moved > 0 else "rollout", abs(moved), reason))
    if dict(wanted.engines) != dict(deployed.engines):
        found.append(Rebucket(tuple(sorted(wanted.engines.items())), boundaries_tokens, reason))
    for tp, concurrency in wanted.concurrency.items():
        if deployed.concurrency.get(tp) != concurrency:
            found.append(SetConcurrency(tp, concurrency, reason))
    return tuple(found)

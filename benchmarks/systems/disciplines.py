"""Training systems as data: which groups begin and which of them a batch takes, when they are
trained on, who trains, in which order and where trajectories run, how old a group may be.

Each is a rule of one simulator (`systems.training_run`), with the same engines, seconds and
workload. Systems of others are known by what their papers and manuals say of these choices; what
they have besides is not simulated. Every group is trained on: systems that throw generated tokens
away (over-sampling, long rounds, groups over age) are left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from libra.errors import ConfigError


class Roles(StrEnum):
    """Who trains besides the core trainers."""

    SPLIT = "split"
    """Nobody: trainers train, engines generate."""
    TURNING = "turning"
    """Engines that the tail of a rollout does not need (`libra.policy.tail`)."""
    WHOLE_POOL = "whole pool"
    """All engines from a complete batch to the new weights; open trajectories wait meanwhile."""


@dataclass(frozen=True, slots=True)
class Discipline:
    """A training system."""

    text: str
    etas: tuple[int, ...]  # staleness bounds for which it is defined
    own_batches: bool = True  # batch j takes the groups of iteration j; False: those that are complete first
    streaming: bool = False  # a group is trained on once its batch has taken it; False: when the batch is complete
    roles: Roles = Roles.SPLIT
    core_trainers: bool = True  # some GPUs always train; False: all generate, and train together
    order: str = "fifo"  # of trajectories (`libra.policy.ORDERINGS`, or a name of `systems.tuning`)
    kv_moves: bool = False  # KV goes along through host memory; False: it is computed again
    static: bool = False  # a baseline of the table: no GPU does both
    preempts: bool = False  # engines do not reserve KV for whole turns, and compute contexts again
    changes_s: tuple[float, float] | None = None  # to training, and back; by default of `TurningRule`


DISCIPLINES: Final[Mapping[str, Discipline]] = MappingProxyType({
    "colocated": Discipline(
        "synchronous, all GPUs generate and then train (verl)", (0,), roles=Roles.WHOLE_POOL, core_trainers=False, static=True
    ),
    "colocated_preempting": Discipline(
        "the same, engines start what fits and preempt when memory is full (vLLM)", (0,), roles=Roles.WHOLE_POOL,
        core_trainers=False, static=True, preempts=True,
    ),
    "split": Discipline("a fixed split with batches of their own iteration", (0, 2), static=True),
    "one_step_off": Discipline(
        "a fixed split, a batch is trained on while the next one is generated (one step off)", (1,), static=True
    ),
    "bounded": Discipline(
        "a fixed split, a batch takes what is complete first within the bound (AReaL)", (1, 2), own_batches=False, static=True
    ),
    "partial": Discipline(
        "whole pool: interrupted when a batch is complete, carried over (partial rollout)", (1, 2), own_batches=False,
        roles=Roles.WHOLE_POOL, core_trainers=False,
    ),
    "paper": Discipline("a fixed split, trajectories in the order of Libra's paper", (0, 1, 2), order="paper"),
    "streaming": Discipline("groups are trained on as they are complete (StreamRL)", (0, 1, 2), streaming=True),
    "streaming_bounded": Discipline(
        "the same, a batch takes what is complete first within the bound", (1, 2), own_batches=False, streaming=True
    ),
    "turning": Discipline(
        "streaming, and engines that the tail does not need train", (0, 1, 2), streaming=True, roles=Roles.TURNING
    ),
    "turning_kv": Discipline(
        "turning, and trajectories that change engines take their KV along", (0, 1, 2), streaming=True, roles=Roles.TURNING,
        kv_moves=True,
    ),
    "turning_kv_cmlfq": Discipline(
        "the same, in the order of C-MLFQ", (0, 1, 2), streaming=True, roles=Roles.TURNING, order="cmlfq", kv_moves=True
    ),
    "dynarl": Discipline(
        "turning with changes of 5 s, most completed calls first (DynaRL)", (0, 1, 2), streaming=True,
        roles=Roles.TURNING, order="completed_calls", changes_s=(5.0, 5.0),
    ),
    "turning_bounded": Discipline(
        "the same, a batch takes what is complete first within the bound", (1, 2), own_batches=False, streaming=True,
        roles=Roles.TURNING,
    ),
    "turning_cmlfq": Discipline(
        "turning, in the order of C-MLFQ", (0, 1, 2), streaming=True, roles=Roles.TURNING, order="cmlfq"
    ),
    "turning_oracle": Discipline(
        "turning, with the true lengths", (0, 1, 2), streaming=True, roles=Roles.TURNING, order="oracle"
    ),
})  # fmt: skip
"""By name; `python -m benchmarks systems CONFIG --against NAME[,NAME]` takes them."""

OTHER_NAMES: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType({
    "areal": ("bounded",), "rlinf": ("dynarl",), "streamrl": ("streaming",), "verl": ("colocated",),
    "oracle": ("turning_oracle",),
    "ours": ("turning", "turning_kv", "turning_bounded", "turning_cmlfq", "turning_kv_cmlfq"),
})  # fmt: skip
"""Names used elsewhere, and the disciplines they mean, as far as a staleness bound has them."""


def named(names: Sequence[str], eta: int) -> list[str]:
    """Disciplines by name, with `OTHER_NAMES` resolved; unknown names are kept."""
    found: list[str] = []
    for name in names:
        meant = [one for one in OTHER_NAMES.get(name, ()) if eta in DISCIPLINES[one].etas]
        found += meant or OTHER_NAMES.get(name, (name,))
    return list(dict.fromkeys(found))


def disciplines(names: Sequence[str], eta: int) -> dict[str, Discipline]:
    """Disciplines of these names (default all) for a staleness bound; ConfigError lists the names."""
    for name in names:
        if name not in DISCIPLINES:
            raise ConfigError(
                f"--against: got {name!r}; allowed are all, or some of {', '.join(DISCIPLINES)}; also {', '.join(OTHER_NAMES)}"
            )
    return {name: each for name, each in DISCIPLINES.items() if eta in each.etas and (not names or name in names)}

"""Training systems as data: which groups begin and which of them a batch takes, when they are trained on, who trains, in which
order and where trajectories run, how old a group may be, and what is thrown away.

Each is a rule of one simulator (`systems.pipeline`), with the same engines, seconds and workload. Systems of others are known by
what their papers and manuals say of these choices; what they have besides is not simulated:

* RollPacker (arXiv:2509.21009; the factor 1.25 for prompts and for samples is its paper's and its released configuration's). Of its
  parts only the rounds are simulated, and in ``rollpacker`` a trainer of the stream, whose engines turn by our rule instead of half
  of them once the memory allows it. One TP degree is kept for all rounds; graders take no time. A long round generates the samples
  that other systems generate for its prompts; really they would be drawn anew.
* slime and APRIL: twice the prompts of a batch begin, the example of APRIL's README. What is not complete in time is dropped, or
  with partial rollout goes on in the next step. Nothing bounds the age of a group then.
* verl's fully asynchronous trainer (its documentation, mode 4): one and a half batches are open (``staleness_threshold`` 0.5), the
  trainer wakes when a quarter of a batch waits (``require_batches``, ``trigger_parameter_sync_step`` 4, as in its experiments).
  Its four optimizer steps between two publications take the time of one here.
* prime-rl and verl's ``drop``: a group of which a token is older than the bound when a batch opens is dropped, begun or complete,
  and another prompt begins. By prime-rl's documentation of ``max_off_policy_steps``; its default is 8, here it is the bound.
* DORA (arXiv:2604.26256): `systems.version_window`. As many batches are open as the window has versions, ``eta`` + 1; that
  the window moves only when its oldest version has no trajectory left is not enforced, and lags say whether it would have had to.
* Laminar (arXiv:2510.12633): `systems.own_versions`. Its trainer waits 0.64 s for a publication (32B in the paper).
"""

from __future__ import annotations

import math
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
    """Engines that the tail of a rollout does not need (`libra.policy.turning`)."""
    WHOLE_POOL = "whole pool"
    """All engines, from the moment when a batch is complete until the new weights are published; what is open waits meanwhile."""


class Unfinished(StrEnum):
    """What becomes of the groups that are open when a batch is complete."""

    CONTINUES = "continues"
    """They go on, and are in a later batch."""
    ABANDONED = "abandoned"
    """They are thrown away, and their prompts come again when all others have been begun."""
    DEFERRED = "deferred"
    """They are thrown away, and their prompts wait: as soon as these make a batch, they are generated in a round of their own,
    without prompts or samples to spare."""


class OverAge(StrEnum):
    """What becomes of groups that would be older than the staleness bound."""

    WAITS = "waits"
    """There are none: a batch keeps places for groups at their deadline (`systems.streamed_batches`)."""
    DROPPED = "dropped"
    """They are thrown away when a batch opens for which they are too old; others begin."""
    TRAINED = "trained"
    """They are trained on: the bound is one on open groups, not on their age."""


@dataclass(frozen=True, slots=True)
class Discipline:
    """A training system.

    Attributes
    ----------
    text : str
        The system in a few words.
    etas : tuple of int
        Staleness bounds for which it is defined.
    own_batches : bool
        Batch ``j`` takes the groups of iteration ``j``; False: those that are complete first (`systems.streamed_batches`).
    streaming : bool
        A group is trained on as soon as its batch has taken it; False: when the batch is complete.
    roles : Roles
    core_trainers : bool
        Whether some GPUs always train; False: all generate, and train together.
    order : str
        Ordering of trajectories (`libra.policy.ORDERINGS`, ``oracle``, or ``seer``).
    kv_moves : bool
        A trajectory that changes engines takes its KV along, through host memory; False: it is computed again.
    static : bool
        A baseline of the table: no GPU does both.
    chunk_tokens : int or None
        Most tokens of a quantum (`rollout.chunk_tokens`). None: a turn is one quantum.
    preempts : bool
        Engines do not reserve KV for whole turns, and compute contexts again (`libra.hardware.virtual_engine`).
    changes_s : (float, float) or None
        Seconds of a change to training, and back. None: those of `libra.policy.turning.TurningRule`.
    parts : int
        Without ``streaming``: the trainer wakes when so many equal parts of a batch wait, one after the other; 1: all of it.
    by_group : bool
        As many groups begin after each step as may be open, and a batch takes them as they are complete; False: whole iterations
        begin (`libra.policy.admission`).
    open_batches : float or None
        With ``by_group``: groups that may be open (begun, and neither trained on nor thrown away), in batches. None: eta + 1.
    samples : float
        With ``by_group``: samples of a prompt that begin for each that is trained on; those that end first are.
    unfinished : Unfinished
    over_age : OverAge
    own_versions : bool
        With ``by_group``: each engine takes new weights by itself, when it has no trajectory, and thin ones hand theirs over
        (`systems.own_versions`); False: all engines take each version, and compute their contexts again.
    version_shares : bool
        With ``own_versions``: engines are shared out among the live versions by trajectories (`systems.version_window`).
    update_s : float or None
        Seconds from the optimizer until the trainer goes on and engines may take the new weights. None: those of the pipeline.
    """

    text: str
    etas: tuple[int, ...]
    own_batches: bool = True
    streaming: bool = False
    roles: Roles = Roles.SPLIT
    core_trainers: bool = True
    order: str = "fifo"
    kv_moves: bool = False
    static: bool = False
    chunk_tokens: int | None = None
    preempts: bool = False
    changes_s: tuple[float, float] | None = None
    parts: int = 1
    by_group: bool = False
    open_batches: float | None = None
    samples: float = 1.0
    unfinished: Unfinished = Unfinished.CONTINUES
    over_age: OverAge = OverAge.WAITS
    own_versions: bool = False
    version_shares: bool = False
    update_s: float | None = None

    def __post_init__(self) -> None:
        throws = self.unfinished is not Unfinished.CONTINUES
        rules = throws, self.samples > 1.0, self.over_age is not OverAge.WAITS, self.own_versions
        if not self.by_group and any(rules):
            raise ConfigError("by_group: got False with a rule for single groups; type by_group=True")
        if throws and self.etas != (0,):
            raise ConfigError(
                f"unfinished: got {self.unfinished} with etas {self.etas}; what is thrown away is never stale, type (0,)"
            )
        if self.by_group and not throws and self.over_age is OverAge.WAITS:
            raise ConfigError(
                "over_age: got waits with by_group; a batch takes groups as they are complete, type dropped or trained"
            )
        if self.version_shares and not self.own_versions:
            raise ConfigError("version_shares: got True without own_versions; type own_versions=True")
        if self.own_versions and (self.roles is not Roles.SPLIT or throws or self.over_age is not OverAge.TRAINED):
            raise ConfigError(
                "own_versions: got True; type roles split, unfinished continues and over_age trained with it"
            )

    def most_open(self, groups_per_batch: int, eta: int) -> int:
        """With ``by_group``: groups that may be open."""
        return int((eta + 1 if self.open_batches is None else self.open_batches) * groups_per_batch)

    def period(self, groups_per_batch: int) -> int:
        """Steps after which its rounds repeat, about: short rounds until a batch of prompts waits, and a long one."""
        spare = self.most_open(groups_per_batch, 0) - groups_per_batch
        return 1 + math.ceil(groups_per_batch / spare) if self.unfinished is Unfinished.DEFERRED and spare > 0 else 1


DISCIPLINES: Final[Mapping[str, Discipline]] = MappingProxyType({
    "colocated": Discipline(
        "synchronous, all GPUs generate and then train (verl)", (0,), roles=Roles.WHOLE_POOL, core_trainers=False, static=True
    ),
    "colocated_preempting": Discipline(
        "the same, engines start what fits and preempt when memory is full (vLLM)", (0,), roles=Roles.WHOLE_POOL,
        core_trainers=False, static=True, preempts=True,
    ),
    "seer": Discipline(
        "colocated, generations in parts of 8,192 tokens with KV in host memory, probes first (Seer)", (0,),
        roles=Roles.WHOLE_POOL, core_trainers=False, order="seer", chunk_tokens=8192, kv_moves=True,
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
    "abandoning": Discipline(
        "colocated, twice the prompts begin, what is not complete in time is thrown away (slime's over-sampling)", (0,),
        roles=Roles.WHOLE_POOL, core_trainers=False, by_group=True, open_batches=2.0, unfinished=Unfinished.ABANDONED,
    ),
    "april": Discipline(
        "the same, but it goes on in the next step, however old (partial rollout of slime and APRIL)", (1,), own_batches=False,
        roles=Roles.WHOLE_POOL, core_trainers=False, by_group=True, open_batches=2.0, over_age=OverAge.TRAINED,
    ),
    "long_rounds": Discipline(
        "colocated, 1.25 times the prompts and samples begin; prompts that are late make long rounds (RollPacker)", (0,),
        roles=Roles.WHOLE_POOL, core_trainers=False, by_group=True, open_batches=1.25, samples=1.25,
        unfinished=Unfinished.DEFERRED,
    ),
    "rollpacker": Discipline(
        "the same, and engines that the tail does not need train on complete groups (RollPacker)", (0,), streaming=True,
        roles=Roles.TURNING, core_trainers=False, by_group=True, open_batches=1.25, samples=1.25, unfinished=Unfinished.DEFERRED,
    ),
    "verl_async": Discipline(
        "a fixed split, 1.5 batches open, the trainer wakes for each quarter of a batch (verl, fully asynchronous)", (1,),
        own_batches=False, parts=4, by_group=True, open_batches=1.5, over_age=OverAge.TRAINED,
    ),
    "dropping": Discipline(
        "a fixed split, groups that are too old are thrown away (prime-rl)", (1, 2), own_batches=False, by_group=True,
        over_age=OverAge.DROPPED,
    ),
    "laminar": Discipline(
        "a fixed split, engines take new weights one by one, and thin ones hand over (Laminar)", (1, 2), own_batches=False,
        by_group=True, over_age=OverAge.TRAINED, own_versions=True, update_s=0.64,
    ),
    "dora": Discipline(
        "a fixed split, a window of versions that share the engines out, trajectories move with their KV (DORA)", (1, 2),
        own_batches=False, by_group=True, over_age=OverAge.TRAINED, own_versions=True, version_shares=True, kv_moves=True,
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
"""By name; `python -m benchmarks.systems CONFIG --against NAME[,NAME]` takes them."""

OTHER_NAMES: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType({
    "areal": ("bounded",),
    "rlinf": ("dynarl",),
    "slime": ("abandoning", "april"),
    "streamrl": ("streaming",),
    "verl": ("colocated", "verl_async"),
    "oracle": ("turning_oracle",),
    "ours": ("turning", "turning_kv", "turning_bounded", "turning_cmlfq", "turning_kv_cmlfq"),
})  # fmt: skip
"""What those who know a system call it, and the disciplines that this means: of these, the ones that a staleness bound has."""


def named(names: Sequence[str], eta: int) -> list[str]:
    """Disciplines by name, with `OTHER_NAMES` resolved for a staleness bound; a name that is neither is left as it is."""
    found: list[str] = []
    for name in names:
        meant = [one for one in OTHER_NAMES.get(name, ()) if eta in DISCIPLINES[one].etas]
        found += meant or OTHER_NAMES.get(name, (name,))
    return list(dict.fromkeys(found))


def disciplines(names: Sequence[str], eta: int) -> dict[str, Discipline]:
    """Those of these names (none: all) that are defined for a staleness bound; ConfigError lists the names that exist."""
    for name in names:
        if name not in DISCIPLINES:
            raise ConfigError(
                f"--against: got {name!r}; allowed are all, or some of {', '.join(DISCIPLINES)}; also {', '.join(OTHER_NAMES)}"
            )
    return {name: each for name, each in DISCIPLINES.items() if eta in each.etas and (not names or name in names)}

"""What happened to the run as a whole: iterations, batches, steps, decisions of policy and planner."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from libra.events.event import Event


@dataclass(frozen=True, slots=True)
class RunStarted(Event):
    """A driver took ``epoch`` of a run and begins; ``policy`` names what orders its trajectories, ``family`` their environment."""

    name: ClassVar[str] = "run_started"
    epoch: int
    eta: int
    iterations: int
    groups_per_batch: int
    policy: str
    family: str


@dataclass(frozen=True, slots=True)
class PolicySnapshot(Event):
    """What the policy objects know here: ``order`` of the one that ``policy`` names, and ``admission``.

    The first after ``run_started`` is what an epoch begins with; from any later one a replay can begin.
    """

    name: ClassVar[str] = "policy_snapshot"
    policy: str
    family: str
    order: dict[str, Any]
    admission: dict[str, Any]


@dataclass(frozen=True, slots=True)
class GateParked(Event):
    """An iteration asks to begin."""

    name: ClassVar[str] = "gate_parked"
    iteration: int


@dataclass(frozen=True, slots=True)
class PromptsNamed(Event):
    """Group ``k`` of a training iteration is of ``prompts[k]``, a name that a prompt has whenever it comes again; empty: never."""

    name: ClassVar[str] = "prompts_named"
    iteration: int
    prompts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class GateOpened(Event):
    """An iteration may generate, for this reason."""

    name: ClassVar[str] = "gate_opened"
    iteration: int
    reason: str


@dataclass(frozen=True, slots=True)
class BoundariesSet(Event):
    """From now on trajectories had best begin on engines of the degree that ``boundaries`` mean for their length, for this reason.

    Pairs (TP degree, generated tokens), ascending; see `libra.policy.messages.BoundariesSet`.
    """

    name: ClassVar[str] = "boundaries_set"
    boundaries: tuple[tuple[int, float], ...]
    reason: str


@dataclass(frozen=True, slots=True)
class PolicyLearned(Event):
    """The policy did the dear part of its learning from what had finished, which took ``seconds`` of the scheduler's loop."""

    name: ClassVar[str] = "policy_learned"
    seconds: float


@dataclass(frozen=True, slots=True)
class BatchParked(Event):
    """A step asks for its groups."""

    name: ClassVar[str] = "batch_parked"
    batch: int


@dataclass(frozen=True, slots=True)
class BatchOpened(Event):
    """A step may train on these groups, each (iteration, group), for this reason."""

    name: ClassVar[str] = "batch_opened"
    batch: int
    members: tuple[tuple[int, int], ...]
    reason: str


@dataclass(frozen=True, slots=True)
class StepFinished(Event):
    """All ranks took step ``step``."""

    name: ClassVar[str] = "step_finished"
    step: int
    loss: float
    train_s: float


@dataclass(frozen=True, slots=True)
class IterationFinished(Event):
    """The summary of an iteration returned; ``reward`` is None where no trajectory had one."""

    name: ClassVar[str] = "iteration_finished"
    iteration: int
    reward: float | None
    lag: float


@dataclass(frozen=True, slots=True)
class LayoutPlanned(Event):
    """The run starts what was planned for ``model`` on ``num_gpus`` x ``gpu`` ("cpu": ranks on cores), for this reason.

    ``engines`` are (TP degree, number, trajectories at once on each); ``boundaries`` pairs (TP degree, generated tokens up to which
    a trajectory is meant for it). ``step_s`` is predicted from what ``rests_on`` names; ``lost`` are the next best layouts.
    """

    name: ClassVar[str] = "layout_planned"
    model: str
    gpu: str
    num_gpus: int
    train_gpus: int
    engines: tuple[tuple[int, int, int], ...]
    boundaries: tuple[tuple[int, float], ...]
    micro_batch_tokens: int
    step_s: float
    rests_on: str
    reason: str
    lost: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PlanConsidered(Event):
    """A plan was weighed against what runs after an iteration, accepted or not, for this reason.

    ``predicted_step_s`` was predicted before the iteration that took ``realised_step_s`` (None: nothing was); ``current_step_s``
    and ``proposed_step_s`` are what its batch takes as things are, and in the plan, by what is known after it. Where the cost
    model predicts, ``rollout_factor`` and ``training_factor`` correct it; else they are 1. ``gain_s`` is over
    ``remaining_iterations``; ``cost_s`` the mean of ``num_changes`` measured changes, assumed where there was none. ``engines``
    are (TP degree, number), ``concurrency`` (TP degree, slots of the engine of that degree with the fewest). At the
    ``context_tokens`` expected in an iteration that a change is in time for, the fullest engine of what runs would need
    ``kv_demand`` of its KV; 0: not known.
    """

    name: ClassVar[str] = "plan_considered"
    iteration: int
    predicted_step_s: float | None
    realised_step_s: float
    current_step_s: float
    proposed_step_s: float
    gain_s: float
    cost_s: float
    num_changes: int
    remaining_iterations: int
    required_gain_frac: float
    rollout_factor: float
    training_factor: float
    train_gpus: int
    engines: tuple[tuple[int, int], ...]
    accepted: bool
    reason: str
    concurrency: tuple[tuple[int, int], ...] = ()
    context_tokens: float = 0.0
    kv_demand: float = 0.0


@dataclass(frozen=True, slots=True)
class PlanAccepted(Event):
    """The plan considered in the line before is to be carried out by ``commands``, each (name, numbers in words)."""

    name: ClassVar[str] = "plan_accepted"
    iteration: int
    train_gpus: int
    engines: tuple[tuple[int, int], ...]
    boundaries_tokens: tuple[float, ...]
    concurrency: tuple[tuple[int, int], ...]
    commands: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class PlanBlocked(Event):
    """A plan cannot be carried out, because of what is ``missing``; each is said once.

    It would gain ``gain_frac`` of a step, and need ``kv_demand`` of the KV of its fullest engine.
    """

    name: ClassVar[str] = "plan_blocked"
    iteration: int
    missing: str
    gain_frac: float
    kv_demand: float
    train_gpus: int
    engines: tuple[tuple[int, int], ...]
    concurrency: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class PlanRealised(Event):
    """What the change that was accepted after ``iteration`` came to, in the first iteration that it was there for.

    Gains are shares of a step; the realised one is against what the split before is predicted to take for the batch of
    ``realised_iteration``. ``cost_s``: seconds until the slowest worker of change ``generation`` was in its new role; None: not
    known, because no ``role_changed`` said so.
    """

    name: ClassVar[str] = "plan_realised"
    iteration: int
    generation: int
    predicted_gain_frac: float
    realised_gain_frac: float
    realised_iteration: int
    cost_s: float | None

"""The run as a whole: iterations, batches, steps, decisions of planner and driver."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from libra.facts.fact import Fact


class RunStarted(Fact, frozen=True):
    """A driver begins ``epoch`` of a run, with this ordering and environment."""

    words = "epoch {epoch} begins: eta {eta}, {groups_per_batch} groups per batch, policy {policy}"
    epoch: int
    eta: int
    iterations: int
    groups_per_batch: int
    policy: str
    family: str


class PolicySnapshot(Fact, frozen=True):
    """State of the policy objects; ``turning`` and ``versions`` are empty if not used.

    An epoch begins with the first snapshot after ``run_started``; a replay can begin at a later
    one.
    """

    words = "snapshot of the policy"
    policy: str
    family: str
    order: dict[str, Any]
    admission: dict[str, Any]
    turning: dict[str, Any] = {}
    versions: dict[str, Any] = {}


class PromptsNamed(Fact, frozen=True, gc=False):
    """Prompts of groups that have not started, as (group, prompt); equal in every iteration."""

    groups: tuple[tuple[str, str], ...]


def prompts_named(split: str, iteration: int, prompts: Sequence[str]) -> PromptsNamed:
    """`PromptsNamed` of an iteration whose group ``k`` is of ``prompts[k]``."""
    return PromptsNamed(tuple((f"{split}-{iteration}-{k}", prompt) for k, prompt in enumerate(prompts) if prompt))


class BoundariesSet(Fact, frozen=True, gc=False):
    """A plan assigns lengths to buckets: pairs (TP degree, generated tokens), ascending in both.

    Trajectories longer than all boundaries belong to a higher degree. Empty without a plan.
    """

    boundaries: tuple[tuple[int, float], ...]
    reason: str = ""


def boundaries_of(tokens: Mapping[Any, float]) -> tuple[tuple[int, float], ...]:
    """Boundaries as a configuration has them (``{"tp1": 3000}``), for `BoundariesSet`."""
    return tuple(sorted((int(name.removeprefix("tp")), float(end)) for name, end in tokens.items()))


class PolicyLearned(Fact, frozen=True):
    """The policy's expensive update took ``seconds`` of the scheduler's loop."""

    seconds: float


# ---------------------------------------------------------------- gates, batches and waves


class GateParked(Fact, frozen=True):
    subject = "gate"
    words = "iteration {iteration} waits at its gate"
    iteration: int


class BatchParked(Fact, frozen=True):
    subject = "batch"
    words = "batch {batch} waits for its groups"
    batch: int


class WaveParked(Fact, frozen=True):
    subject = "batch"
    words = "wave {wave} of batch {batch} requests its groups"
    batch: int
    wave: int


class WaveTrained(Fact, frozen=True):
    """The gradient of a wave was added, with the help of ``hybrids`` workers that change roles.

    ``missing`` groups of its batch were left for later waves.
    """

    subject = "batch"
    batch: int
    wave: int
    groups: int
    missing: int
    train_s: float
    hybrids: int = 0


class StepsPlanned(Fact, frozen=True):
    """A run may take its steps in these ``ways``, and begins with ``way``."""

    subject = "steps"
    words = "steps begin by {way}, of {ways}"
    ways: tuple[str, ...]
    way: str
    reason: str


class StepMeasured(Fact, frozen=True):
    """A measured step of a run that chooses how to take its steps."""

    subject = "steps"
    step: int
    complete_s: tuple[float, ...]  # from its gate's opening until each group was complete
    waves: tuple[tuple[int, float], ...]  # groups, and seconds by core trainers alone
    update_s: float  # from its last gradient until the weights were published
    longest_s: float  # the longest trajectory alone; 0: not known
    rollout_gpus: float  # mean number of engines' GPUs
    rollout_gpu_s: float  # their GPU-seconds with requests
    change_s: float  # both changes of an engine, mean or assumed; 0: not known
    beside_s: float = 0.0  # part of ``update_s`` beside the next step


class StepFinished(Fact, frozen=True):
    """All ranks took step ``step``; ``beside``: its weights are published during the next step."""

    step: int
    loss: float
    train_s: float
    beside: bool = False


class LateRewardsTaken(Fact, frozen=True):
    """Rewards that came after their trajectory was trained (`libra.policy.late_rewards`)."""

    subject = "batch"
    batch: int
    versions: int = 0  # most versions that a group waits
    waited: tuple[tuple[int, ...], ...] = ()  # (iteration, group, batch, samples ...)
    came: tuple[tuple[int, int, int], ...] = ()  # (iteration, group, sample) whose reward came
    arrived: tuple[tuple[int, ...], ...] = ()  # they count now: (iteration, group, sample, age)
    dropped: tuple[tuple[int, int, int], ...] = ()
    on_time: int = 0  # late rewards of the batch's own members that were there
    waiting: int = 0  # groups that wait for the next batch
    awaited: int = 0  # rewards that the batch waits for; it has decided nothing yet


class IterationFinished(Fact, frozen=True):
    """The summary of an iteration; ``reward`` is None if no trajectory had one."""

    iteration: int
    reward: float | None
    lag: float


class MismatchFound(Fact, frozen=True):
    """Engine and trainer disagree: a step's mismatch raised an alarm, and the run goes on."""

    words = "engine and trainer disagree at step {step}"
    step: int
    detail: str


class EvaluationFinished(Fact, frozen=True):
    """Held-out prompts were answered with ``version``; ``reward`` is None if none was graded."""

    version: int
    reward: float | None
    prompts: int


# ---------------------------------------------------------------- the planner


class LayoutPlanned(Fact, frozen=True):
    """The run starts the layout planned for ``model`` on ``num_gpus`` x ``gpu`` ("cpu": on cores).

    ``engines``: (TP degree, number, trajectories at once on each). ``boundaries``: (TP degree,
    longest trajectory in generated tokens). ``lost``: the next best layouts.
    """

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


class PlanConsidered(Fact, frozen=True):
    """A plan was compared with the present layout after an iteration, by the data measured in it.

    ``predicted_step_s`` is None without a prediction. ``gain_s`` is over ``remaining_iterations``;
    ``cost_s`` is the mean of ``num_changes`` changes, or an assumption. ``engines``: (TP degree,
    number); ``concurrency``: (TP degree, fewest slots of such an engine). ``context_tokens`` is the
    forecast for the first iteration that a change can affect, in which the fullest engine would
    need ``kv_demand`` of its KV (0 if unknown).
    """

    iteration: int
    predicted_step_s: float | None
    realised_step_s: float
    current_step_s: float
    proposed_step_s: float
    gain_s: float
    cost_s: float
    num_changes: int
    remaining_iterations: int
    train_gpus: int
    engines: tuple[tuple[int, int], ...]
    accepted: bool
    reason: str
    concurrency: tuple[tuple[int, int], ...] = ()
    context_tokens: float = 0.0
    kv_demand: float = 0.0

    @property
    def gain_frac(self) -> float:
        """Gain per step, as a share of the current step."""
        return 1.0 - self.proposed_step_s / self.current_step_s if self.current_step_s > 0 else 0.0


class PlanAccepted(Fact, frozen=True):
    words = "carry out the plan of iteration {iteration}"
    iteration: int
    train_gpus: int
    engines: tuple[tuple[int, int], ...]
    boundaries_tokens: tuple[float, ...]
    concurrency: tuple[tuple[int, int], ...]


class PlanBlocked(Fact, frozen=True):
    """A plan cannot be carried out because of what is ``missing``; each is logged once."""

    words = "plan of iteration {iteration} cannot be carried out, missing: {missing}"
    iteration: int
    missing: str
    gain_frac: float
    kv_demand: float
    train_gpus: int
    engines: tuple[tuple[int, int], ...]
    concurrency: tuple[tuple[int, int], ...]


class PlanRealised(Fact, frozen=True):
    """Result of the change accepted after ``iteration``, in the first iteration with it.

    Gains are shares of a step, for the batch of ``realised_iteration``. ``cost_s``: seconds until
    the slowest worker of change ``generation`` was in its new role; None without a role switch.
    """

    words = (
        "result of the plan of iteration {iteration}, in iteration {realised_iteration}, by the forecast of its batch"
    )
    iteration: int
    generation: int
    predicted_gain_frac: float
    realised_gain_frac: float
    realised_iteration: int
    cost_s: float | None

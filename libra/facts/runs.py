"""The run as a whole: iterations, batches, steps, decisions of planner and driver."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from libra.facts.fact import Fact


class RunStarted(Fact, frozen=True):
    """A driver begins ``epoch`` of a run; ``policy`` names the ordering of its trajectories, ``family`` their environment."""

    words = "epoch {epoch} begins: eta {eta}, {groups_per_batch} groups per batch, policy {policy}"

    epoch: int
    eta: int
    iterations: int
    groups_per_batch: int
    policy: str
    family: str


class PolicySnapshot(Fact, frozen=True):
    """State of the policy objects: ``order`` of the ordering ``policy``, ``admission``, ``turning`` and ``versions`` (empty: off).

    An epoch begins with the first after ``run_started``; a replay can begin at any later one.
    """

    words = "snapshot of the policy"

    policy: str
    family: str
    order: dict[str, Any]
    admission: dict[str, Any]
    turning: dict[str, Any] = {}
    versions: dict[str, Any] = {}


class PromptsNamed(Fact, frozen=True, gc=False):
    """Prompts of groups that have not started yet, as (group, prompt); a prompt has the same name in every iteration."""

    groups: tuple[tuple[str, str], ...]


def prompts_named(split: str, iteration: int, prompts: Sequence[str]) -> PromptsNamed:
    """`PromptsNamed` of an iteration whose group ``k`` is of ``prompts[k]``, by the names that the scheduler gives to groups."""
    return PromptsNamed(tuple((f"{split}-{iteration}-{k}", prompt) for k, prompt in enumerate(prompts) if prompt))


class BoundariesSet(Fact, frozen=True, gc=False):
    """A plan assigns buckets to lengths: pairs (TP degree, generated tokens), ascending in both.

    A trajectory of at most that many tokens should begin on engines of that degree; one longer than all, on engines of a
    higher one. Empty: there is no plan.
    """

    boundaries: tuple[tuple[int, float], ...]
    reason: str = ""


def boundaries_of(tokens: Mapping[Any, float]) -> tuple[tuple[int, float], ...]:
    """Boundaries as a configuration has them (``{"tp1": 3000}``), for `BoundariesSet`."""
    return tuple(sorted((int(name.removeprefix("tp")), float(end)) for name, end in tokens.items()))


class PolicyLearned(Fact, frozen=True):
    """The policy's expensive update ran, and took ``seconds`` of the scheduler's loop."""

    seconds: float


# ---------------------------------------------------------------- gates, batches and waves


class GateParked(Fact, frozen=True):
    """An iteration waits at its gate."""

    subject = "gate"
    words = "iteration {iteration} waits at its gate"

    iteration: int


class BatchParked(Fact, frozen=True):
    """A step requests its groups."""

    subject = "batch"
    words = "batch {batch} waits for its groups"

    batch: int


class WaveParked(Fact, frozen=True):
    """A wave of a streamed step requests its groups."""

    subject = "batch"
    words = "wave {wave} of batch {batch} requests its groups"

    batch: int
    wave: int


class WaveTrained(Fact, frozen=True):
    """The gradient of a wave with ``groups`` groups was added in ``train_s`` seconds, with the help of ``hybrids`` workers that
    can change roles; ``missing`` groups of its batch were left for later waves."""

    subject = "batch"

    batch: int
    wave: int
    groups: int
    missing: int
    train_s: float
    hybrids: int = 0


class StepsPlanned(Fact, frozen=True):
    """The run may take its steps in any of these ``ways``, and begins with ``way``, for this reason (`libra.policy.step_ways`)."""

    subject = "steps"
    words = "steps begin by {way}, of {ways}"

    ways: tuple[str, ...]
    way: str
    reason: str


class StepMeasured(Fact, frozen=True):
    """A step, as it was measured, of a run that chooses how to take its steps.

    Attributes
    ----------
    complete_s : tuple of float
        Seconds from the opening of its iteration's gate until each of its groups was complete, ascending.
    waves : tuple of (int, float)
        Groups of each of its waves, and seconds of its gradient if the core trainers alone had computed it.
    update_s : float
        From its last gradient until the new weights were published.
    longest_s : float
        The longest trajectory of its iteration, had it been alone; 0: not known.
    rollout_gpus, rollout_gpu_s : float
        GPUs of engines while it was taken, on average, and their GPU-seconds with requests.
    change_s : float
        Mean seconds of both changes of an engine; before one was measured, as many loads of a version. 0: not known.
    beside_s : float
        Of ``update_s``, the seconds after the step's end, which passed beside the next step; 0: that waited for them.
    """

    subject = "steps"

    step: int
    complete_s: tuple[float, ...]
    waves: tuple[tuple[int, float], ...]
    update_s: float
    longest_s: float
    rollout_gpus: float
    rollout_gpu_s: float
    change_s: float
    beside_s: float = 0.0


class StepFinished(Fact, frozen=True):
    """All ranks took step ``step``. ``beside``: its weights are published beside the next step, which may begin now."""

    step: int
    loss: float
    train_s: float
    beside: bool = False


class LateRewardsTaken(Fact, frozen=True):
    """What a batch does about rewards that come later than their trajectory (`libra.policy.late_rewards`).

    Input: groups that ``waited``, each (iteration, group, batch that trained it, samples ...), for at most ``versions``, and the
    trajectories among them whose reward ``came``, each (iteration, group, sample). Output: those that count now, with their age in
    versions (``arrived``), and those that are ``dropped``. Beside them: ``on_time``, late rewards of the batch's own members that
    were there; ``waiting``, groups that wait for the next batch. ``awaited``: the batch still waits for so many rewards, and
    has decided nothing.
    """

    subject = "batch"

    batch: int
    versions: int = 0
    waited: tuple[tuple[int, ...], ...] = ()
    came: tuple[tuple[int, int, int], ...] = ()
    arrived: tuple[tuple[int, ...], ...] = ()
    dropped: tuple[tuple[int, int, int], ...] = ()
    on_time: int = 0
    waiting: int = 0
    awaited: int = 0


class IterationFinished(Fact, frozen=True):
    """The summary of an iteration returned; ``reward`` is None if no trajectory had one."""

    iteration: int
    reward: float | None
    lag: float


class MismatchFound(Fact, frozen=True):
    """Engine and trainer do not compute the same model: the alarm of a step's mismatch, where the run goes on."""

    words = "engine and trainer disagree at step {step}"

    step: int
    detail: str


class EvaluationFinished(Fact, frozen=True):
    """``prompts`` held-out questions were answered with the weights ``version``; ``reward`` is None if none could be graded."""

    version: int
    reward: float | None
    prompts: int


# ---------------------------------------------------------------- the planner


class LayoutPlanned(Fact, frozen=True):
    """The run starts the layout planned for ``model`` on ``num_gpus`` x ``gpu`` ("cpu": ranks on cores), for this reason.

    ``engines`` are (TP degree, number, trajectories at once on each); ``boundaries`` pairs (TP degree, longest trajectory
    in generated tokens assigned to it). ``step_s`` is predicted from the data that ``rests_on`` names; ``lost`` are the next best.
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
    """A plan was compared with the present layout after an iteration, and accepted or not, for this reason.

    ``predicted_step_s`` was predicted before the iteration that took ``realised_step_s`` (None: nothing was); ``current_step_s``
    and ``proposed_step_s`` are seconds for its batch in the present layout and in the plan, by the data measured in it.
    ``gain_s`` is over ``remaining_iterations``; ``cost_s`` the mean of ``num_changes`` measured changes, or an assumption.
    ``engines`` are (TP degree, number), ``concurrency`` (TP degree, slots of the engine of that degree with the fewest).
    ``context_tokens`` are expected in the first iteration that a change can affect; at that length the fullest engine of
    the present layout would need ``kv_demand`` of its KV; 0: not known.
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
        """Gain per step, as a share of the current one."""
        return 1.0 - self.proposed_step_s / self.current_step_s if self.current_step_s > 0 else 0.0


class PlanAccepted(Fact, frozen=True):
    """The plan of the preceding line will be carried out."""

    words = "carry out the plan of iteration {iteration}"

    iteration: int
    train_gpus: int
    engines: tuple[tuple[int, int], ...]
    boundaries_tokens: tuple[float, ...]
    concurrency: tuple[tuple[int, int], ...]


class PlanBlocked(Fact, frozen=True):
    """A plan cannot be carried out because of what is ``missing``; each is logged once.

    It would gain ``gain_frac`` of a step, and need ``kv_demand`` of the KV of its fullest engine.
    """

    words = "plan of iteration {iteration} cannot be carried out, missing: {missing}"

    iteration: int
    missing: str
    gain_frac: float
    kv_demand: float
    train_gpus: int
    engines: tuple[tuple[int, int], ...]
    concurrency: tuple[tuple[int, int], ...]


class PlanRealised(Fact, frozen=True):
    """Result of the change that was accepted after ``iteration``, in the first iteration with it.

    Gains are shares of a step; the realised gain compares with the predicted seconds of the previous split for the batch of
    ``realised_iteration``. ``cost_s``: seconds until the slowest worker of change ``generation`` was in its new role; None:
    not known, because there was no ``role_changed``.
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

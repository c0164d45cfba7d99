"""The run as a whole: iterations, batches, steps, decisions of policy and planner."""

from __future__ import annotations

from typing import Any

from libra.events.event import Event


class RunStarted(Event, frozen=True):
    """A driver begins ``epoch`` of a run; ``policy`` names the ordering of its trajectories, ``family`` their environment."""

    epoch: int
    eta: int
    iterations: int
    groups_per_batch: int
    policy: str
    family: str


class PolicySnapshot(Event, frozen=True):
    """State of the policy objects: ``order`` of the ordering ``policy``, ``admission``, ``turning`` and ``versions`` (empty: off).

    An epoch begins with the first after ``run_started``; a replay can begin at any later one.
    """

    policy: str
    family: str
    order: dict[str, Any]
    admission: dict[str, Any]
    turning: dict[str, Any] = {}
    versions: dict[str, Any] = {}


class GateParked(Event, frozen=True):
    """An iteration waits at its gate."""

    iteration: int


class PromptsNamed(Event, frozen=True):
    """Group ``k`` of a training iteration is of ``prompts[k]``, the same name in every iteration; empty: it does not return."""

    iteration: int
    prompts: tuple[str, ...]


class GateOpened(Event, frozen=True):
    """An iteration may generate, for this reason."""

    iteration: int
    reason: str


class BoundariesSet(Event, frozen=True):
    """From now on trajectories should begin on engines of the degree that ``boundaries`` assign to their length, for this reason.

    Pairs (TP degree, generated tokens), ascending; see `libra.policy.messages.BoundariesSet`.
    """

    boundaries: tuple[tuple[int, float], ...]
    reason: str


class ToolsDeclared(Event, frozen=True):
    """Tools of the run have declared resources, and actions hold leases from now on; `libra.policy.messages.ToolsDeclared`."""

    tools: dict[str, Any]
    quotas: dict[str, str]


class PolicyLearned(Event, frozen=True):
    """The policy's expensive update ran, and took ``seconds`` of the scheduler's loop."""

    seconds: float


class BatchParked(Event, frozen=True):
    """A step requests its groups."""

    batch: int


class BatchOpened(Event, frozen=True):
    """A step may train on these groups, each (iteration, group), for this reason."""

    batch: int
    members: tuple[tuple[int, int], ...]
    reason: str


class WaveParked(Event, frozen=True):
    """A wave of a streamed step requests its groups."""

    batch: int
    wave: int


class WaveOpened(Event, frozen=True):
    """A wave of step ``batch`` may train on these groups, each (iteration, group), for this reason.

    Without members: the waves before it have all groups of the batch.
    """

    batch: int
    wave: int
    members: tuple[tuple[int, int], ...]
    reason: str


class WaveTrained(Event, frozen=True):
    """The gradient of a wave with ``groups`` groups was added in ``train_s`` seconds, with the help of ``hybrids`` workers that
    can change roles; ``missing`` groups of its batch were left for later waves."""

    batch: int
    wave: int
    groups: int
    missing: int
    train_s: float
    hybrids: int = 0


class StepsPlanned(Event, frozen=True):
    """The run may take its steps in any of these ``ways``, and begins with ``way``, for this reason (`libra.policy.way_choice`)."""

    ways: tuple[str, ...]
    way: str
    reason: str


class StepMeasured(Event, frozen=True):
    """A step of a run that chooses how to take its steps; fields as of `libra.policy.way_choice.MeasuredStep`."""

    step: int
    complete_s: tuple[float, ...]
    waves: tuple[tuple[int, float], ...]
    update_s: float
    longest_s: float
    rollout_gpus: float
    rollout_gpu_s: float
    change_s: float
    beside_s: float = 0.0


class StepsChosen(Event, frozen=True):
    """Steps are taken in this way from now on (split, streaming or turning), for this reason."""

    way: str
    reason: str


class StepFinished(Event, frozen=True):
    """All ranks took step ``step``. ``beside``: its weights are published beside the next step, which may begin now."""

    step: int
    loss: float
    train_s: float
    beside: bool = False


class LateRewardsTaken(Event, frozen=True):
    """What a batch does about rewards that come later than their trajectory (`libra.policy.late`).

    Input: groups that ``waited``, each (iteration, group, batch that trained it, samples ...), for at most ``versions``, and the
    trajectories among them whose reward ``came``, each (iteration, group, sample). Output: those that count now, with their age in
    versions (``arrived``), and those that are ``dropped``. Beside them: ``on_time``, late rewards of the batch's own members that
    were there; ``waiting``, groups that wait for the next batch. ``awaited``: the batch still waits for so many rewards, and
    has decided nothing.
    """

    batch: int
    versions: int
    waited: tuple[tuple[int, ...], ...]
    came: tuple[tuple[int, int, int], ...]
    arrived: tuple[tuple[int, ...], ...]
    dropped: tuple[tuple[int, int, int], ...]
    on_time: int
    waiting: int
    awaited: int


class IterationFinished(Event, frozen=True):
    """The summary of an iteration returned; ``reward`` is None if no trajectory had one."""

    iteration: int
    reward: float | None
    lag: float


class MismatchFound(Event, frozen=True):
    """Engine and trainer do not compute the same model: the alarm of a step's mismatch, where the run goes on."""

    step: int
    detail: str


class EvaluationFinished(Event, frozen=True):
    """``prompts`` held-out questions were answered with the weights ``version``; ``reward`` is None if none could be graded."""

    version: int
    reward: float | None
    prompts: int


class LayoutPlanned(Event, frozen=True):
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


class PlanConsidered(Event, frozen=True):
    """A plan was compared with the present layout after an iteration, and accepted or not, for this reason.

    ``predicted_step_s`` was predicted before the iteration that took ``realised_step_s`` (None: nothing was); ``current_step_s``
    and ``proposed_step_s`` are seconds for its batch in the present layout and in the plan, by the data measured in it. If
    the cost model predicts, ``rollout_factor`` and ``training_factor`` correct it; else they are 1. ``gain_s`` is over
    ``remaining_iterations``; ``cost_s`` the mean of ``num_changes`` measured changes, or an assumption if there was none.
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


class PlanAccepted(Event, frozen=True):
    """The plan of the preceding line will be carried out by ``commands``, each (name, numbers in words)."""

    iteration: int
    train_gpus: int
    engines: tuple[tuple[int, int], ...]
    boundaries_tokens: tuple[float, ...]
    concurrency: tuple[tuple[int, int], ...]
    commands: tuple[tuple[str, str], ...]


class PlanBlocked(Event, frozen=True):
    """A plan cannot be carried out because of what is ``missing``; each is logged once.

    It would gain ``gain_frac`` of a step, and need ``kv_demand`` of the KV of its fullest engine.
    """

    iteration: int
    missing: str
    gain_frac: float
    kv_demand: float
    train_gpus: int
    engines: tuple[tuple[int, int], ...]
    concurrency: tuple[tuple[int, int], ...]


class PlanRealised(Event, frozen=True):
    """Result of the change that was accepted after ``iteration``, in the first iteration with it.

    Gains are shares of a step; the realised gain compares with the predicted seconds of the previous split for the batch of
    ``realised_iteration``. ``cost_s``: seconds until the slowest worker of change ``generation`` was in its new role; None:
    not known, because there was no ``role_changed``.
    """

    iteration: int
    generation: int
    predicted_gain_frac: float
    realised_gain_frac: float
    realised_iteration: int
    cost_s: float | None

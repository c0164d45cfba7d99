"""Section ``planner``: what `libra plan` plans for, whether a run starts what is planned, and the plan that it starts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from libra.config.section import AtLeastOne, AtLeastZero, Section


class PlannedEngines(Section):
    """Engines of one tensor-parallel degree in a plan."""

    tp: AtLeastOne
    """Tensor-parallel degree, which is also the GPUs of one of them."""
    count: AtLeastOne
    """Number of them."""
    concurrency: AtLeastOne
    """Trajectories that generate at once on each."""

    @property
    def key(self) -> tuple[int, int, int]:
        """Degree, number and concurrency."""
        return self.tp, self.count, self.concurrency


class PlannedLayout(Section):
    """A plan that a run starts, and what it is for. `libra plan --write` and `planner.layout=auto` make it; nobody else has to."""

    model: Annotated[str, Field(min_length=1)]
    """Name of the model."""
    model_digest: Annotated[str, Field(min_length=1)]
    """SHA-256 of the model's sizes and number format: a plan is for every model of that form."""
    gpu: Annotated[str, Field(min_length=1)]
    """Hardware it is for: the GPU's name, or "cpu", where a rank of one worker stands for a GPU."""
    num_gpus: AtLeastOne
    """GPUs that were shared out."""
    train_gpus: AtLeastOne
    """Of them for training, `cluster.train_workers`."""
    engines: Annotated[tuple[PlannedEngines, ...], Field(strict=False, min_length=1)]
    """Engines by rising degree, `cluster.engines`."""
    boundaries_tokens: Annotated[tuple[float, ...], Field(strict=False)] = ()
    """Generated tokens at which one degree's trajectories end and the next one's begin, one fewer than degrees."""
    micro_batch_tokens: AtLeastOne
    """Tokens per forward and backward pass, `trainer.micro_batch_tokens`."""
    step_s: Annotated[float, Field(gt=0)]
    """Predicted seconds of a step."""
    rests_on: str
    """Where the seconds come from."""
    why: str
    """What the step waits for in the end."""
    lost: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """The next best layouts, and why each lost."""

    @property
    def boundaries(self) -> tuple[tuple[int, float], ...]:
        """Pairs (degree, generated tokens): up to so many a trajectory is meant for engines of that degree; the last has no end."""
        return tuple(
            (engines.tp, tokens) for engines, tokens in zip(self.engines, self.boundaries_tokens, strict=False)
        )

    @property
    def route(self) -> dict[str, float]:
        """`boundaries` as `policy.boundaries_tokens`; a degree that no length is meant for is left out."""
        found: dict[str, float] = {}
        for tp, tokens in self.boundaries:
            if tokens > max(found.values(), default=0.0):
                found[f"tp{tp}"] = tokens
        return found


class PlannerSection(Section):
    """What `libra plan` plans for: hardware, the trajectories of a batch, and what is given. A run does without it, unless it is to
    start what is planned."""

    layout: Literal["configured", "auto"] = "configured"
    """What a run starts. configured: what section `cluster` says. auto: before any worker starts, it plans for its own model,
    trainer and batch, and starts that: `cluster.train_workers`, `cluster.engines`, `policy.boundaries_tokens` and
    `trainer.micro_batch_tokens` are then the plan's."""
    planned: PlannedLayout | None = None
    """The plan that the settings of `cluster` and `trainer` were taken from, as `libra plan --write` and `layout` auto write it. A
    run on another model or other hardware is refused. None: nobody planned them."""

    replan: bool = False
    """In a run, plan again after each iteration: learn what it took, weigh a better plan, write both down. Nothing is changed
    unless `planner.apply` says so."""
    apply: bool = False
    """Carry out accepted plans while the run goes on: slots of engines and bucket boundaries, and where workers may change roles
    (`cluster.hybrid_workers`) who trains and whose GPUs are one engine. Needs `planner.replan`."""
    change_cost_s: Annotated[float, Field(ge=0)] = 18.8
    """Seconds that a change of roles, or of engines' GPUs, is taken to cost the run until one of its kind has been measured: what
    Libra reports, both directions together, of Qwen3-14B on A800. A plan is carried out where it gains one and a half times as
    much in the iterations that remain, or where KV memory would not hold what is to come."""
    gpu: Annotated[str, Field(min_length=1)] | None = None
    """GPU of every node: a name that Libra knows, or the path of a datasheet. None: for `layout` auto the one of this machine, else
    A800-80G."""
    calibration: Annotated[Path, Field(strict=False)] | None = None
    """File that `libra calibrate RUN --save` wrote: engines are as that run measured them instead of as the GPU's tables say, and
    training is scaled to the steps it took; degrees that it does not know are left out of `tp`. Its weight update is taken where
    `update_s` is not given. It has to be of the model that `model.path` names. None: the GPU's tables."""
    num_gpus: AtLeastOne | None = None
    """GPUs to share out between training and rollout. None: for `layout` auto as many as this machine has (without a GPU: as many
    as `cluster.threads` goes into its cores), else 8."""
    gpus_per_node: AtLeastOne | None = None
    """GPUs of one node; no engine spans two. None: as the datasheet says."""
    tp: Annotated[list[AtLeastOne], Field(min_length=1)] = [1, 2, 4, 8]
    """Tensor-parallel degrees an engine may have; each has to divide the next, and the last one the node."""
    trace: Annotated[Path, Field(strict=False)] | None = None
    """CSV of agents' turns that the batch is drawn from, with columns task, sample, turn, prompt_tokens (the context before the
    turn), completion_tokens and, if known, tool_s. None: lengths as given below."""
    trajectories: AtLeastOne | None = None
    """Trajectories of one step. None: `trainer.prompts` x `trainer.group_size`."""
    prompt_tokens: AtLeastOne = 512
    """Tokens before the first turn, where there is no trace."""
    generated_p50_tokens: Annotated[float, Field(gt=0)] = 1024.0
    """Median of a trajectory's generated tokens, where there is no trace; lengths are taken as log-normal."""
    generated_p99_tokens: Annotated[float, Field(gt=0)] = 4096.0
    """99th percentile of the same."""
    observation_tokens: AtLeastZero = 0
    """Tokens that tools add to the context of a trajectory, where there is no trace."""
    turns: AtLeastOne = 1
    """Generations of a trajectory, where there is no trace."""
    tool_s: Annotated[float, Field(ge=0)] = 0.5
    """Seconds of a tool call, where the trace does not say."""
    max_concurrency: AtLeastOne = 256
    """Trajectories that generate at once on one engine at most, whatever its memory holds."""
    update_s: Annotated[float, Field(ge=0)] | None = None
    """Seconds from a step's end until engines serve its weights. None: 10, or with `calibration` as measured."""
    min_train_gpus: AtLeastOne = 1
    """Core training pool: at least so many GPUs."""
    min_rollout_gpus: AtLeastOne = 1
    """Core rollout pool: at least so many GPUs."""
    fixed_train_gpus: AtLeastOne | None = None
    """Exactly so many GPUs for training, one worker each (`cluster.train_workers`). None: as is best."""
    fixed_engines: dict[Annotated[int, Field(ge=1, strict=False)], AtLeastZero] = {}
    """Exactly so many engines of a degree, e.g. {"1": 4, "8": 1}; degrees that are not named are free."""

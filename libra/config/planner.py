"""Sections ``planner`` and ``simulation``, and the plan that a run starts."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from pydantic import Field, PlainSerializer, PlainValidator, field_validator

from libra.config.section import AtLeastOne, AtLeastZero, Section, arguments

_Count = Annotated[int, msgspec.Meta(ge=1)]
_Text = Annotated[str, msgspec.Meta(min_length=1)]


class PlannedEngines(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Engines of one tensor-parallel degree: GPUs of each, number, and generations of each."""

    tp: _Count
    count: _Count
    concurrency: _Count

    @property
    def key(self) -> tuple[int, int, int]:
        """Degree, number and concurrency."""
        return self.tp, self.count, self.concurrency


class PlannedLayout(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A plan that a run starts, written by `libra plan --write` and `planner.layout=auto`.

    Attributes
    ----------
    model, model_digest : str
        Name of the model; SHA-256 of its sizes and number format. The plan holds for every model
        with this digest.
    gpu : str
        Name of the GPU, or "cpu", where a rank of a worker counts as a GPU.
    num_gpus, train_gpus : int
        GPUs to divide, and GPUs for training (`cluster.train_workers`).
    engines : tuple of PlannedEngines
        By rising degree (`cluster.engines`).
    boundaries_tokens : tuple of float
        Generated tokens at which trajectories move from one degree to the next; one fewer than
        degrees.
    teacher : str
        Where a teacher computes, and its seconds for a batch; empty without a teacher.
    micro_batch_tokens : int
        Tokens per forward and backward pass (`trainer.micro_batch_tokens`).
    step_s, rests_on, why, lost
        Predicted seconds of a step, their source, what limits the step, and why the next best
        layouts are worse.
    way, way_why
        Planned way of the steps, and its reason; the start of a run with `trainer.streaming` or
        `trainer.turning` auto.
    """

    model: _Text
    model_digest: _Text
    gpu: _Text
    num_gpus: _Count
    train_gpus: _Count
    engines: Annotated[tuple[PlannedEngines, ...], msgspec.Meta(min_length=1)]
    boundaries_tokens: tuple[float, ...] = ()
    teacher: str = ""
    micro_batch_tokens: _Count
    step_s: Annotated[float, msgspec.Meta(gt=0)]
    rests_on: str
    why: str
    lost: tuple[str, ...] = ()
    way: Literal["split", "streaming", "turning"] | None = None
    way_why: str = ""

    @property
    def boundaries(self) -> tuple[tuple[int, float], ...]:
        """Pairs (degree, generated tokens) for every degree but the last."""
        return tuple(
            (engines.tp, tokens) for engines, tokens in zip(self.engines, self.boundaries_tokens, strict=False)
        )

    @property
    def route(self) -> dict[str, float]:
        """`boundaries` as `policy.boundaries_tokens`, without degrees that serve no length."""
        found: dict[str, float] = {}
        for tp, tokens in self.boundaries:
            if tokens > max(found.values(), default=0.0):
                found[f"tp{tp}"] = tokens
        return found


def _planned(given: Any) -> PlannedLayout | None:
    try:
        return msgspec.convert(given, PlannedLayout | None)
    except msgspec.ValidationError as error:
        raise ValueError(
            f"{error}; type libra plan CONFIG --write FILE, which writes it, or planner.planned=null"
        ) from None


class LengthArgs(Section):
    """Lengths of trajectories in `planner.lengths`."""

    prompt_tokens: AtLeastOne = 512
    generated_p50_tokens: Annotated[float, Field(gt=0)] = 1024.0
    generated_p99_tokens: Annotated[float, Field(gt=0)] = 4096.0
    observation_tokens: AtLeastZero = 0
    turns: AtLeastOne = 1
    tool_s: Annotated[float, Field(ge=0)] = 0.5
    trained_frac: Annotated[float, Field(gt=0, le=1)] = 1.0


class PlannerSection(Section):
    """Input of `libra plan`: hardware, the trajectories of a batch, and constraints. A run reads it
    only if it plans."""

    layout: Literal["configured", "auto"] = "configured"
    """Layout that a run starts. configured: as in section `cluster`. auto: before any worker
    starts, the run plans for its model, trainer and batch, and takes `cluster.train_workers`,
    `cluster.engines`, `policy.boundaries_tokens` and `trainer.micro_batch_tokens` from the plan."""
    planned: Annotated[PlannedLayout | None, PlainValidator(_planned), PlainSerializer(msgspec.to_builtins)] = None
    """The plan behind the settings of `cluster` and `trainer`, written by `libra plan --write` and
    `layout` auto. It is refused for another model or other hardware. If null, the settings are not
    planned."""

    replan: Literal["off", "advise", "apply"] = "off"
    """Compare plans again after each iteration, with a cost model fitted to the run. advise: log a
    better plan. apply: also carry out accepted plans: slots of engines and bucket boundaries, and
    with `cluster.hybrid_workers` the roles of workers and the degrees of engines."""
    change_cost_s: Annotated[float, Field(ge=0)] = 18.8
    """Assumed seconds of a role change, or of a change of engines' GPUs, until one of its kind has
    been measured; the default is the Libra paper's figure for both directions together (Qwen3-14B
    on A800). A plan is applied if it gains one and a half times its cost in the remaining
    iterations, or if the next iterations would not fit into KV memory. The tail of a streamed step
    assumes three loads of a version, at most this much."""
    gpu: Annotated[str, Field(min_length=1)] | None = None
    """GPU of every machine: a name in `libra/hardware/gpus`, or the path of a datasheet. If null,
    this machine's GPU for `layout` auto, else A800-80G."""
    calibration: Annotated[Path, Field(strict=False)] | None = None
    """File that `libra calibrate RUN --save` wrote. Engines then take the seconds measured in that
    run instead of the GPU's tables, training is scaled to the run's steps, `tp` loses the degrees
    that were not measured, and the measured weight update is the default of `update_s`. The file
    must be of the model in `model.path`. If null, the GPU's tables."""
    num_gpus: AtLeastOne | None = None
    """GPUs to divide between training and rollout. If null, 8, or for `layout` auto this machine's
    (without a GPU: its cores divided by `cluster.threads`)."""
    tp: Annotated[list[AtLeastOne], Field(min_length=1)] = [1, 2, 4, 8]
    """Tensor-parallel degrees an engine may have; each must divide the next, and the last one the
    GPUs of a machine."""
    trace: Annotated[Path, Field(strict=False)] | None = None
    """CSV of agents' turns to draw the batch from, with columns task, sample, turn, prompt_tokens
    (the context before the turn), completion_tokens and, if known, tool_s. If null, `lengths`."""
    lengths: dict[str, Any] = LengthArgs().model_dump(mode="json")
    """Lengths of the batch's trajectories: `prompt_tokens` before the first turn;
    `generated_p50_tokens` and `generated_p99_tokens`, the median and the 99th percentile of generated
    tokens, log-normal; `observation_tokens` that tools add; generations (`turns`). Also with a trace:
    `tool_s`, seconds of a tool call, where the trace has none; `trained_frac`, the share that carries
    a gradient, which a run's metrics have as `forwarded_sequences` over `trajectories`."""
    update_s: Annotated[float, Field(ge=0)] | None = None
    """Seconds from a step's end until engines serve its weights; with `run.eta` at 1 or more and
    one training GPU, they overlap with the next step. If null, 10, or as measured with
    `calibration`."""
    fixed_train_gpus: AtLeastOne | None = None
    """Exact number of GPUs for training, one worker each (`cluster.train_workers`). If null, the best
    number."""
    fixed_engines: dict[Annotated[int, Field(ge=1, strict=False)], AtLeastZero] = {}
    """Exact number of engines by degree, e.g. {"1": 4, "8": 1}; other degrees are free."""

    @field_validator("lengths")
    @classmethod
    def _arguments(cls, given: dict[str, Any]) -> dict[str, Any]:
        return arguments(LengthArgs, given, "planner.lengths")

    @field_validator("tp")
    @classmethod
    def _each_divides_the_next(cls, tp: list[int]) -> list[int]:
        if any(later % degree or later == degree for degree, later in pairwise(tp)):
            raise ValueError(f"{tp}: each degree must divide the next, larger one; type e.g. planner.tp=[1, 2, 4]")
        return tp


class SimulationSection(Section):
    """Input of `libra simulate` beside the run's own sections: `policy`, `cluster.engines`,
    `model`, `trainer` and `run` as for a run, GPU, calibration and lengths of trajectories from
    `planner`."""

    iterations: AtLeastOne = 1
    """Iterations to simulate."""
    train_s: Annotated[float, Field(ge=0)] | None = None
    """Seconds of an optimizer step with its weight update. If null, 0, or as measured with
    `planner.calibration`."""
    load_s: Annotated[float, Field(ge=0)] | None = None
    """Seconds in which an engine loads new weights; running requests then recompute their context.
    If null, 0, or as measured with `planner.calibration`."""
    tool_slots: AtLeastOne | None = None
    """Concurrent actions. If null, no limit."""
    noise: bool = False
    """Draw the seconds of engines around the predicted ones, from the residuals of measured
    kernels; the same seed draws the same."""

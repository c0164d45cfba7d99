"""Section `simulation` of a configuration, and the names of scheduling policies."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from libra.config.own_parts import OwnOr
from libra.config.section import AtLeastOne, Section

POLICIES = ("cmlfq", "fifo", "mlfq")
"""Names in `libra.policy.ORDERINGS`."""


class SimulationSection(Section):
    """Input of `libra simulate` that differs from the run's own sections: engines, workload and policy. `trainer` gives
    the sizes of groups and batches, `run` the staleness bound and the seed."""

    gpu: Annotated[str, Field(min_length=1)] | None = None
    """GPU of the engines: a name of `libra/hardware/gpus`, or a file of that form. None: `planner.gpu`, else A800-80G."""
    calibration: Annotated[Path, Field(strict=False)] | None = None
    """File that `libra calibrate RUN --save` wrote: engines, trainer and transfers have the seconds measured in that run,
    instead of those of `gpu` and `model`. It must be of the model in `model.path`. None: `planner.calibration`, else the GPU's
    tables; those too where `gpu` or `model` is given."""
    model: Annotated[str, Field(min_length=1)] | None = None
    """Model to simulate: a name of `libra/hardware/models`, or a Hugging Face directory or config.json. None: `model.path`."""
    layout: dict[Literal["tp1", "tp2", "tp4", "tp8"], AtLeastOne] | None = None
    """Engines by tensor-parallel degree, e.g. {"tp2": 8, "tp8": 1}: eight engines of two GPUs and one of eight. None: those of
    `cluster.engines`, else `cluster.rollout_workers` of `rollout.tp`."""
    slots: AtLeastOne | None = None
    """Concurrent generations of each engine. None: as many as fit into its KV memory at mean length, 256 at most; with
    `calibration` the slots of the measured engine."""
    policy: Annotated[str, OwnOr(POLICIES)] | None = None
    """Scheduling policy: cmlfq (forecasts of remaining tokens), fifo, mlfq (least attained service). None: `policy.name`."""
    objective: Literal["makespan", "stream"] | None = None
    """For cmlfq: makespan ends the iteration soon, stream completes one group after the other.
    None: `policy.objective`."""
    traces: Annotated[Path, Field(strict=False)] | None = None
    """File of agent turns (CSV, one row a turn) to draw trajectories from. None: of the lengths in section `planner`."""
    turns: AtLeastOne | None = None
    """Turns of a trajectory that is not drawn from `traces`, at most `rollout.max_turns`. None: `planner.turns`."""
    iterations: AtLeastOne = 1
    """Iterations to simulate."""
    train_s: Annotated[float, Field(ge=0)] | None = None
    """Seconds of an optimizer step with its weight update. None: 0, or with `calibration` as measured."""
    load_s: Annotated[float, Field(ge=0)] | None = None
    """Seconds in which an engine loads new weights; running requests then recompute their context. None: 0, or with
    `calibration` as measured."""
    tool_slots: AtLeastOne | None = None
    """Concurrent actions. None: no limit."""
    noise: bool = False
    """Draw the seconds of engines around the predicted ones, with the residuals of measured kernels; the same seed draws the
    same."""

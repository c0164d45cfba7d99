"""Section `simulation` of a configuration, and the names of scheduling policies."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from libra.config.section import AtLeastOne, Section

POLICIES = ("cmlfq", "fifo", "mlfq")
"""Names in `libra.policy.ORDERINGS`."""


class SimulationSection(Section):
    """Input of `libra simulate` beside the run's own sections: `policy`, `cluster.engines`, `model`, `trainer` and `run` as for
    a run, GPU, calibration and lengths of trajectories from `planner`."""

    iterations: AtLeastOne = 1
    """Iterations to simulate."""
    train_s: Annotated[float, Field(ge=0)] | None = None
    """Seconds of an optimizer step with its weight update. None: 0, or with `planner.calibration` as measured."""
    load_s: Annotated[float, Field(ge=0)] | None = None
    """Seconds in which an engine loads new weights; running requests then recompute their context. None: 0, or with
    `planner.calibration` as measured."""
    tool_slots: AtLeastOne | None = None
    """Concurrent actions. None: no limit."""
    noise: bool = False
    """Draw the seconds of engines around the predicted ones, with the residuals of measured kernels; the same seed draws the
    same."""

"""How long a batch's trajectories came to be, as the numbers of an iteration carry it to the driver."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from libra.types import Trajectory

if TYPE_CHECKING:
    from libra.planner.cost import Workload

Lengths = tuple[int, int, int, int, float]
"""Tokens of prompt, generated and observed; turns; seconds with tools."""


def lengths_of(trajectories: Iterable[Trajectory]) -> list[Lengths]:
    """Of every trajectory that has a turn."""
    found = []
    for trajectory in trajectories:
        if turns := trajectory.turns:
            generated, observed = (
                sum(int(turn[name]) for turn in turns) for name in ("generated_tokens", "observation_tokens")
            )
            tool_s = float(sum(turn["tool_s"] for turn in turns))
            found.append((int(turns[0]["prompt_tokens"]), generated, observed, len(turns), round(tool_s, 6)))
    return found


def workload_of(rows: Sequence[Lengths]) -> Workload | None:
    """The same for the planner; None where there is none."""
    from libra.planner.cost import Workload

    if not rows:
        return None
    prompt, generated, observed, turns, tool_s = np.array(rows, float).T
    return Workload(prompt, np.maximum(generated, 1.0), observed, np.maximum(turns, 1.0), tool_s)

"""Whether an arrangement would run out of KV memory, and the arrangement to change to: EARL's rule that memory comes before
speed.

An option whose KV demand, at the context expected when a change takes hold, exceeds `MAX_DEMAND` is replaced by one below
it, before memory runs out, not after.

Source: EARL, arXiv:2510.05943, the parallelism selector. Deviation: EARL looks rates up in a table measured before the run and
chooses a degree by context length alone; here the options are whole arrangements of a run's engines, fewer slots among them, and
concurrency counts as much as length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

MAX_DEMAND = 0.9
"""Share of its KV that an engine of a run may need: contexts that run together scatter about their mean."""
RAISED_DEMAND = 0.75
"""Share up to which an engine may get more slots; below `MAX_DEMAND` (hysteresis)."""
WATCHED = 8
"""Number of iterations whose mean contexts give the trend."""


@dataclass(frozen=True, slots=True)
class ContextTrend:
    """Mean context at the end of an iteration's trajectories, over iterations, extrapolated by a line through the last ones."""

    means: tuple[tuple[int, float], ...] = ()

    def after(self, iteration: int, mean_tokens: float) -> ContextTrend:
        """The trend with one more iteration."""
        return ContextTrend((*self.means, (iteration, mean_tokens))[-WATCHED:])

    def expected(self, iteration: int) -> float:
        """Mean context expected of a later iteration: by the line, and never less than the last one; 0: unknown."""
        if not self.means:
            return 0.0
        last = self.means[-1][1]
        if len(self.means) < 2:
            return last
        at, mean = (np.array(column, float) for column in zip(*self.means, strict=True))
        slope, level = np.polyfit(at - at.mean(), mean, 1)
        return max(last, float(level + slope * (iteration - at.mean())))


@dataclass(frozen=True, slots=True)
class Fit:
    """An option: its seconds (in any unit), and its demand on the fullest KV."""

    slowness: float
    demand: float


def refuge(current: Fit, options: Sequence[Fit]) -> int | None:
    """Index of the option to change to because ``current`` would run out of memory; None if it would not, or none needs less.

    The fastest of those below `MAX_DEMAND`; if there is none, the one with the least demand.
    """
    if current.demand <= MAX_DEMAND:
        return None
    safe = [at for at, fit in enumerate(options) if fit.demand <= MAX_DEMAND]
    if safe:
        return min(safe, key=lambda at: options[at].slowness)
    nearest = min(range(len(options)), key=lambda at: (options[at].demand, options[at].slowness), default=None)
    return nearest if nearest is not None and options[nearest].demand < current.demand else None

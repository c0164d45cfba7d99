"""KV memory of an engine over time, as forecasts have it: contexts grow, and trajectories that end release theirs. Pure arithmetic.

Every open trajectory gains one token of its own per step, and with it ``growth`` tokens of context. So one with ``context``
now and ``left`` tokens to generate holds ``context + growth * s`` after ``s`` of its steps, until ``s = left``. The memory of all
is largest just before one of them ends: `peak_tokens`. Steps in which a trajectory waits or calls a tool are left out.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

FOREVER = 1e12
"""Tokens left of a trajectory without a forecast: nobody knows when it ends."""


class Demand(NamedTuple):
    """One trajectory's KV: ``context`` tokens now, ``left`` steps until it ends, ``final`` tokens then."""

    left: float
    context: float
    final: float

    @classmethod
    def of(cls, context: float, left: float, growth: float, limit: int) -> Demand:
        """A trajectory with ``left`` tokens to generate, on engines with contexts up to ``limit``; 0 for either: not known."""
        if left <= 0.0:
            return cls(FOREVER, context, context)
        final = context + growth * left
        return cls(left, context, max(context, min(final, limit)) if limit else final)


class Refused(NamedTuple):
    """A demand that did not fit into ``capacity``, at this growth of contexts and with this longest one."""

    demand: Demand
    growth: float
    capacity: float
    limit: int

    def covers(self, demand: Demand, growth: float, capacity: float, limit: int) -> bool:
        """Whether another demand does not fit either, beside the same members or more: it holds as much at every step, and as
        long."""
        (left, context, final), old = demand, self.demand
        return (
            growth >= self.growth
            and capacity <= self.capacity
            and limit == self.limit
            and left >= old.left
            and context >= old.context
            and (final - context) * old.left >= (old.final - old.context) * left
        )


def peak_tokens(demands: Iterable[Demand]) -> float:
    """The most tokens that all hold together until the last one has ended; 0 without any. O(n log n)."""
    peak = contexts = rates = 0.0
    for left, context, final in sorted(demands, reverse=True):
        rate = (final - context) / left if left > 0.0 else 0.0
        contexts += context if left > 0.0 else final
        rates += rate
        peak = max(peak, contexts + rates * left)
    return peak

"""KV memory of an engine over time, as forecasts say: contexts grow, and those that end release theirs. Pure arithmetic.

Every trajectory under way gains one token of its own per step, and with it ``growth`` tokens of context. So one with ``context``
now and ``left`` tokens to generate holds ``context + growth * s`` after ``s`` of its steps, until ``s = left``. The memory of all
is largest just before one of them ends: `peak_tokens`. Steps in which a trajectory waits or calls a tool are left out.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Demand(NamedTuple):
    """One trajectory's KV: ``context`` tokens now, ``left`` steps until it ends, ``final`` tokens then."""

    left: float
    context: float
    final: float


def peak_tokens(demands: Iterable[Demand]) -> float:
    """The most tokens that all hold together until the last one has ended; 0 without any. O(n log n)."""
    peak = contexts = rates = 0.0
    for left, context, final in sorted(demands, reverse=True):
        rate = (final - context) / left if left > 0.0 else 0.0
        contexts += context if left > 0.0 else final
        rates += rate
        peak = max(peak, contexts + rates * left)
    return peak

"""EARL's parallelism selector: which tensor-parallel degree to generate with, as contexts and concurrency grow.

1. A degree whose KV demand, at the context expected when the next choice is made, exceeds ``max_demand`` is not chosen while
   another one is below it: a switch comes before memory runs out, not after.
2. Among the others the one with most tokens per GPU-second is chosen, but the present one stays unless the gain exceeds
   ``min_gain_frac``: every switch moves weights.
3. Where no degree is below ``max_demand``, the one with the least demand is chosen, and the reason says so.

Source: EARL, arXiv:2510.05943, the parallelism selector. Deviation: EARL looks rates up in a table measured before the run and
chooses by context length alone; here they come from the cost model, and concurrency counts as much as length. In a run
(`libra.planner.arrangement_loop`) the options are whole arrangements of its engines, fewer slots among them; the rule is `refuge`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from libra.errors import ConfigError
from libra.planner.cost.generation_rate import generation
from libra.planner.cost.rollout_cost import ManySeconds

K = TypeVar("K")

MAX_DEMAND = 0.9
"""Share of its KV that an engine of a run may need: contexts that run together scatter about their mean."""
RAISED_DEMAND = 0.75
"""Share up to which an engine is given more to hold than it has now: less than the share at which it is given less."""
WATCHED = 8
"""Iterations whose mean contexts are the trend."""


@dataclass(frozen=True, slots=True)
class ContextTrend:
    """Mean context at the end of an iteration's trajectories, over iterations; a line through the last of them foretells it."""

    means: tuple[tuple[int, float], ...] = ()

    def after(self, iteration: int, mean_tokens: float) -> ContextTrend:
        """With one more iteration."""
        return ContextTrend((*self.means, (iteration, mean_tokens))[-WATCHED:])

    def expected(self, iteration: int) -> float:
        """Mean context expected in an iteration to come: what the line says, and never less than it was last; 0: nothing known."""
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
    """An option as the selector sees it: how slow it is (any unit, less is better), and its demand on the fullest KV."""

    slowness: float
    demand: float


def refuge(current: Fit, options: Mapping[K, Fit], max_demand: float) -> K | None:
    """Where to go because ``current`` would run out of memory; None where it would not, or nothing needs less.

    The quickest of those that hold what is to come; where none does, the one that comes nearest.
    """
    if current.demand <= max_demand:
        return None
    safe = [key for key, fit in options.items() if fit.demand <= max_demand]
    if safe:
        return min(safe, key=lambda key: options[key].slowness)
    nearest = min(options, key=lambda key: (options[key].demand, options[key].slowness), default=None)
    return nearest if nearest is not None and options[nearest].demand < current.demand else None


@dataclass(frozen=True, slots=True)
class Choice:
    """A degree, and why.

    Attributes
    ----------
    tp : int
    tokens_per_gpu_s : dict
        What each degree would deliver, at the present context.
    kv_demand : dict
        Tokens in flight over KV, of each degree, at the expected context.
    reason : str
        One line for people.
    """

    tp: int
    tokens_per_gpu_s: dict[int, float]
    kv_demand: dict[int, float]
    reason: str


def select_tp(
    engines: Mapping[int, ManySeconds],
    num_in_flight: float,
    context_tokens: float,
    *,
    tokens_per_pass: float,
    expected_context_tokens: float | None = None,
    current: int | None = None,
    min_gain_frac: float = 0.02,
    max_demand: float = 1.0,
) -> Choice:
    """The degree for the next steps.

    Parameters
    ----------
    engines : mapping of tp to EngineSeconds with times for arrays
    num_in_flight : float
        Responses per engine.
    context_tokens : float
        Their contexts now.
    tokens_per_pass : float
        See `libra.planner.cost.generation_rate.generation`.
    expected_context_tokens : float, optional
        Their contexts when the next choice is made; None: as now.
    current : int, optional
        The degree in use; None where there is none yet.
    min_gain_frac : float
        Gain in rate below which a switch is not worth it.
    max_demand : float
        Tokens in flight over KV up to which a degree is safe: 1 where queueing is to be avoided, what was seen to survive
        where it is not.
    """
    if not engines:
        raise ConfigError("engines: got none; name at least one tensor-parallel degree")
    if current is not None and current not in engines:
        raise ConfigError(f"current: got tp={current}; allowed is one of {', '.join(map(str, sorted(engines)))}")
    soon = context_tokens if expected_context_tokens is None else max(context_tokens, expected_context_tokens)
    rates = {
        tp: float(generation(engine, num_in_flight, context_tokens, tokens_per_pass).tokens_per_gpu_s)
        for tp, engine in engines.items()
    }
    demand = {tp: num_in_flight * soon / engine.kv_capacity_tokens for tp, engine in engines.items()}
    fits = {tp: Fit(1.0 / rates[tp], demand[tp]) for tp in sorted(engines)}
    safe = [tp for tp in fits if demand[tp] <= max_demand]
    if not safe:
        tp = min(engines, key=lambda one: (demand[one], one))
        reason = f"no degree holds {num_in_flight:g} x {soon:,.0f} tokens; tp={tp} comes nearest ({demand[tp]:.2f} of its KV)"
        return Choice(tp, rates, demand, reason)
    best = max(safe, key=lambda one: (rates[one], -one))
    if current is None:
        return Choice(best, rates, demand, f"tp={best} delivers most: {rates[best]:,.1f} tokens per GPU-second")
    if (better := refuge(fits[current], fits, max_demand)) is not None:
        need = f"would need {demand[current]:.2f} of its KV at {soon:,.0f} tokens"
        reason = f"tp={current} {need}; tp={better} needs {demand[better]:.2f}"
        return Choice(better, rates, demand, reason)
    gain = rates[best] / rates[current] - 1.0
    if best != current and gain > min_gain_frac:
        return Choice(best, rates, demand, f"tp={best} delivers {100 * gain:.1f} % more than tp={current}")
    return Choice(current, rates, demand, f"tp={current} stays: the best other gains {100 * max(gain, 0.0):.1f} %")

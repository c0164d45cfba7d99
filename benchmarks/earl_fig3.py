"""EARL's Fig. 3 against the cost model: gain of TP8 over TP4 by context and responses in flight.

The figures are percent of throughput per GPU, Qwen2.5-72B-Instruct on H100-80G (arXiv:2510.05943). Columns are its contexts:
structure and constants are fixed on 1K, 4K and 16K (15 cells), and scored on 2K, 8K and 32K (14 cells, and the one that ran out
of memory). ``earl_concurrency_*`` is the same with responses in flight as columns: fixed on 8, 32 and 128, scored on 16 and 64.

Two constants are fitted: the memory an engine may take, and the tokens generated for each time a context is computed. All
others are the package's. Out of memory is what demands more KV, per KV there is, than any cell that was fitted survived: a
rule of caution, not a model of the failure.

One structure was tried before this one (KV capacity divided by a constant, host overhead free): 13 of 15 and, on the scored
columns, 12 of 14 at 6.2 points. That was seen before this one was written.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.report import Figure
from libra.hardware import ModelOnGPU, engine_seconds
from libra.hardware.run_calibration import fit_positive
from libra.planner.cost.rollout_cost import ManySeconds

Array = NDArray[np.float64]

IN_FLIGHT = np.array([8.0, 16.0, 32.0, 64.0, 128.0])
GAIN_PERCENT = {
    1: (-21.1, -32.2, -30.7, -29.1, -6.9),
    2: (-20.0, -28.6, -26.3, -16.6, -5.5),
    4: (-18.0, -25.2, -21.9, -5.9, 5.1),
    8: (-24.7, -20.8, -4.4, 6.4, 5.2),
    16: (-18.8, -5.0, 3.4, 5.5, 3.1),
    32: (-1.5, 4.6, 5.0, 6.5, None),
}
"""Context in units of 1,024 tokens: percent for each of `IN_FLIGHT`; None ran out of memory at TP4."""
FITTED_CONTEXTS = (1, 4, 16)
FITTED_IN_FLIGHT = (8.0, 32.0, 128.0)
START = (200.0, 0.6)
LEAST_FRAC = 0.5
"""Least memory fraction: below it TP4's weights do not fit."""


class Generation(NamedTuple):
    """Rates of one engine, one entry per point.

    Attributes
    ----------
    tokens_per_gpu_s : array
        Generated tokens per GPU-second.
    running : array
        Responses that run at once; the others in flight queue for KV.
    kv_demand : array
        Tokens of all responses in flight over what the KV holds; above 1 some queue.
    """

    tokens_per_gpu_s: Array
    running: Array
    kv_demand: Array


def generation(engine: ManySeconds, num: Array, context: Array, tokens_per_pass: float) -> Generation:
    """Rates with ``num`` responses of ``context`` tokens each in flight; arrays of one shape.

    Rates are per GPU. An engine runs what its KV holds. Every context is computed once per ``tokens_per_pass`` generated tokens:
    a turn's where nothing keeps prefixes, many where they are kept.
    """
    running = np.minimum(num, np.maximum(engine.kv_capacity_tokens / context, 1.0))
    decode_s = tokens_per_pass * (num / running) * engine.decode_steps_s(running, running * context)
    prefill_s = num * engine.prefills_s(context, 0.0)
    rate = num * tokens_per_pass / (engine.tp * (decode_s + prefill_s))
    return Generation(rate, running, num * context / engine.kv_capacity_tokens)


def engines(memory_frac: float) -> dict[int, ModelOnGPU]:
    """TP4 and TP8 engines that may take so much memory."""
    return {
        tp: engine_seconds("H100-80G", "Qwen2.5-72B-Instruct", tp, memory_frac=memory_frac, tables=None)
        for tp in (4, 8)
    }


def gains(constants: Array, num: Array, context: Array) -> tuple[Array, Array, Array]:
    """Percent gained by TP8, and the KV demand of TP4 and TP8."""
    pair = engines(LEAST_FRAC + min(float(constants[1]), 0.99 - LEAST_FRAC))
    four, eight = (generation(pair[tp], num, context, float(constants[0])) for tp in (4, 8))
    return 100.0 * (eight.tokens_per_gpu_s / four.tokens_per_gpu_s - 1.0), four.kv_demand, eight.kv_demand


def cells() -> tuple[Array, Array, Array]:
    """(responses, context tokens, percent) of every cell; NaN ran out of memory."""
    rows = [
        (num, 1024.0 * k, np.nan if gain is None else gain)
        for k, row in GAIN_PERCENT.items()
        for num, gain in zip(IN_FLIGHT, row, strict=True)
    ]
    table = np.array(rows, float)
    return table[:, 0], table[:, 1], table[:, 2]


def fit(num: Array, context: Array, percent: Array) -> Array:
    """The two constants, fitted to these cells."""
    start = np.array([START[0], START[1] - LEAST_FRAC])
    return fit_positive(lambda trial: (gains(trial, num, context)[0] - percent) / 10.0, start, outlier=1.0)


def earl_figures() -> tuple[dict[str, Figure], list[str]]:
    """Figures of the scored cells, and the fits in words."""
    num, context, percent = cells()
    figures: dict[str, Figure] = {}
    notes: list[str] = []
    for prefix, columns in (
        ("earl", np.isin(context, [1024.0 * k for k in FITTED_CONTEXTS])),
        ("earl_concurrency", np.isin(num, FITTED_IN_FLIGHT)),
    ):
        _score(prefix, columns, (num, context, percent), figures, notes)
    return figures, notes


def _score(
    prefix: str,
    columns: NDArray[np.bool_],
    table: tuple[Array, Array, Array],
    figures: dict[str, Figure],
    notes: list[str],
) -> None:
    num, context, percent = table
    lost = np.isnan(percent)
    learn, ask = columns & ~lost, ~columns & ~lost
    constants = fit(num[learn], context[learn], percent[learn])
    found, four, eight = gains(constants, num, context)
    survived = float(four[learn].max())
    failing = four > survived * 1.0001
    right_sign, off = (found > 0) == (percent > 0), np.abs(found - percent)
    where = [f"TP4 at {n:.0f} x {c / 1024:.0f}K" for n, c in zip(num[failing], context[failing], strict=True)]
    notes.append(
        f"{prefix}: 2 constants fitted to {learn.sum()} cells: {constants[0]:.0f} tokens per computed context, memory fraction "
        f"{LEAST_FRAC + constants[1]:.3f}: {right_sign[learn].sum()} signs, {off[learn].mean():.1f} points there; on the "
        f"{ask.sum()} others {right_sign[ask].sum()} signs, {off[ask].mean():.1f} points; out of memory above "
        f"{survived:.0f} times the KV: {', '.join(where) or 'nowhere'}"
    )
    goal = np.ceil(12 / 14 * ask.sum())
    figures[f"{prefix}_signs"] = Figure(int(right_sign[ask].sum()), f"of {ask.sum()}", "higher", float(goal))
    figures[f"{prefix}_error_points"] = Figure(float(off[ask].mean()), "percentage points", "lower", 10.0)
    if prefix != "earl":
        return
    cells_right = (failing == lost)[~columns].sum() + (eight <= survived)[~columns].sum()
    asked = 2 * int((~columns).sum())
    figures["earl_oom_right"] = Figure(
        int(cells_right), f"of {asked} scored cells of TP4 and TP8", "higher", float(asked)
    )
    notes += [
        f"  {n:>3.0f} x {c / 1024:>2.0f}K: EARL {'OOM' if np.isnan(p) else format(p, '+.1f'):>6} model {f:+6.1f}"
        for n, c, p, f in zip(num[~columns], context[~columns], percent[~columns], found[~columns], strict=True)
    ]


if __name__ == "__main__":
    for line in earl_figures()[1]:
        print(line)

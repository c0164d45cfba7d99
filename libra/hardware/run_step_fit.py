"""Seconds of a run's engines and trainer, fitted to its own generations and optimizer steps, for engines that declared none.

A generation takes ``fixed + tokens x (token + sequence x others)`` seconds, where ``others`` is the mean number of generations that
ran beside it on its worker. A training step takes ``fixed + tokens x token``.

1. Every second part of the run is fitted and the others are predicted from it: the reported error is that of the predicted
   parts.
2. Workers with fewer than `FEWEST` generations are left out, and times that are not above 0 are refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from libra.errors import ConfigError
from libra.hardware.least_squares import fit_positive
from libra.hardware.run_quanta import running_beside

Array = NDArray[np.float64]

FEWEST = 20
"""Minimum generations of a worker to fit three constants."""
BATCH, PARTS = 32, 16
"""Generations that are summed before the fit, and parts of the run over whose sums the error is taken: single generations
are too noisy."""


@dataclass(frozen=True, slots=True)
class RunEngine:
    """Fitted seconds of one worker's generations.

    Attributes
    ----------
    fixed_s : float
        Of a generation: dispatch, prefill, committing its record.
    token_s, sequence_s : float
        Of each token, and more for each other sequence that runs.
    error_frac : float
        Mean |predicted / measured - 1| of the sums over parts of the run (one in `PARTS`) that were not fitted.
    num_generations : int
    """

    fixed_s: float
    token_s: float
    sequence_s: float
    error_frac: float
    num_generations: int


@dataclass(frozen=True, slots=True)
class RunTrainer:
    """Fitted seconds of a run's training steps.

    Attributes
    ----------
    fixed_s, token_s : float
        Of a step, and of each token it computes.
    error_frac : float
        Mean |predicted / measured - 1| of the steps that were not fitted.
    num_steps : int
    """

    fixed_s: float
    token_s: float
    error_frac: float
    num_steps: int

    def step_s(self, tokens: float) -> float:
        """Seconds of a step over ``tokens`` tokens."""
        return self.fixed_s + self.token_s * tokens


def fit_engine(stop_s: ArrayLike, latency_s: ArrayLike, tokens: ArrayLike, *, worker: str = "") -> RunEngine:
    """The engine behind the generations of one worker.

    Parameters
    ----------
    stop_s, latency_s, tokens : (n,) array
        When each ended, how long it took, how many tokens it generated (at least 1); at least `FEWEST` of them.

    Raises
    ------
    ConfigError
        A latency that is not above 0, or fewer tokens than 1.
    """
    stop, latency, num = (np.asarray(values, float) for values in (stop_s, latency_s, tokens))
    if not (np.all(latency > 0) and np.all(num >= 1)):
        raise ConfigError(
            f"worker {worker!r}: latencies and tokens must be above 0, got {latency.min()} s, {num.min()} tokens"
        )
    others = np.maximum(running_beside(stop - latency, stop) - 1.0, 0.0)
    columns = np.stack([np.ones(len(num)), num, num * others, latency], axis=1)[np.argsort(stop, kind="stable")]
    parts = np.array_split(columns, min(PARTS, len(columns) // 2))
    step = float(np.quantile(latency / num, 0.1))
    start = np.array([0.2 * float(np.median(latency)), step, 0.1 * step])

    def fitted(chosen: list[Array]) -> Array:
        batches = [rows for part in chosen for rows in np.array_split(part, max(1, len(part) // BATCH))]
        sums = np.stack([rows.sum(axis=0) for rows in batches])
        return fit_positive(lambda values: np.log(sums[:, :3] @ values / sums[:, 3]), start, outlier=0.3, tether=1e-3)

    held_out = np.stack([part.sum(axis=0) for part in parts[1::2]])
    error = float(np.abs(held_out[:, :3] @ fitted(parts[::2]) / held_out[:, 3] - 1.0).mean())
    fixed_s, token_s, sequence_s = (float(value) for value in fitted(parts))
    return RunEngine(fixed_s, token_s, sequence_s, error, len(num))


def fit_trainer(seconds: ArrayLike, tokens: ArrayLike) -> RunTrainer | None:
    """The trainer behind these steps; None for fewer than four."""
    spent, num = np.asarray(seconds, float), np.asarray(tokens, float)
    if len(spent) < 4:
        return None
    if not (np.all(spent > 0) and np.all(num > 0)):
        raise ConfigError(
            f"training steps: seconds and tokens must be above 0, got {spent.min()} s, {num.min()} tokens"
        )
    start = np.array([0.1 * float(spent.min()), 0.9 * float(np.median(spent / num))])

    def fitted(chosen: slice) -> Array:
        return fit_positive(
            lambda values: np.log((values[0] + values[1] * num[chosen]) / spent[chosen]),
            start,
            outlier=0.5,
            tether=1e-3,
        )

    half = fitted(slice(0, None, 2))
    error = float(np.abs((half[0] + half[1] * num[1::2]) / spent[1::2] - 1.0).mean())
    fixed_s, token_s = (float(value) for value in fitted(slice(None)))
    return RunTrainer(fixed_s, token_s, error, len(spent))


def fit_engines(events: Iterable[Mapping[str, Any]]) -> dict[str, RunEngine]:
    """The engine of each worker of an event log; ConfigError if no worker generated often enough."""
    by_worker: dict[str, list[tuple[float, float, float]]] = {}
    for event in events:
        if event.get("name") == "quantum_finished" and event["phase"] == "ROLLOUT" and event["tokens"] > 0:
            by_worker.setdefault(event["worker"], []).append((event["t_s"], event["latency_s"], event["tokens"]))
    engines = {
        worker: fit_engine(*np.array(rows, float).T, worker=worker)
        for worker, rows in sorted(by_worker.items())
        if len(rows) >= FEWEST
    }
    if not engines:
        most = max((len(rows) for rows in by_worker.values()), default=0)
        raise ConfigError(
            f"this run has at most {most} generations on a worker, and {FEWEST} are needed to fit an engine; continue it "
            "(libra resume RUN), or take another run"
        )
    return engines

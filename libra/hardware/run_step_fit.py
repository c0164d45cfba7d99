"""Engines and trainers as a run measured them: seconds of its own generations and optimizer steps, fitted to three constants each.

For hardware that no datasheet describes (a laptop's cores, a slower worker among fast ones), and for what the host adds. A
generation is taken to need ``fixed + tokens x (token + sequence x others)`` seconds, ``others`` being how many ran beside it on
average; a training step ``fixed + tokens x token``.

1. Every second part of the run is fitted and the others are predicted from it: the error that is reported was not fitted.
2. A worker with fewer than `FEWEST` generations is refused, as are times that are not above 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from libra.errors import ConfigError
from libra.hardware.least_squares import fit_positive
from libra.hardware.run_quanta import running_beside

Array = NDArray[np.float64]

FEWEST = 20
"""Generations of a worker, below which three constants say nothing."""
BATCH, PARTS = 32, 16
"""Generations that are added up before they are fitted, and parts of the run over whose sums the error is taken: single ones
jitter, and a step of a run is a sum."""


@dataclass(frozen=True, slots=True)
class RunEngine:
    """`EngineSeconds` of a worker of a run.

    Attributes
    ----------
    fixed_s : float
        Of a generation: dispatch, prefill, committing its record.
    token_s, sequence_s : float
        Of each token, and more for each other sequence that runs.
    error_frac : float
        Mean |predicted / measured - 1| of the sums over parts of the run (one in `PARTS`) that were not fitted.
    num_generations : int
    tp : int
    kv_capacity_tokens : int
        Not seen in a run; whoever knows it says so.
    """

    fixed_s: float
    token_s: float
    sequence_s: float
    error_frac: float
    num_generations: int
    tp: int = 1
    kv_capacity_tokens: int = 2**40

    def decode_step_s(self, num_sequences: int, context_tokens: float) -> float:
        """Seconds of one step; contexts do not enter."""
        return self.token_s + self.sequence_s * (num_sequences - 1) if num_sequences >= 1 else 0.0

    def decode_steps_s(self, num_sequences: ArrayLike, context_tokens: ArrayLike) -> Array:
        """`decode_step_s` of many steps."""
        num, _ = np.broadcast_arrays(np.asarray(num_sequences, float), np.asarray(context_tokens, float))
        return np.where(num >= 1, self.token_s + self.sequence_s * (num - 1.0), 0.0)

    def prefill_s(self, new_tokens: int, past_tokens: int) -> float:
        """Seconds before the first token, of any prompt."""
        return self.fixed_s if new_tokens > 0 else 0.0

    def prefills_s(self, new_tokens: ArrayLike, past_tokens: ArrayLike) -> Array:
        """`prefill_s` of many sequences."""
        new, _ = np.broadcast_arrays(np.asarray(new_tokens, float), np.asarray(past_tokens, float))
        return np.where(new > 0, self.fixed_s, 0.0)


@dataclass(frozen=True, slots=True)
class RunTrainer:
    """Seconds of a run's training steps.

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
        """Seconds of a step over so many tokens."""
        return self.fixed_s + self.token_s * tokens


@dataclass(frozen=True, slots=True)
class RunSteps:
    """Everything a run says of its hardware: an engine per rollout worker, and the trainer where it stepped often enough."""

    engines: Mapping[str, RunEngine]
    trainer: RunTrainer | None

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "engines": {name: asdict(engine) for name, engine in self.engines.items()},
            "trainer": None if self.trainer is None else asdict(self.trainer),
        }


def fit_engine(stop_s: ArrayLike, latency_s: ArrayLike, tokens: ArrayLike, *, worker: str = "") -> RunEngine:
    """The engine that generations of one worker show.

    Parameters
    ----------
    stop_s, latency_s, tokens : (n,) array
        When each ended, how long it took, how many tokens it generated (at least 1).

    Raises
    ------
    ConfigError
        Too few generations, or a latency that is not above 0.
    """
    stop, latency, num = (np.asarray(values, float) for values in (stop_s, latency_s, tokens))
    if len(stop) < FEWEST:
        raise ConfigError(f"worker {worker!r}: {len(stop)} generations; at least {FEWEST} are needed")
    if not (np.all(latency > 0) and np.all(num >= 1)):
        raise ConfigError(
            f"worker {worker!r}: latencies and tokens must be above 0, got {latency.min()} s, {num.min()} tokens"
        )
    others = np.maximum(running_beside(stop - latency, stop) - 1.0, 0.0)
    columns = np.stack([np.ones(len(num)), num, num * others, latency], axis=1)[np.argsort(stop, kind="stable")]
    parts = np.array_split(columns, min(PARTS, len(columns) // 2))

    def batched(rows: Array) -> Array:
        return np.stack([part.sum(axis=0) for part in np.array_split(rows, max(1, len(rows) // BATCH))])

    step = float(np.quantile(latency / num, 0.1))
    start = np.array([0.2 * float(np.median(latency)), step, 0.1 * step])

    def fitted(chosen: list[Array]) -> Array:
        sums = np.concatenate([batched(part) for part in chosen])
        return fit_positive(
            lambda values: np.log(sums[:, :3] @ values / sums[:, 3]), start, rounds=60, outlier=0.3, tether=1e-3
        )

    asked = np.stack([part.sum(axis=0) for part in parts[1::2]])
    error = float(np.abs(asked[:, :3] @ fitted(parts[::2]) / asked[:, 3] - 1.0).mean())
    fixed_s, token_s, sequence_s = (float(value) for value in fitted(parts))
    return RunEngine(fixed_s, token_s, sequence_s, error, len(num))


def fit_trainer(seconds: ArrayLike, tokens: ArrayLike) -> RunTrainer | None:
    """The trainer that steps show; None where there are fewer than four."""
    spent, num = np.asarray(seconds, float), np.asarray(tokens, float)
    if len(spent) < 4:
        return None
    if not (np.all(spent > 0) and np.all(num > 0)):
        raise ConfigError(
            f"training steps: seconds and tokens must be above 0, got {spent.min()} s, {num.min()} tokens"
        )

    def fitted(chosen: slice) -> Array:
        start = np.array([0.1 * float(spent.min()), 0.9 * float(np.median(spent / num))])
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


def fit_run(events: Sequence[Mapping[str, Any]], metrics: Sequence[Mapping[str, Any]]) -> RunSteps:
    """What a run's event log and metrics say; ConfigError where no worker generated often enough."""
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
            f"this run has at most {most} generations on a worker, and {FEWEST} are needed to fit an engine; let it go on "
            "(libra resume RUN), or take another run"
        )
    steps = [row for row in metrics if row.get("train_s") and row.get("forwarded_tokens")]
    trainer = fit_trainer([row["train_s"] for row in steps], [row["forwarded_tokens"] for row in steps])
    return RunSteps(engines, trainer)

"""Measured hardware of a run: engine capacity and seconds, trainer, and overheads in between.

`libra calibrate RUN --save FILE` writes it as JSON for `planner.calibration`; `libra simulate
--from-run` computes it from the run. Engine seconds are as declared (`engine_declared`). A
trainer's step takes ``fixed + tokens x token`` seconds, fitted on every second step; the error is
of predictions for the others.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from libra.errors import ConfigError
from libra.hardware.engine_seconds import MeasuredEngine
from libra.types import StepSeconds

SCHEMA = 2
"""Version of the calibration file format."""
UNBOUNDED_TOKENS = 2**40
"""KV tokens of an engine that declared none."""
KIND = "libra run calibration"
"""``kind`` of a calibration file."""


class QuantumOverhead(NamedTuple):
    """Seconds of a quantum outside engine and tool, as samples to draw from.

    Scheduler and workers serve quanta one by one, so the last quanta of an iteration are the
    fastest.
    """

    transport_s: tuple[float, ...] = (0.0,)  # dispatch to start on the worker, and its end to the report
    worker_s: tuple[float, ...] = (0.0,)  # on the worker, around the engine or the tool
    idle_frac: float = 1.0  # remaining share of the samples with nothing else in flight
    in_flight: float = 1.0  # mean number of quanta in flight

    def factor(self, in_flight: int) -> float:
        """Factor on the samples with ``in_flight`` quanta in flight."""
        return self.idle_frac + (1.0 - self.idle_frac) * in_flight / self.in_flight


NO_OVERHEAD = QuantumOverhead()
"""No overhead: only engines and tools take time."""


@dataclass(frozen=True, slots=True)
class EngineOfRun:
    """One engine of a run."""

    worker: str
    engine: str  # kind: ``transformers``, ``vllm``
    bucket: str
    tp: int
    slots: int
    kv_tokens: int
    steps: StepSeconds
    wall_over_passes: float = 1.0  # wall seconds of turns over those by ``steps``
    overhead: QuantumOverhead = NO_OVERHEAD  # per generation, outside the engine

    @property
    def seconds(self) -> MeasuredEngine:
        """These seconds as `EngineSeconds`."""
        return MeasuredEngine(self.steps, self.tp, self.kv_tokens, self.wall_over_passes)

    @property
    def max_contexts(self) -> int | None:
        """Maximum trajectories with kept KV: one per slot, or None if as many as fit."""
        return self.slots if self.engine == "transformers" else None


@dataclass(frozen=True, slots=True)
class RunCalibration:
    """Measurements of a run's hardware."""

    model: str
    digest: str  # of the model's shape (`libra.hardware.shapes.shape_digest`); empty: unknown
    engines: tuple[EngineOfRun, ...]
    trainer: RunTrainer | None  # None after too few steps
    train_gpus: int = 1
    update_s: float = 0.0  # mean seconds from a step's end to publication
    load_s: float = 0.0  # mean seconds of an engine's weight load
    tools: QuantumOverhead = NO_OVERHEAD  # per action, outside the tool
    gate_s: float = 0.0  # from a gate to its first trajectory
    commit_s: float = 0.0  # from the end of a group's last trajectory to its record
    source: str = ""  # run directory, or file

    @property
    def degrees(self) -> tuple[int, ...]:
        """TP degrees of its engines."""
        return tuple(sorted({engine.tp for engine in self.engines}))

    def of_tp(self, tp: int, where: str) -> EngineOfRun:
        """The engine of this degree with the most slots, then the most measured passes.

        ConfigError, beginning with ``where``, if the run had no such engine.
        """
        engines = [engine for engine in self.engines if engine.tp == tp]
        if not engines:
            known = ", ".join(f"tp{degree}" for degree in self.degrees)
            raise ConfigError(
                f"{where}: engines of tp{tp} are requested, and {self.source} measured {known} only; type "
                f"cluster.engines=[{{tp: {self.degrees[0]}}}], or calibrate from a run that has an engine of tp{tp}"
            )
        return max(engines, key=lambda engine: (engine.slots, engine.steps.num_steps, engine.worker))

    def check_model(self, model: str, digest: str, where: str) -> None:
        """ConfigError, beginning with ``where``, if the calibration is of another model."""
        if digest != self.digest if digest and self.digest else model != self.model:
            raise ConfigError(
                f"{where}: {self.source} measured engines of {self.model} (sizes {self.digest[:12] or 'unknown'}), and this "
                f"configuration has model.path={model} (sizes {digest[:12] or 'unknown'}); take the former's configuration, "
                "or calibrate from a run of this model: libra calibrate RUN --save FILE"
            )

    def to_json(self) -> str:
        """One JSON object, read by `read_calibration`."""
        return json.dumps({"kind": KIND, "schema": SCHEMA, **asdict(self)}, indent=1) + "\n"


def read_calibration(path: Path, where: str) -> RunCalibration:
    """Read a calibration file; a ConfigError begins with ``where``."""
    again, at = "write it again: libra calibrate RUN --save FILE", f"{where}: {path}"
    try:
        values = msgspec.json.decode(path.read_bytes())
        if not isinstance(values, dict) or values.pop("kind", None) != KIND:
            raise ConfigError(f"{at}: not a calibration of a run; {again}")
        if (schema := values.pop("schema", None)) != SCHEMA:
            raise ConfigError(f"{at}: has schema {schema!r}, and this Libra reads {SCHEMA}; {again}")
        found = replace(msgspec.convert(values, RunCalibration), source=str(path))
    except OSError as error:
        raise ConfigError(
            f"{at} cannot be read: {error.strerror or error}; write one with libra calibrate RUN --save FILE"
        ) from error
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{at}: cannot be read as a calibration ({error}); {again}") from error
    if not found.engines:
        raise ConfigError(f"{at}: has no engine; {again}")
    for engine in found.engines:
        steps = engine.steps
        coefficients = (steps.fixed_s, steps.sequence_s, steps.context_token_s)
        if not (
            min(engine.tp, engine.slots, engine.kv_tokens) >= 1 and engine.wall_over_passes > 0 < sum(coefficients)
        ):
            raise ConfigError(
                f"{at}: engine {engine.worker}: {engine}; tp, slots, kv_tokens, wall_over_passes and the sum of its seconds are "
                f"above 0; {again}"
            )
        _check_seconds(at, *coefficients, steps.prefill_token_s, engine.overhead)
    _check_seconds(at, found.update_s, found.load_s, found.gate_s, found.commit_s, found.tools)
    return found


def _check_seconds(where: str, *values: float | QuantumOverhead) -> None:
    for value in values:
        parts = (*value[0], *value[1], *value[2:]) if isinstance(value, QuantumOverhead) else (value,)
        if not all(0.0 <= part < float("inf") for part in parts):
            raise ConfigError(f"{where}: seconds {value}; finite, and not negative")


Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class RunTrainer:
    """Fitted seconds per training step and per token.

    ``error_frac`` is the mean |predicted / measured - 1| of the steps left out of the fit.
    """

    fixed_s: float
    token_s: float
    error_frac: float
    num_steps: int

    def step_s(self, tokens: float) -> float:
        """Seconds of a step over ``tokens`` tokens."""
        return self.fixed_s + self.token_s * tokens


def fit_trainer(seconds: ArrayLike, tokens: ArrayLike) -> RunTrainer | None:
    """The trainer fitted to these steps; None below four steps."""
    spent, num = np.asarray(seconds, float), np.asarray(tokens, float)
    if len(spent) < 4:
        return None
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


STEP = 1e-4
"""Finite difference in log constants; rooflines count whole tokens, so not smaller."""


def fit_positive(
    residuals: Callable[[Array], Array],
    start: Array,
    *,
    outlier: float = 0.1,
    tether: float = 0.0,
    ceiling: Array | None = None,
) -> Array:
    """Positive constants near ``start`` that minimise ``residuals`` under Huber's loss.

    ``residuals`` maps (p,) constants to (n,) residuals, usually log(predicted / measured); beyond
    ``outlier`` the loss is linear. ``tether`` is the penalty for moving one constant by a factor e,
    as a residual at every point, which keeps undetermined constants near ``start``. ``ceiling``
    (p,) are upper bounds.
    """
    from scipy.optimize import least_squares  # takes most of a second to import; only fits need it

    begin = np.log(np.asarray(start, float))
    top = np.full(len(begin), np.inf) if ceiling is None else np.log(np.asarray(ceiling, float))
    rope = tether * np.sqrt(len(residuals(np.exp(begin))))

    def tethered(logs: Array) -> Array:
        return np.concatenate([residuals(np.exp(logs)), rope * (logs - begin)])

    def slopes(logs: Array) -> Array:
        here = tethered(logs)
        return np.stack([(tethered(logs + moved) - here) / STEP for moved in STEP * np.eye(len(logs))], axis=1)

    found = least_squares(
        tethered, np.minimum(begin, top), slopes, bounds=(-np.inf, top), loss="huber", f_scale=outlier, x_scale="jac"
    )
    return np.asarray(np.exp(found.x))

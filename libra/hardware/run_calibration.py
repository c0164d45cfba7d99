"""A run's own hardware in numbers: its engines with capacity and seconds, its trainer, and what passes between them.

`libra calibrate RUN --save FILE` writes it as one JSON file, `simulation.calibration` and `planner.calibration` read it. `libra
simulate --from-run` makes it of the run itself. Where engines declared their seconds (`engine_declared`), these are taken; else
seconds are fitted to the run's generations (`libra.hardware.run_step_fit`), and ``declared`` says so.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from libra.errors import ConfigError
from libra.hardware.measured_engine import MeasuredEngine
from libra.hardware.run_step_fit import RunTrainer
from libra.types import StepSeconds

SCHEMA = 1
"""Layout of a calibration file."""
UNBOUNDED_TOKENS = 2**40
"""KV memory of an engine that did not say how much it has, where nothing else says it."""
KIND = "libra run calibration"
"""What a calibration file says that it is."""


@dataclass(frozen=True, slots=True)
class EngineOfRun:
    """One engine of a run.

    Attributes
    ----------
    worker, engine, bucket : str
        Its worker, its kind (``transformers``, ``vllm``) and its capacity class.
    tp, slots, kv_tokens : int
    steps : StepSeconds
    declared : bool
        The engine measured ``steps`` itself; else they are fitted to how long its generations took.
    wall_over_passes : float
        Wall seconds of its turns over those that ``steps`` explain.
    transport_s, worker_s : tuple of float
        Of a generation, to draw from: on the way to the worker and back, and on the worker around the engine.
    """

    worker: str
    engine: str
    bucket: str
    tp: int
    slots: int
    kv_tokens: int
    steps: StepSeconds
    declared: bool
    wall_over_passes: float = 1.0
    transport_s: tuple[float, ...] = (0.0,)
    worker_s: tuple[float, ...] = (0.0,)

    @property
    def seconds(self) -> MeasuredEngine:
        """As planner and simulator ask for it."""
        return MeasuredEngine(self.steps, self.tp, self.kv_tokens, self.wall_over_passes)

    @property
    def max_contexts(self) -> int | None:
        """Trajectories whose KV it holds at most: one a slot, or as many as fit."""
        return self.slots if self.engine == "transformers" else None


@dataclass(frozen=True, slots=True)
class RunCalibration:
    """Everything that a run says of its hardware.

    Attributes
    ----------
    model, digest : str
        The model that its engines serve, and the digest of its shape (`libra.hardware.shapes.shape_digest`; empty: not known).
    engines : tuple of EngineOfRun
    trainer : RunTrainer or None
        None: too few steps.
    train_gpus : int
        Replicas that took a step together.
    update_s, load_s : float
        Mean seconds from a step's end until its weights are published, and that an engine stands still to take them.
    tool_transport_s, tool_worker_s : tuple of float
        Of an action, as of a generation.
    gate_s, commit_s : float
        From a gate to its first trajectory, and from a group's last end to its record.
    source : str
        The run's directory.
    """

    model: str
    digest: str
    engines: tuple[EngineOfRun, ...]
    trainer: RunTrainer | None
    train_gpus: int = 1
    update_s: float = 0.0
    load_s: float = 0.0
    tool_transport_s: tuple[float, ...] = (0.0,)
    tool_worker_s: tuple[float, ...] = (0.0,)
    gate_s: float = 0.0
    commit_s: float = 0.0
    source: str = ""

    @property
    def degrees(self) -> tuple[int, ...]:
        """TP degrees that it has seconds of."""
        return tuple(sorted({engine.tp for engine in self.engines}))

    def of_tp(self, tp: int, where: str) -> EngineOfRun:
        """The engine of this degree; of several kinds the one that takes most at once, of those the one with most passes.

        ConfigError, which begins with ``where``, for a degree that the run had no engine of.
        """
        engines = [engine for engine in self.engines if engine.tp == tp]
        if not engines:
            known = ", ".join(f"tp{degree}" for degree in self.degrees)
            raise ConfigError(
                f"{where}: asks for engines of tp{tp}, and {self.source} measured {known} only; type "
                f"simulation.layout={{tp{self.degrees[0]}: 1}}, or calibrate from a run that has an engine of tp{tp}"
            )
        return max(engines, key=lambda engine: (engine.slots, engine.steps.num_steps, engine.worker))

    def check_model(self, model: str, digest: str, where: str) -> None:
        """ConfigError, which begins with ``where``, where seconds of another model are asked for."""
        if digest != self.digest if digest and self.digest else model != self.model:
            raise ConfigError(
                f"{where}: {self.source} measured engines of {self.model} (sizes {self.digest[:12] or 'unknown'}), and this "
                f"configuration has model.path={model} (sizes {digest[:12] or 'unknown'}); take the configuration of the former, "
                "or calibrate from a run of this model: libra calibrate RUN --save FILE"
            )

    def to_json(self) -> str:
        """One JSON object; see `read_calibration`."""
        return json.dumps({"kind": KIND, "schema": SCHEMA, **asdict(self)}, indent=1) + "\n"


def calibration_from_json(text: str, where: str) -> RunCalibration:
    """The calibration that a text describes.

    Raises
    ------
    ConfigError
        It is none, or of a schema that this Libra does not read.
    """
    again = "write it anew: libra calibrate RUN --save FILE"
    try:
        values = json.loads(text)
        if not isinstance(values, dict) or values.pop("kind", None) != KIND:
            raise ConfigError(f"{where}: is no calibration of a run; {again}")
        schema = values.pop("schema", None)
        if schema != SCHEMA:
            raise ConfigError(f"{where}: has schema {schema!r}, and this Libra reads {SCHEMA}; {again}")
        values |= {name: tuple(values[name]) for name in ("tool_transport_s", "tool_worker_s")}
        engines = tuple(_engine(one) for one in values.pop("engines"))
        trainer = values.pop("trainer")
        found = RunCalibration(engines=engines, trainer=None if trainer is None else RunTrainer(**trainer), **values)
    except (ValueError, TypeError, KeyError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"{where}: cannot be read as a calibration ({type(error).__name__}: {error}); {again}"
        ) from error
    _check(found, where, again)
    return found


def read_calibration(path: Path, where: str) -> RunCalibration:
    """Read a calibration file; ConfigError, which begins with ``where``, where it is none."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"{where}: {path} cannot be read: {reason}; write one with libra calibrate RUN --save FILE"
        ) from error
    return replace(calibration_from_json(text, f"{where}: {path}"), source=str(path))


def _engine(values: dict[str, Any]) -> EngineOfRun:
    between = {name: tuple(values[name]) for name in ("transport_s", "worker_s")}
    return EngineOfRun(**{**values, **between, "steps": StepSeconds(**values["steps"])})


def _check(found: RunCalibration, where: str, again: str) -> None:
    """ConfigError for numbers that no run can have given."""
    if not found.engines:
        raise ConfigError(f"{where}: has no engine; {again}")
    for engine in found.engines:
        steps = engine.steps
        coefficients = (steps.fixed_s, steps.sequence_s, steps.context_token_s, steps.prefill_token_s)
        whole = (engine.tp, engine.slots, engine.kv_tokens)
        if not _finite((*coefficients, *engine.transport_s, *engine.worker_s)) or not sum(coefficients[:3]) > 0.0:
            raise ConfigError(
                f"{where}: engine {engine.worker}: seconds {coefficients}; finite, not negative, and not all 0"
            )
        if min(whole) < 1 or not engine.wall_over_passes > 0.0:
            raise ConfigError(
                f"{where}: engine {engine.worker}: tp, slots, kv_tokens {whole} and wall_over_passes "
                f"{engine.wall_over_passes}; all are above 0"
            )
    tools = (*found.tool_transport_s, *found.tool_worker_s)
    others = (found.update_s, found.load_s, *tools, found.gate_s, found.commit_s)
    if not _finite(others):
        raise ConfigError(f"{where}: seconds {others}; finite, and not negative")


def _finite(seconds: Iterable[float]) -> bool:
    return all(0.0 <= value < float("inf") for value in seconds)

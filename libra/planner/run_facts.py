"""Constant facts of a run, and the seconds of engines of TP degrees that it never ran.

The seconds of a degree without measurements are those of a measured degree, times the ratio of both. The ratio is that of
the first source that has both degrees:

1. ``planner.calibration``: engines as another run measured them;
2. the datasheet that ``planner.gpu`` names, by the cost model;
3. without ``planner.gpu``, the datasheet of the GPU that the workers have, or that of `DEFAULT_GPU` if there is none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from libra.config import RunConfig
from libra.errors import ConfigError, ModelError
from libra.hardware import EngineSeconds, engine_seconds, known_gpus
from libra.hardware.run_calibration import read_calibration
from libra.hardware.shapes import shape_digest
from libra.planner.arrangements import MayHave
from libra.planner.from_calibration import FIELD
from libra.planner.from_config import DEFAULT_GPU, shape_of

Ratio = Callable[[int, int, float, float], tuple[float, str] | None]
"""(TP degree, other degree, sequences, context tokens of each) to the seconds of a pass on the other degree over those on the
first, and their source; None: no source has both."""


@dataclass(frozen=True, slots=True)
class RunFacts:
    """Constant facts of a run.

    Attributes
    ----------
    core_trainers : int
    overlap_steps : int
        ``run.eta``: steps that batches are generated ahead.
    batch_trajectories : int
    max_context_tokens : int
    may_have : callable
        See `libra.planner.arrangements.MayHave`.
    ratio : callable
        See `Ratio`.
    """

    core_trainers: int
    overlap_steps: int
    batch_trajectories: int
    max_context_tokens: int
    may_have: MayHave
    ratio: Ratio


def run_facts(config: RunConfig, workers_gpu: str = "") -> RunFacts:
    """The facts of a run of ``config`` on workers with this GPU (empty: none, or not known).

    Raises
    ------
    ConfigError
        ``planner.calibration`` cannot be read, or is of another model.
    """
    return RunFacts(
        config.cluster.train_workers,
        config.run.eta,
        config.trainer.prompts * config.trainer.group_size,
        config.rollout.max_context_tokens,
        lambda engine, tp: why_not(config, engine, tp),
        ratio_of(config, workers_gpu),
    )


def why_not(config: RunConfig, engine: str, tp: int) -> str:
    """Why engines of a kind cannot have a TP degree in a run of ``config``; empty: they can."""
    if tp > 1 and engine != "vllm":
        own = ":" in engine
        why = (
            "a plan does not change the degree of engines of your own"
            if own
            else "transformers engines have no tensor parallelism"
        )
        return f"rollout.engine=vllm, {why}"
    if tp not in config.planner.tp:
        return f"planner.tp with {tp} in it, it is {list(config.planner.tp)}"
    try:
        shape_of(config).check_tp(tp)
    except ConfigError as error:
        return f"another model: {error}"
    except ModelError:
        pass  # a model whose sizes the planner does not know: the engine will say
    return ""


def ratio_of(config: RunConfig, workers_gpu: str = "") -> Ratio:
    """The ratio between degrees, of the first source that has both; ConfigError as `run_facts`."""
    path, named = config.planner.calibration, config.planner.gpu
    calibration = None
    if path is not None:
        calibration = read_calibration(path, FIELD)
        try:
            digest = shape_digest(shape_of(config))
        except ModelError:
            digest = ""
        calibration.check_model(config.model.path, digest, FIELD)
    sheet = named or (workers_gpu if workers_gpu in known_gpus() else DEFAULT_GPU)

    @cache
    def modelled(tp: int) -> EngineSeconds | None:
        try:
            return engine_seconds(sheet, shape_of(config), tp)
        except (ConfigError, ModelError):
            return None  # no datasheet, no sizes, or the model cannot be cut so: the degree is weighed once it was measured

    def ratio(tp: int, other: int, sequences: float, context_tokens: float) -> tuple[float, str] | None:
        one: EngineSeconds | None
        two: EngineSeconds | None
        if calibration is not None and {tp, other} <= set(calibration.degrees):
            one, two = (calibration.of_tp(degree, FIELD).seconds for degree in (tp, other))
            source = f"what {path} measured"
        else:
            one, two, source = modelled(tp), modelled(other), f"the cost model of {sheet}"
        if one is None or two is None:
            return None
        at = max(round(sequences), 1)
        context = round(at * context_tokens)
        return two.decode_step_s(at, context) / one.decode_step_s(at, context), source

    return ratio

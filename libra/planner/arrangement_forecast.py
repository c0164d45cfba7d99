"""Predicted step time and KV demand of a run's last batch under another arrangement. Pure.

`TrainingForecast` predicts training. Rollout time is the run's measured rollout time, times the
ratio of simulated batch times (`libra.planner.drain`) on the other engines and on the present ones.
Without declared pass times, only measured tokens per second are compared, and slots stay as they
are. An unmeasured TP degree takes the pass times of a measured degree, times a ratio from the first
source that has both degrees:

1. ``planner.calibration``: engines measured in another run;
2. the cost model with the datasheet that ``planner.gpu`` names;
3. without ``planner.gpu``, the cost model with the datasheet of the workers' GPU, else of
   `DEFAULT_GPU`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np

from libra.config import RunConfig
from libra.errors import ConfigError, ModelError
from libra.hardware import EngineSeconds, engine_seconds, known_gpus
from libra.planner.arrangements import Arrangement, Engine, MayHave, Seat, arranged
from libra.planner.cost import TrajectoryTotals
from libra.planner.drain import EvaluatedEngine, rollout_seconds
from libra.planner.from_config import DEFAULT_GPU, FIELD, configured_calibration, shape_of
from libra.planner.step_forecast import Batch, ExpectedStep, StepForecast, TrainingForecast
from libra.types import EngineCapacity, StepSeconds

Ratio = Callable[[int, int, float, float], tuple[float, str] | None]
"""Function from (TP degree, other degree, sequences, context tokens per sequence) to the ratio of
the other degree's pass time to the first's, and its source; None without one."""
MAX_DEMAND = 0.9
"""Maximum KV share for the mean demand of an engine; single contexts vary around the mean."""


@dataclass(frozen=True, slots=True)
class RunFacts:
    """Constant facts of a run; ``overlap_steps`` is ``run.eta``, the batches generated ahead."""

    core_trainers: int
    overlap_steps: int
    batch_trajectories: int
    max_context_tokens: int
    may_have: MayHave
    ratio: Ratio


def run_facts(config: RunConfig, workers_gpu: str = "") -> RunFacts:
    """Facts of a run of ``config`` on workers with this GPU (empty: no GPU, or an unknown one).

    ConfigError if ``planner.calibration`` cannot be read, or is of another model.
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
    """What engines of this kind need before they can have this TP degree; empty if they can."""
    if tp > 1 and engine != "vllm":
        own, built_in = "a plan does not change the degree of engines of your own", "have no tensor parallelism"
        return f"rollout.engine=vllm, {own if ':' in engine else f'transformers engines {built_in}'}"
    if tp not in config.planner.tp:
        return f"planner.tp with {tp} in it, it is {list(config.planner.tp)}"
    try:
        shape_of(config).check_tp(tp)
    except ConfigError as error:
        return f"another model: {error}"
    except ModelError:
        pass  # sizes of the model are unknown here; the engine checks the degree when it starts
    return ""


def ratio_of(config: RunConfig, workers_gpu: str = "") -> Ratio:
    """Function for the pass-time ratio of two degrees; ConfigError as in `run_facts`."""
    calibration, named = configured_calibration(config), config.planner.gpu
    sheet = named or (workers_gpu if workers_gpu in known_gpus() else DEFAULT_GPU)

    @cache
    def modelled(tp: int) -> EngineSeconds | None:
        try:
            return engine_seconds(sheet, shape_of(config), tp)
        except (ConfigError, ModelError):
            return None  # no datasheet or sizes, or an impossible degree; it is compared once measured

    def ratio(tp: int, other: int, sequences: float, context_tokens: float) -> tuple[float, str] | None:
        one: EngineSeconds | None
        two: EngineSeconds | None
        if calibration is not None and {tp, other} <= set(calibration.degrees):
            one, two = (calibration.of_tp(degree, FIELD).seconds for degree in (tp, other))
            source = f"what {calibration.source} measured"
        else:
            one, two, source = modelled(tp), modelled(other), f"the cost model of {sheet}"
        if one is None or two is None:
            return None
        at = max(round(sequences), 1)
        context = round(at * context_tokens)
        return two.decode_step_s(at, context) / one.decode_step_s(at, context), source

    return ratio


@dataclass(frozen=True, slots=True)
class EndedIteration:
    """The facts of a finished iteration that replanning needs."""

    iteration: int
    seats: Collection[Seat]  # present rollout workers
    batch: Batch
    lengths: TrajectoryTotals | None  # None: neither memory nor TP degrees are compared
    step_s: float  # from end to end of an iteration, less evaluations
    remaining: int  # iterations left
    overlap: bool  # batches are generated during steps


@dataclass(frozen=True, slots=True)
class ArrangementScore:
    """Predicted step, KV demand and data source of an arrangement for the last batch."""

    arrangement: Arrangement
    expected: ExpectedStep | None  # None: unknown
    kv_demand: float  # of the engine with the highest demand
    basis: str  # source of the figures

    @property
    def step_s(self) -> float:
        """Seconds of the step; infinite if unknown."""
        return self.expected.step_s if self.expected is not None else float("inf")


@dataclass(slots=True)
class ArrangementForecast:
    """Predictions after one iteration, with a mean final context of ``context_tokens``."""

    run: RunFacts
    ended: EndedIteration
    forecast: StepForecast
    trainings: TrainingForecast
    context_tokens: float
    seats: dict[str, Seat] = field(init=False)
    now: Arrangement = field(init=False)
    evaluated: dict[tuple[Engine, ...], float | None] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.seats = {seat.name: seat for seat in self.ended.seats}
        self.now = arranged(self.ended.seats)

    def with_slots(self, options: Sequence[Arrangement]) -> list[Arrangement]:
        """Each option with its present slots, the most that KV holds, and 1/2 and 1/4 of those."""
        found: list[Arrangement] = []
        for option in options:
            fits = {engine.tp: self.holds(engine) for engine in option.engines}
            variants = [option, option.limited(fits)]
            if all(self.steps_of(engine)[0] is not None for engine in option.engines):
                variants += [option.limited({tp: max(1, fit >> power) for tp, fit in fits.items()}) for power in (1, 2)]
            found += [variant for variant in variants if variant not in found]
        return found

    def score(self, option: Arrangement) -> ArrangementScore:
        """Predicted step, largest KV demand of an engine, and data source of one option."""
        demand = max((self.demand(engine, option) for engine in option.engines), default=0.0)
        basis = "; ".join(dict.fromkeys(text for engine in option.engines if (text := self.steps_of(engine)[1])))
        return ArrangementScore(option, self.expected(option), demand, basis)

    # ---------------------------------------------------------------- memory

    def kv_tokens(self, engine: Engine) -> float:
        """KV capacity of an engine in tokens; infinite if unknown.

        An engine that never ran counts the sum over its workers: a lower bound, as it holds the
        weights only once.
        """
        if (declared := self.declared(engine)) is not None:
            return float(declared.kv_tokens) or float("inf")
        parts = [self.seats[name].declared.get(self.seats[name].tp) for name in engine.workers]
        return float(sum(part.kv_tokens for part in parts if part is not None)) if all(parts) else float("inf")

    def holds(self, engine: Engine) -> int:
        """Slots of an engine that fit into KV at the expected context, at most ``full_slots``."""
        room = MAX_DEMAND * self.kv_tokens(engine) / max(self.context_tokens, 1.0)
        return engine.full_slots if room >= engine.full_slots else max(1, int(room))

    def demand(self, engine: Engine, option: Arrangement) -> float:
        """Context tokens of the engine's concurrent trajectories, over its KV capacity."""
        flying = self.run.batch_trajectories * (self.run.overlap_steps + 1)
        share = flying * engine.slots / sum(each.slots for each in option.engines)
        return min(float(engine.slots), share) * self.context_tokens / self.kv_tokens(engine)

    # ---------------------------------------------------------------- seconds

    def expected(self, option: Arrangement) -> ExpectedStep | None:
        """Predicted step of the last batch under an arrangement; None if unknown."""
        batch, overlap = self.ended.batch, self.ended.overlap
        base = self.forecast.expected(self.now.by_kind, None, overlap, tokens=batch.generated_tokens)
        if base is None:
            return None
        rollout_s = base.rollout_s if option.engines == self.now.engines else self.rollout_s(option, base.rollout_s)
        if rollout_s is None:
            return None
        train_s = self.trainings.expected_s(batch.trained_tokens, self.run.core_trainers + len(option.training))
        return ExpectedStep.of(base.tokens, rollout_s, train_s, base.rest_s, overlap)

    def rollout_s(self, option: Arrangement, now_s: float) -> float | None:
        """Rollout seconds under another arrangement, if the present one takes ``now_s``."""
        there, here = self.evaluated_s(option.engines), self.evaluated_s(self.now.engines)
        if there is not None and here:
            return now_s * there / here
        measured = self.forecast.tokens_per_s()
        has = {engine.workers: engine.slots for engine in self.now.engines}
        # Measured tokens per second hold for the present slots of an engine.
        as_measured = all(has.get(engine.workers, engine.slots) == engine.slots for engine in option.engines)
        if not as_measured or any(measured.get(engine.kind, 0.0) <= 0 for engine in option.engines):
            return None
        tokens = self.ended.batch.generated_tokens
        found = self.forecast.expected(option.by_kind, None, self.ended.overlap, tokens=tokens)
        return None if found is None else found.rollout_s

    def evaluated_s(self, engines: tuple[Engine, ...]) -> float | None:
        """Simulated seconds of the last batch; None if an engine's pass times are unknown."""
        if engines not in self.evaluated:
            lengths, steps = self.ended.lengths, [(self.steps_of(engine)[0], engine) for engine in engines]
            these = [
                EvaluatedEngine(step, each.slots, self.kv_tokens(each)) for step, each in steps if step is not None
            ]
            known = bool(engines) and len(these) == len(engines)
            self.evaluated[engines] = rollout_seconds(lengths, these) if lengths is not None and known else None
        return self.evaluated[engines]

    def boundaries(self, option: Arrangement) -> dict[str, float]:
        """Maximum generated tokens for each TP degree but the largest, so that load matches throughput."""
        rates: dict[int, float] = {}
        for engine in option.engines:
            steps = self.steps_of(engine)[0]
            if steps is None:
                return {}
            pass_s = steps.step_s(engine.slots, engine.slots * self.context_tokens)
            rates[engine.tp] = rates.get(engine.tp, 0.0) + engine.slots / max(pass_s, 1e-9)
        if self.ended.lengths is None or len(rates) < 2:
            return {}
        lengths = np.sort(self.ended.lengths.generated_tokens)
        shares = np.cumsum(lengths) / lengths.sum()
        ends, so_far = {}, 0.0
        for tp in sorted(rates)[:-1]:
            so_far += rates[tp] / sum(rates.values())
            ends[f"tp{tp}"] = float(lengths[min(int(np.searchsorted(shares, so_far)), len(lengths) - 1)])
        return ends if len(set(ends.values())) == len(ends) else {}

    def declared(self, engine: Engine) -> EngineCapacity | None:
        """Declared capacity of an engine: by its leader, else by any worker of the same bucket."""
        lead = self.seats[engine.workers[0]]
        alike = [seat for seat in self.seats.values() if seat.bucket == lead.bucket]
        found = [seat.declared.get(engine.tp) for seat in (lead, *alike)]
        known = [capacity for capacity in found if capacity is not None and capacity.slots == engine.full_slots]
        return next((capacity for capacity in known if capacity.steps is not None), next(iter(known), None))

    def steps_of(self, engine: Engine) -> tuple[StepSeconds | None, str]:
        """Pass times of an engine, and their source if they were not measured."""
        declared = self.declared(engine)
        if declared is not None and declared.steps is not None:
            return declared.steps, ""
        lead = self.seats[engine.workers[0]]
        if engine.tp == lead.tp:
            return None, ""
        own = self.declared(Engine((lead.name,), "", lead.tp, lead.slots, lead.slots))
        if own is None or own.steps is None:
            return None, ""
        found = self.run.ratio(lead.tp, engine.tp, float(engine.slots), max(self.context_tokens, 1.0))
        if found is None:
            return None, ""
        (ratio, source), steps = found, own.steps
        scaled = StepSeconds(
            ratio * steps.fixed_s, ratio * steps.sequence_s, ratio * steps.context_token_s,
            ratio * steps.prefill_token_s, 0, steps.error_frac,
        )  # fmt: skip
        return scaled, f"TP {engine.tp} is not measured yet: TP {lead.tp} as measured, times {ratio:.2f} by {source}"

"""The step of a run's last batch in another arrangement of its workers, and the KV memory that the arrangement needs. Pure.

Training is predicted by `TrainingForecast`. Rollout is the measured line of what runs (`libra.planner.measured_step`), times the
ratio of the batch's seconds on the option's engines to those on the present ones; both are evaluated (`libra.planner.evaluate`)
with the seconds that engines have declared. A degree that was never measured takes those of the degree that was, times the ratio of
`libra.planner.run_facts`; ``basis`` names its source. If no engine has declared seconds, only the measured tokens per
second are compared, and only splits are options.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from libra.planner.arrangements import Arrangement, Engine, Seat, arranged
from libra.planner.cost import TrajectoryTotals
from libra.planner.evaluate import EvaluatedEngine, rollout_seconds
from libra.planner.kv_memory import MAX_DEMAND, Fit
from libra.planner.measured_step import ExpectedStep, StepForecast
from libra.planner.run_facts import RunFacts
from libra.planner.split_forecast import Batch, TrainingForecast
from libra.types import EngineCapacity, StepSeconds


@dataclass(frozen=True, slots=True)
class EndedIteration:
    """The facts of a finished iteration that replanning needs.

    Attributes
    ----------
    iteration : int
    seats : collection of Seat
        The rollout workers as they are now.
    batch : Batch
        What the iteration generated, and trained on.
    lengths : TrajectoryTotals or None
        Its trajectories; None: not known, then neither memory nor degrees are compared.
    step_s : float
        From end to end, evaluations left out.
    remaining : int
        Iterations to come.
    overlap : bool
        Whether batches are generated while steps are taken.
    """

    iteration: int
    seats: Collection[Seat]
    batch: Batch
    lengths: TrajectoryTotals | None
    step_s: float
    remaining: int
    overlap: bool


@dataclass(frozen=True, slots=True)
class ArrangementScore:
    """An option: its step for the last batch (None: not known), its demand on the fullest KV, and the source of the
    figures."""

    arrangement: Arrangement
    expected: ExpectedStep | None
    kv_demand: float
    basis: str

    @property
    def fit(self) -> Fit:
        """For `libra.planner.kv_memory.refuge`; an option with an unknown step comes last."""
        return Fit(self.expected.step_s if self.expected is not None else float("inf"), self.kv_demand)


@dataclass(slots=True)
class ArrangementForecast:
    """Predicts the options after one iteration, at the mean context of ``context_tokens`` at a trajectory's end."""

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
        """Each option with its present slots, with as many as KV memory holds, and with halves of that."""
        found: list[Arrangement] = []
        for option in options:
            fits = {engine.tp: self.holds(engine) for engine in option.engines}
            variants = [option, option.limited(fits)]
            if all(self.steps_of(engine)[0] is not None for engine in option.engines):
                variants += [option.limited({tp: max(1, fit >> power) for tp, fit in fits.items()}) for power in (1, 2)]
            found += [variant for variant in variants if variant not in found]
        return found

    def score(self, option: Arrangement) -> ArrangementScore:
        """The step, the memory and the basis of one option."""
        demand = max((self.demand(engine, option) for engine in option.engines), default=0.0)
        basis = "; ".join(dict.fromkeys(text for engine in option.engines if (text := self.steps_of(engine)[1])))
        return ArrangementScore(option, self.expected(option), demand, basis)

    # ---------------------------------------------------------------- memory

    def kv_tokens(self, engine: Engine) -> float:
        """Tokens of KV that an engine holds, as declared; of one that never ran, the sum of its workers'; infinite: not known.

        Twice the GPUs hold both KV caches, and the weights only once: at least the sum.
        """
        if (declared := self.declared(engine)) is not None:
            return float(declared.kv_tokens) or float("inf")
        parts = [self.seats[name].declared.get(self.seats[name].tp) for name in engine.workers]
        return float(sum(part.kv_tokens for part in parts if part is not None)) if all(parts) else float("inf")

    def holds(self, engine: Engine) -> int:
        """Slots of an engine that its KV holds at the expected context; at most all it has."""
        room = MAX_DEMAND * self.kv_tokens(engine) / max(self.context_tokens, 1.0)
        return engine.full_slots if room >= engine.full_slots else max(1, int(room))

    def demand(self, engine: Engine, option: Arrangement) -> float:
        """Context tokens of the trajectories that it generates for at once, over its KV."""
        flying = self.run.batch_trajectories * (self.run.overlap_steps + 1)
        share = flying * engine.slots / sum(each.slots for each in option.engines)
        return min(float(engine.slots), share) * self.context_tokens / self.kv_tokens(engine)

    # ---------------------------------------------------------------- seconds

    def expected(self, option: Arrangement) -> ExpectedStep | None:
        """The step of this batch in an arrangement; None if it cannot be predicted."""
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
        """Seconds of rollout in another arrangement, given that the present one takes ``now_s``."""
        there, here = self.evaluated_s(option.engines), self.evaluated_s(self.now.engines)
        if there is not None and here:
            return now_s * there / here
        measured = self.forecast.tokens_per_s()
        has = {engine.workers: engine.slots for engine in self.now.engines}
        # Measured tokens per second are those of an engine's present slots.
        as_measured = all(has.get(engine.workers, engine.slots) == engine.slots for engine in option.engines)
        if not as_measured or any(measured.get(engine.kind, 0.0) <= 0 for engine in option.engines):
            return None
        tokens = self.ended.batch.generated_tokens
        found = self.forecast.expected(option.by_kind, None, self.ended.overlap, tokens=tokens)
        return None if found is None else found.rollout_s

    def evaluated_s(self, engines: tuple[Engine, ...]) -> float | None:
        """Seconds of this batch on these engines; None if the passes of one are not known."""
        if engines not in self.evaluated:
            steps = [self.steps_of(engine)[0] for engine in engines]
            known = [step for step in steps if step is not None]
            if self.ended.lengths is None or not engines or len(known) < len(steps):
                self.evaluated[engines] = None
            else:
                pairs = zip(known, engines, strict=True)
                these = [EvaluatedEngine(step, engine.slots, self.kv_tokens(engine)) for step, engine in pairs]
                self.evaluated[engines] = rollout_seconds(self.ended.lengths, these)
        return self.evaluated[engines]

    def boundaries(self, option: Arrangement) -> dict[str, float]:
        """Lengths that divide the batch's tokens by what engines of each degree generate, the longest to the largest degree."""
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
        """What an engine of this kind has declared: first its own leader, then any other."""
        lead = self.seats[engine.workers[0]]
        alike = [seat for seat in self.seats.values() if seat.bucket == lead.bucket]
        found = [seat.declared.get(engine.tp) for seat in (lead, *alike)]
        known = [capacity for capacity in found if capacity is not None and capacity.slots == engine.full_slots]
        return next((capacity for capacity in known if capacity.steps is not None), next(iter(known), None))

    def steps_of(self, engine: Engine) -> tuple[StepSeconds | None, str]:
        """Seconds of an engine's passes, and their source if they were not measured."""
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

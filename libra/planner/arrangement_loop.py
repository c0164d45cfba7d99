"""What a run's workers should do, weighed after each iteration from what this run itself has measured. Pure.

Options are (hybrids that train) x (engines of two workers of a node) x (slots), `libra.planner.arrangements`. The step of each is
predicted for the batch that just came: its training by `TrainingForecast`, its rollout by the measured line of what runs
(`libra.planner.measured_step`) times what the batch takes on the option's engines over what it takes on those that run. Both are
played
(`libra.planner.evaluate`) by the seconds that engines have declared. Of a degree that was never measured they are those of the
degree that was, times the ratio of both in the cost model; ``basis`` says so. Where nothing is declared, only the measured tokens
per second are compared, and only splits are options.

1. An option that would run out of KV memory is not chosen. Where what runs would, in an iteration that can still be helped, it is
   left at once, whatever that gains or costs (EARL's rule, `libra.planner.selector.refuge`): for the quickest option that holds the
   context expected then, fewer slots or a larger degree.
2. Else the quickest option is weighed by `libra.planner.replan`, hysteresis and prices included.
3. What would be worth a change and cannot be had is named (`SplitDecision.blocked`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from libra.planner.arrangements import (
    Arrangement,
    Engine,
    MayHave,
    Seat,
    arranged,
    arrangements,
    blocked,
    kind_of,
    kinds_of_change,
)
from libra.planner.cost import Workload
from libra.planner.evaluate import PlayedEngine, played_s
from libra.planner.hybrid_splits import Batch, Hybrid, MeasuredFleet, SplitLoop
from libra.planner.measured_step import ExpectedStep, StepForecast
from libra.planner.proposal import MIXED_MARGIN_FRAC
from libra.planner.replan import Considered, Replanner, Rules
from libra.planner.selector import MAX_DEMAND, RAISED_DEMAND, ContextTrend, Fit, refuge
from libra.types import EngineCapacity, StepSeconds

Ratio = Callable[[int, int, float, float], float | None]
"""How many times as long a pass takes on one degree as on another, by the cost model: (from, to, sequences, context of each);
None: it does not know."""


@dataclass(frozen=True, slots=True)
class Run:
    """What does not change while a run goes on.

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
    model_name : str
        What that ratio is of, for people.
    """

    core_trainers: int
    overlap_steps: int
    batch_trajectories: int
    max_context_tokens: int
    may_have: MayHave
    ratio: Ratio
    model_name: str = "the cost model"


@dataclass(frozen=True, slots=True)
class ArrangementScore:
    """An option: its step for the batch that was (None: not known), its demand on the fullest KV, and what that rests on."""

    arrangement: Arrangement
    expected: ExpectedStep | None
    kv_demand: float
    basis: str

    @property
    def fit(self) -> Fit:
        """As the selector sees it; what nothing is known of comes last."""
        return Fit(self.expected.step_s if self.expected is not None else float("inf"), self.kv_demand)


@dataclass(frozen=True, slots=True)
class SplitDecision:
    """What came of an iteration.

    Attributes
    ----------
    considered : Considered
    now, chosen : Judged
        What runs, and what should: the same where nothing was accepted.
    context_tokens : float
        Mean context expected of the iteration that a change made now is in time for.
    kinds : tuple of str
        Of the change; empty where nothing was accepted.
    boundaries_tokens : mapping of "tp1", "tp2", ... to tokens
        Lengths meant for each degree of what should run but the largest; empty: it has one degree, or nothing is known.
    blocked : tuple of (Judged, gain as a share of the step)
        What would be worth a change and cannot be had.
    options : tuple of Judged
    """

    considered: Considered
    now: ArrangementScore
    chosen: ArrangementScore
    context_tokens: float
    kinds: tuple[str, ...]
    boundaries_tokens: Mapping[str, float]
    blocked: tuple[tuple[ArrangementScore, float], ...]
    options: tuple[ArrangementScore, ...]


@dataclass(slots=True)
class ArrangementLoop:
    """What is known of a run's arrangements between iterations."""

    run: Run
    rules: Rules = field(default_factory=Rules)
    splits: SplitLoop = field(default_factory=SplitLoop)
    trend: ContextTrend = field(default_factory=ContextTrend)
    replanner: Replanner | None = None

    def learn(
        self,
        forecast: StepForecast,
        seats: Collection[Seat],
        batch: Batch,
        replicas: int,
        train_s: float,
        step_s: float,
        overlap: bool,
    ) -> None:
        """Hear of an iteration that was run by these seats from end to end; as `SplitLoop.learn`."""
        self.splits.learn(forecast, fleet_of(seats, self.run.core_trainers), batch, replicas, train_s, step_s, overlap)

    def saw(self, iteration: int, lengths: Workload | None) -> None:
        """Hear of the contexts that an iteration came to."""
        if lengths is not None:
            self.trend = self.trend.after(iteration, float(lengths.final_context_tokens.mean()))

    def weigh(
        self,
        iteration: int,
        forecast: StepForecast,
        seats: Collection[Seat],
        batch: Batch,
        lengths: Workload | None,
        remaining: int,
        overlap: bool,
        realised_step_s: float,
    ) -> SplitDecision | None:
        """Weigh every other arrangement against what runs; None while nothing can be said of what runs.

        Parameters
        ----------
        iteration : int
            The one that has ended.
        forecast : StepForecast
            With it.
        seats : collection of Seat
        batch : Batch
            What it generated, and was trained on.
        lengths : Workload or None
            Its trajectories; None: not known, then neither memory nor degrees are weighed.
        remaining : int
            Iterations to come.
        overlap : bool
            Whether batches are generated while steps are taken.
        realised_step_s : float
            Of the iteration; stands for what runs where that cannot be predicted yet, and memory decides.
        """
        context = self.expected_context(iteration)
        judge = _Judge(self, {seat.name: seat for seat in seats}, forecast, batch, lengths, overlap, context)
        present = arranged(seats)
        if not present.engines:
            return None
        now = judge.of(present)
        options = [judge.of(option) for option in judge.with_slots(arrangements(seats, self.run.may_have))]
        self.replanner = self.replanner or Replanner(present.deployed(self.run.core_trainers), self.rules)
        self.replanner.deployed = present.deployed(self.run.core_trainers)
        best, decisive = self._best(now, options, context, iteration)
        if now.expected is None and not decisive:
            return None
        kinds = kinds_of_change(present, best.arrangement)
        now_s = now.expected.step_s if now.expected is not None else realised_step_s
        considered = self.replanner.weigh(
            iteration,
            now_s,
            best.arrangement.deployed(self.run.core_trainers),
            best.expected.step_s if best.expected is not None else now_s,
            remaining,
            self.splits.noise_frac,
            kinds=kinds,
            decisive=decisive,
        )
        if considered.accepted and best.basis:
            considered = replace(considered, reason=f"{considered.reason}; {best.basis}")
        cannot = tuple(self._cannot(judge, seats, now, best, considered.required_gain_frac))
        accepted = considered.accepted
        chosen, kinds = (best, kinds) if accepted else (now, ())
        boundaries = judge.boundaries(chosen.arrangement)
        return SplitDecision(considered, now, chosen, context, kinds, boundaries, cannot, tuple(options))

    def expected(
        self,
        forecast: StepForecast,
        seats: Collection[Seat],
        option: Arrangement,
        batch: Batch,
        lengths: Workload | None,
        overlap: bool,
    ) -> ExpectedStep | None:
        """The step of a batch in an arrangement, by what is known of the seats as they are; None where that cannot be said."""
        by_name = {seat.name: seat for seat in seats}
        if not {name for engine in option.engines for name in engine.workers} <= by_name.keys():
            return None  # a worker of it is gone
        context = float(lengths.final_context_tokens.mean()) if lengths is not None else 0.0
        return _Judge(self, by_name, forecast, batch, lengths, overlap, context).expected(option)

    def expected_context(self, iteration: int) -> float:
        """Mean context of the last iteration that may begin before a change made after ``iteration`` has taken hold."""
        return min(self.trend.expected(iteration + 2 + self.run.overlap_steps), float(self.run.max_context_tokens))

    def _best(
        self, now: ArrangementScore, options: Sequence[ArrangementScore], context: float, iteration: int
    ) -> tuple[ArrangementScore, str]:
        """The option to weigh, and why it is to be taken whatever it gains; empty: it is not."""
        found = refuge(now.fit, {at: option.fit for at, option in enumerate(options)}, MAX_DEMAND)
        if found is not None:
            best = options[found]
            reason = (
                f"KV memory: {now.arrangement.shown} would need {now.kv_demand:.2f} of its KV at the {context:,.0f} tokens of "
                f"context expected in iteration {iteration + 2 + self.run.overlap_steps}; {best.arrangement.shown} "
                f"needs {best.kv_demand:.2f}"
            )
            return best, reason
        known = [
            option
            for option in options
            if option.expected is not None and option.kv_demand <= max(RAISED_DEMAND, now.kv_demand)
        ]

        def rank(option: ArrangementScore) -> tuple[float, int]:
            mixed = len({engine.tp for engine in option.arrangement.engines}) > 1
            stays = option.arrangement.engines == now.arrangement.engines
            margin = 1.0 if stays or not mixed else 1.0 / (1.0 - MIXED_MARGIN_FRAC)
            return margin * option.fit.slowness, len(kinds_of_change(now.arrangement, option.arrangement))

        best = min(known, key=rank, default=now)
        return (best, "") if now.expected is None or best.fit.slowness < now.fit.slowness else (now, "")

    def _cannot(
        self, judge: _Judge, seats: Collection[Seat], now: ArrangementScore, best: ArrangementScore, required: float
    ) -> Iterator[tuple[ArrangementScore, float]]:
        """What would be better than the best that can be had by what is required, or hold what nothing else does."""
        for option in map(judge.of, blocked(seats, self.run.may_have)):
            helps = best.kv_demand > MAX_DEMAND and option.kv_demand < best.kv_demand
            if now.expected is None or option.expected is None:
                gain = 0.0
            else:
                gain = (best.fit.slowness - option.fit.slowness) / now.expected.step_s
            lead = {seat.name: seat.engine for seat in seats}
            never = any(self.run.may_have(lead[e.workers[0]], e.tp) for e in option.arrangement.engines)
            if helps or (gain > required and option.kv_demand <= MAX_DEMAND and not never):
                yield option, gain


@dataclass(slots=True)
class _Judge:
    """Judges the options of one iteration."""

    loop: ArrangementLoop
    seats: Mapping[str, Seat]
    forecast: StepForecast
    batch: Batch
    lengths: Workload | None
    overlap: bool
    context_tokens: float
    played: dict[tuple[Engine, ...], float | None] = field(default_factory=dict)

    def with_slots(self, options: Sequence[Arrangement]) -> list[Arrangement]:
        """Each option with the slots it may use now, with as many as KV memory holds, and with halves of that."""
        found: list[Arrangement] = []
        for option in options:
            fits = {engine.tp: self.holds(engine) for engine in option.engines}
            variants = [option, option.limited(fits)]
            if all(self.steps_of(engine)[0] is not None for engine in option.engines):
                variants += [option.limited({tp: max(1, fit >> power) for tp, fit in fits.items()}) for power in (1, 2)]
            found += [variant for variant in variants if variant not in found]
        return found

    def of(self, option: Arrangement) -> ArrangementScore:
        """Judge one."""
        demand = max((self.demand(engine, option) for engine in option.engines), default=0.0)
        return ArrangementScore(option, self.expected(option), demand, self.basis(option))

    # ---------------------------------------------------------------- memory

    def kv_tokens(self, engine: Engine) -> float:
        """Tokens of KV that an engine holds: what was declared; of one that was never there, those of its workers together."""
        if (declared := self.declared(engine)) is not None:
            return float(declared.kv_tokens) or float("inf")
        parts = [self.seats[name].declared.get(self.seats[name].tp) for name in engine.workers]
        # Twice the GPUs hold their two KV caches, and the weights once: at least the sum.
        return float(sum(part.kv_tokens for part in parts if part is not None)) if all(parts) else float("inf")

    def holds(self, engine: Engine) -> int:
        """Slots of an engine that its KV holds at the context to come, all it has at most."""
        room = MAX_DEMAND * self.kv_tokens(engine) / max(self.context_tokens, 1.0)
        return engine.full_slots if room >= engine.full_slots else max(1, int(room))

    def demand(self, engine: Engine, option: Arrangement) -> float:
        """Tokens of the trajectories that it generates for at once, at the context to come, over its KV."""
        flying = self.loop.run.batch_trajectories * (self.loop.run.overlap_steps + 1)
        share = flying * engine.slots / sum(each.slots for each in option.engines)
        return min(float(engine.slots), share) * self.context_tokens / self.kv_tokens(engine)

    # ---------------------------------------------------------------- seconds

    def expected(self, option: Arrangement) -> ExpectedStep | None:
        """The step of this batch in an arrangement; None where that cannot be said."""
        loop, now = self.loop, arranged(list(self.seats.values()))
        base = self.forecast.expected(now.by_kind, None, self.overlap, tokens=self.batch.generated_tokens)
        if base is None:
            return None
        rollout_s: float | None = base.rollout_s
        if option.engines != now.engines:
            rollout_s = self.rollout_s(option, now, base.rollout_s)
        if rollout_s is None:
            return None
        replicas = loop.run.core_trainers + len(option.training)
        train_s = loop.splits.trainings.expected_s(self.batch.trained_tokens, replicas)
        waits_s = train_s + base.rest_s
        step_s = max(rollout_s, waits_s) if self.overlap else rollout_s + waits_s
        return ExpectedStep(base.tokens, rollout_s, train_s, base.rest_s, step_s)

    def rollout_s(self, option: Arrangement, now: Arrangement, now_s: float) -> float | None:
        """Seconds of rollout in an arrangement, where those in the present one are ``now_s``."""
        played, present = self.play(option.engines), self.play(now.engines)
        if played is not None and present:
            return now_s * played / present
        measured = self.forecast.tokens_per_s()
        if any(measured.get(engine.kind, 0.0) <= 0 for engine in option.engines) or not _as_measured(option, now):
            return None
        found = self.forecast.expected(option.by_kind, None, self.overlap, tokens=self.batch.generated_tokens)
        return None if found is None else found.rollout_s

    def play(self, engines: tuple[Engine, ...]) -> float | None:
        """Seconds of this batch on these engines; None where the passes of one are not known."""
        if engines not in self.played:
            steps = [self.steps_of(engine)[0] for engine in engines]
            known = [step for step in steps if step is not None]
            if self.lengths is None or not engines or len(known) < len(steps):
                self.played[engines] = None
            else:
                pairs = zip(known, engines, strict=True)
                these = [PlayedEngine(step, engine.slots, self.kv_tokens(engine)) for step, engine in pairs]
                self.played[engines] = played_s(self.lengths, these)
        return self.played[engines]

    def boundaries(self, option: Arrangement) -> dict[str, float]:
        """Lengths that share out the tokens of the batch by what engines of each degree generate, the longest to the largest."""
        rates: dict[int, float] = {}
        for engine in option.engines:
            steps = self.steps_of(engine)[0]
            if steps is None:
                return {}
            pass_s = steps.step_s(engine.slots, engine.slots * self.context_tokens)
            rates[engine.tp] = rates.get(engine.tp, 0.0) + engine.slots / max(pass_s, 1e-9)
        if self.lengths is None or len(rates) < 2:
            return {}
        lengths = np.sort(self.lengths.generated_tokens)
        shares = np.cumsum(lengths) / lengths.sum()
        ends, so_far = {}, 0.0
        for tp in sorted(rates)[:-1]:
            so_far += rates[tp] / sum(rates.values())
            ends[f"tp{tp}"] = float(lengths[min(int(np.searchsorted(shares, so_far)), len(lengths) - 1)])
        return ends if len(set(ends.values())) == len(ends) else {}

    def declared(self, engine: Engine) -> EngineCapacity | None:
        """What an engine of this kind has declared: its own leader's word first, then that of any other."""
        lead = self.seats[engine.workers[0]]
        alike = [seat for seat in self.seats.values() if seat.bucket == lead.bucket]
        found = [seat.declared.get(engine.tp) for seat in (lead, *alike)]
        known = [capacity for capacity in found if capacity is not None and capacity.slots == engine.full_slots]
        return next((capacity for capacity in known if capacity.steps is not None), next(iter(known), None))

    def steps_of(self, engine: Engine) -> tuple[StepSeconds | None, str]:
        """Seconds of an engine's passes, and where they are from where they were not measured."""
        declared = self.declared(engine)
        if declared is not None and declared.steps is not None:
            return declared.steps, ""
        lead = self.seats[engine.workers[0]]
        alone = Engine((lead.name,), "", lead.tp, lead.slots, lead.slots)
        if engine.tp == lead.tp:
            return None, ""
        own = self.declared(alone)
        if own is None or own.steps is None:
            return None, ""
        ratio = self.loop.run.ratio(lead.tp, engine.tp, float(engine.slots), max(self.context_tokens, 1.0))
        if ratio is None:
            return None, ""
        steps = own.steps
        scaled = StepSeconds(
            ratio * steps.fixed_s, ratio * steps.sequence_s, ratio * steps.context_token_s,
            ratio * steps.prefill_token_s, 0, steps.error_frac,
        )  # fmt: skip
        basis = f"TP {engine.tp} is not measured yet: TP {lead.tp} as measured, times {ratio:.2f} by {self.loop.run.model_name}"
        return scaled, basis

    def basis(self, option: Arrangement) -> str:
        """What its seconds rest on beside measurement; empty: on nothing."""
        return "; ".join(dict.fromkeys(said for engine in option.engines if (said := self.steps_of(engine)[1])))


def _as_measured(option: Arrangement, now: Arrangement) -> bool:
    """Whether no engine of an option has other slots than now, so that its measured tokens per second are its own."""
    has = {engine.workers: engine.slots for engine in now.engines}
    return all(has.get(engine.workers, engine.slots) == engine.slots for engine in option.engines)


def fleet_of(seats: Collection[Seat], core_trainers: int) -> MeasuredFleet:
    """The seats as `SplitLoop` knows them: engines that never change, by kind, and hybrids."""
    now = {engine.workers[0]: engine.kind for engine in arranged(seats).engines}
    alone = {seat.name: kind_of(seat.bucket, seat.tp, seat.tp, seat.slots) for seat in seats}
    fixed: dict[str, int] = {}
    hybrids = []
    for seat in seats:
        if seat.role == "lent":
            continue
        kind = now.get(seat.name, alone[seat.name])
        if seat.may_change:
            hybrids.append(Hybrid(seat.name, kind, seat.role == "train", seat.residents))
        else:
            fixed[kind] = fixed.get(kind, 0) + 1
    return MeasuredFleet(fixed, hybrids, core_trainers)

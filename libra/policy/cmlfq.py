"""C-MLFQ: a multi-level feedback queue over trajectories, by forecasts of their remaining length.

The order is (iteration deadline, level, order); levels are classes of remaining length. *makespan*
shortens the iteration: running trajectories go first, by arrival, then one probe of each unknown
group (Seer), then the longest forecast. If engines exchange KV, probes go first, then most tokens
left in octaves, then fewest generated. *stream* completes groups one by one: fewest tokens left in
the group first. Forecasts without skill are replaced by arrival (makespan) or least attained service
(stream). See `docs/adr/0008`.

Invariants
----------
1. An earlier iteration always goes before a later iteration.
2. No trajectory starves: `libra.policy.trajectory_table` bounds the wait (level -1: overdue).
3. Whenever a forecast changes by a length class, C-MLFQ answers with a `Prefer`: the forecast, and
   the engine degree planned for it (`BoundariesSet`). `libra.policy.dispatcher` places it.
4. ``restore(snapshot())`` changes no later answer.

Differs from the paper (Libra, arXiv:2606.03077 v2, C-MLFQ): levels order one queue instead of being
queues of servers, lengths are not fixed, moves have a cost, and waiting is bounded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from libra import facts
from libra.policy.posterior.forecaster import CalibrationLog, Forecast, Posterior
from libra.policy.saved import Saved
from libra.policy.trajectory_table import (
    NUM_CLASSES,
    OVERDUE,
    PATIENCE,
    StarvationGuard,
    TrajectoryStats,
    TrajectoryTable,
    length_class,
    overdue_first,
)
from libra.types import Phase

Answers = tuple[facts.SetPriority | facts.Prefer, ...]
Objective = Literal["makespan", "stream"]
UNTRUSTED = 0.0  # skill up to which forecasts are not used for the order
RECONSIDERED_AT_END = 16  # waiting ones, besides siblings, re-evaluated when one ends
UNDER_WAY, UNBEGUN = 1, 1 + NUM_CLASSES  # level of running ones, first level of waiting ones


class CMLFQ(Saved):
    """Libra's ordering; ``patience`` is the starvation bound, in parkings."""

    name: ClassVar[str] = "cmlfq"
    objective: Objective
    _guard: StarvationGuard
    _trajectories: TrajectoryTable
    _groups: dict[str, list[float]]  # arrival, tokens left and running members
    _unbegun: dict[str, dict[str, None]]  # by group, those that wait for their first slot
    _sampled_tokens: int
    _read_tokens: int
    _pauses: bool  # whether a pause costs little: engines exchange KV
    _boundaries: tuple[tuple[int, float], ...]
    forecaster: Posterior

    def __init__(
        self, forecaster: Posterior | None = None, *, objective: Objective = "makespan", patience: int = PATIENCE
    ) -> None:
        if objective not in ("makespan", "stream"):
            raise ValueError(f"objective: got {objective!r}; allowed are 'makespan' and 'stream'")
        super().__init__()
        self.forecaster = Posterior() if forecaster is None else forecaster
        self.objective = objective
        self._trajectories, self._guard = TrajectoryTable(), StarvationGuard(patience)
        self._calibration = CalibrationLog()

    def handle(self, event: facts.Fact) -> Answers:
        self.forecaster.handle(event)
        stats = self._trajectories.handle(event)
        match event:
            case facts.WorkerCapacity(rollout_slots=slots, kv_token_bytes=token_bytes) if slots:
                self._pauses = token_bytes > 0 and self.objective == "makespan"
            case facts.TrajectoryParked(key=key, phase=phase):
                assert stats is not None
                return self._parked(key, stats, self._guard.parked(key, phase))
            case facts.QuantumStarted(key=key):
                self._guard.left(key)
                if (known := self._trajectories.by_key.get(key)) is not None:
                    self._begun(key, known.group)
                if type(event) is facts.QuantumContinued:
                    return self._continued(key)
            case facts.QuantumFinished(tokens=tokens, payload_tokens=payload):
                self._sampled_tokens += tokens
                self._read_tokens += payload
            case facts.TrajectoryEnded(key=key, completed=completed):
                self._guard.left(key)
                self._calibration.ended(key, stats.generated_tokens if stats is not None else 0, completed=completed)
                if stats is not None:
                    self._begun(key, stats.group)
                    self._ended(stats)
                    siblings = self._unbegun.get(stats.group, ())
                    return self._reconsider(list(dict.fromkeys([*siblings, *self._next_reconsidered()])))
            case facts.BoundariesSet(boundaries=boundaries):
                self._boundaries = boundaries
                return self._prefer_again()
        return ()

    def learn(self) -> None:
        self.forecaster.learn()

    def forget_live(self) -> None:
        """Forget all unfinished trajectories: their keys differ after a restart."""
        for key in list(self._trajectories.by_key):
            self.handle(facts.TrajectoryEnded(key, completed=False))
        self._boundaries = ()  # of the previous layout

    def _parked(self, key: str, stats: TrajectoryStats, overdue: list[tuple[str, int]]) -> Answers:
        waits_to_begin = stats.phase is Phase.ROLLOUT and not stats.generated_tokens
        if waits_to_begin:
            self._unbegun.setdefault(stats.group, {})[key] = None
        forecast = self.forecaster.remaining(key)
        mean, trusted = forecast.mean_tokens, forecast.skill > UNTRUSTED
        self._calibration.forecast(key, stats.generated_tokens, stats.generated_tokens + mean)
        answers: list[facts.SetPriority | facts.Prefer] = [
            self._placed(key, stats, *self._ranked(key, stats, forecast))
        ]
        if stats.phase is Phase.ROLLOUT:
            answers += self._prefer(key, stats, mean)
        for late, _ in overdue:
            self._trajectories.by_key[late].level = OVERDUE
        answers += overdue_first(overdue, self._trajectories)
        if not waits_to_begin and trusted:
            total = length_class(stats.generated_tokens + mean)
            if total != stats.total_class:
                stats.total_class = total
                if stats.group:
                    answers += self._reconsider(list(self._unbegun.get(stats.group, ())))
        return tuple(answers)

    def _continued(self, key: str) -> tuple[facts.SetPriority, ...]:
        stats = self._trajectories.by_key.get(key)
        always_first = self.objective == "makespan" and not self._pauses
        if stats is None or (always_first and stats.level == UNDER_WAY):
            return ()
        rank = self._ranked(key, stats, self.forecaster.remaining(key))
        return () if rank[0] == stats.level else (self._placed(key, stats, *rank),)

    def _next_reconsidered(self) -> list[str]:
        keys: list[str] = []
        while self._unbegun and len(keys) < RECONSIDERED_AT_END:
            group = next(iter(self._unbegun))
            waiting = self._unbegun[group] = self._unbegun.pop(group)  # to the end of the queue
            if keys and next(iter(waiting)) == keys[0]:
                break
            keys += waiting
        return keys

    def _reconsider(self, keys: list[str]) -> Answers:
        answers: list[facts.SetPriority | facts.Prefer] = []
        for key in keys:
            other = self._trajectories.by_key[key]
            if other.level == OVERDUE:
                continue
            forecast = self.forecaster.reconsidered(key)
            rank = self._ranked(key, other, forecast)
            if rank[0] != other.level:
                answers += [self._placed(key, other, *rank), *self._prefer(key, other, forecast.mean_tokens)]
        return tuple(answers)

    def _ranked(self, key: str, stats: TrajectoryStats, forecast: Forecast) -> tuple[int, str, bool]:
        trusted = forecast.skill > UNTRUSTED
        self._set_forecast(stats, forecast.mean_tokens)
        return *self._level(key, stats, forecast.order_tokens, trusted), trusted

    def _placed(self, key: str, stats: TrajectoryStats, level: int, reason: str, trusted: bool) -> facts.SetPriority:
        stats.level = level
        in_groups = self.objective == "stream" and trusted and stats.group
        place = int(self._groups[stats.group][0]) if in_groups else stats.arrival
        place = stats.generated_tokens if self._pauses else place
        return facts.SetPriority(key, facts.Priority(stats.iteration, level, place), reason)

    def _begun(self, key: str, group: str) -> None:
        if (waiting := self._unbegun.get(group)) is not None:
            waiting.pop(key, None)
            if not waiting:
                del self._unbegun[group]

    def _prefer(self, key: str, stats: TrajectoryStats, mean_tokens: float) -> list[facts.Prefer]:
        begins = 0 if stats.generated_tokens else self._begins_tp(mean_tokens)
        length = length_class(mean_tokens)
        if (stats.told_class, stats.begins_tp) == (length, begins):
            return []
        growth = 1.0 + self._read_tokens / self._sampled_tokens if self._sampled_tokens else 1.0
        final = stats.context_tokens + int(mean_tokens * growth)
        stats.told_class, stats.begins_tp = length, begins
        left = int(mean_tokens) if self.objective == "makespan" else 0
        planned = f", planned for TP {begins}" if begins else ""
        return [facts.Prefer(key, (), f"cmlfq: {int(mean_tokens)} tokens left{planned}", left, final, begins)]

    def _begins_tp(self, tokens: float) -> int:
        """Smallest planned degree for ``tokens`` tokens to generate; 0 without a plan."""
        for tp, longest_tokens in self._boundaries:
            if tokens <= longest_tokens:
                return tp
        return self._boundaries[-1][0] + 1 if self._boundaries else 0

    def _prefer_again(self) -> tuple[facts.Prefer, ...]:
        waiting = [key for keys in self._unbegun.values() for key in keys]
        trajectories = self._trajectories.by_key
        return tuple(
            p for key in waiting for p in self._prefer(key, trajectories[key], trajectories[key].remaining_tokens)
        )

    def _level(self, key: str, stats: TrajectoryStats, order_tokens: float, trusted: bool) -> tuple[int, str]:
        begun = stats.generated_tokens > 0
        if self.objective == "stream" and trusted:
            level = length_class(self._groups[stats.group][1] if stats.group else order_tokens)
            return 1 + level, f"cmlfq: class {level} by tokens left in the group"
        if self._pauses:
            return self._pausable_level(key, order_tokens, begun=begun, trusted=trusted)
        if not trusted and self.objective == "makespan":
            return (UNDER_WAY if begun else UNBEGUN), "cmlfq: no skill, by arrival"
        if not trusted:
            level = length_class(stats.generated_tokens)
            return 1 + level + (0 if begun else UNBEGUN), f"cmlfq: no skill, class {level} by tokens generated"
        if begun:
            return UNDER_WAY, "cmlfq: under way"
        if self.forecaster.is_probe(key):
            return UNBEGUN, "cmlfq: probe of its group"
        level = length_class(order_tokens)
        return UNBEGUN + NUM_CLASSES - level, f"cmlfq: class {level} by tokens left"

    def _pausable_level(self, key: str, order_tokens: float, *, begun: bool, trusted: bool) -> tuple[int, str]:
        if not trusted:
            return UNBEGUN, "cmlfq: no skill, by tokens generated"
        if not begun and self.forecaster.is_probe(key):
            return UNDER_WAY, "cmlfq: probe of its group"
        octave = length_class(order_tokens) // 2
        return UNBEGUN + NUM_CLASSES - 2 * octave, f"cmlfq: octave {octave} by tokens left"

    def _set_forecast(self, stats: TrajectoryStats, mean_tokens: float) -> None:
        if stats.group:
            group = self._groups.setdefault(stats.group, [float(stats.arrival), 0.0, 0.0])
            group[2] += not stats.counted
            group[1] += mean_tokens - stats.remaining_tokens
            stats.counted = True
        stats.remaining_tokens = mean_tokens

    def _ended(self, stats: TrajectoryStats) -> None:
        group = self._groups.get(stats.group)
        if group is not None and stats.counted:
            group[1] -= stats.remaining_tokens
            group[2] -= 1
            if group[2] <= 0:
                del self._groups[stats.group]

    def dashboard_row(self) -> dict[str, Any]:
        """Skill and weights of the forecasts, and rows of `ForecastOutcome`."""
        skill = self.forecaster.skill
        return {
            "objective": self.objective,
            "skill": None if skill is None else round(skill, 4),
            "weights": {name: round(weight, 4) for name, weight in self.forecaster.weights.items()},
            "outcomes": [[round(first), round(half), tokens] for first, half, tokens in self._calibration.outcomes],
        }

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        super().restore(snapshot)
        self._calibration = CalibrationLog()

"""C-MLFQ: a multi-level feedback queue over trajectories, driven by what is believed to be left of each.

The order is (iteration deadline, level, order). Levels are classes of remaining length, made anew at every parking from the
forecaster's answer; where its skill is not above 0, nothing is believed, and the order needs none: see the objectives.

Objectives
----------
makespan
    The iteration is to be over soon. Whoever is under way goes on, in the order of arrival: its KV cache holds memory until it
    ends, and going round among many that are half done computes contexts again and again. Of those that have not begun, one
    of each group goes first (the probe, Seer), then the longest expected; what siblings show re-orders them. Without skill by
    arrival: least attained service first would keep the longest for the end, which a makespan cannot afford (`docs/adr/0008`).
stream
    Groups are to be complete soon, one after the other: least left in the group first, within it by arrival. Without skill by
    attained service, least first.

Promises
--------
1. An earlier iteration always goes before a later one.
2. Nobody is passed over for ever; the bound is `libra.policy.starvation_guard`'s, whose overdue ones have level 0.
3. It says what it believes (`Prefer`) whenever that has changed by a class; where a trajectory goes follows from these beliefs,
   the load of the engines and the price of a move: see `libra.policy.engine_loads`. Boundaries of a plan (`BoundariesSet`) say
   where a trajectory had best begin, as long as that costs little: see `libra.policy.dispatcher`.
4. ``restore(snapshot())`` changes no later answer.

Differs from the paper (Libra, arXiv:2606.03077 v2, C-MLFQ): levels order one queue instead of being queues of servers; nothing is
decided by fixed lengths; moves are priced; waiting is bounded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

from libra.policy.attained_service import PATIENCE
from libra.policy.calibration_log import CalibrationLog
from libra.policy.forecast import Forecast, Forecaster
from libra.policy.messages import (
    BoundariesSet,
    Event,
    Prefer,
    Priority,
    QuantumFinished,
    QuantumStarted,
    SetPriority,
    TrajectoryEnded,
    TrajectoryParked,
)
from libra.policy.oracle_lengths import KnownLengths
from libra.policy.posterior import Posterior
from libra.policy.starvation_guard import OVERDUE, StarvationGuard
from libra.policy.trajectory_table import NUM_CLASSES, TrajectoryStats, TrajectoryTable, length_class
from libra.types import Phase

Objective = Literal["makespan", "stream"]
UNTRUSTED = 0.0
"""Skill up to which a forecast orders nothing."""
ANEW_AT_AN_END = 16
"""Trajectories that have not begun and are looked at anew, beside the siblings, whenever one ends."""
UNDER_WAY, UNBEGUN = 1, 1 + NUM_CLASSES
"""Levels of those under way (with skill), and the first level of those that have not begun."""


@runtime_checkable
class GroupAware(Protocol):
    """A forecaster that learns of those who have not begun from their siblings."""

    def anew(self, key: str) -> Forecast: ...

    def is_probe(self, key: str) -> bool: ...


@runtime_checkable
class SelfScoring(Protocol):
    """A forecaster that knows what it is worth."""

    @property
    def skill(self) -> float: ...

    @property
    def weights(self) -> dict[str, float]: ...


class CMLFQ:
    """The ordering of this system; `Predictor` and `Oracle` are the same rule with other beliefs.

    Parameters
    ----------
    forecaster : Forecaster, optional
        Hears every event before it is asked. None: `Posterior`.
    objective : "makespan" or "stream"
    patience : int
        Parkings after which one that waits goes first; see `libra.policy.starvation_guard`.
    """

    name: ClassVar[str] = "cmlfq"

    def __init__(
        self, forecaster: Forecaster | None = None, *, objective: Objective = "makespan", patience: int = PATIENCE
    ) -> None:
        if objective not in ("makespan", "stream"):
            raise ValueError(f"objective: got {objective!r}; allowed are 'makespan' and 'stream'")
        self.forecaster: Forecaster = Posterior() if forecaster is None else forecaster
        self._reconsiders = self.forecaster if isinstance(self.forecaster, GroupAware) else None
        self.objective: Objective = objective
        self._lives = TrajectoryTable()
        self._patience = StarvationGuard(patience)
        self._groups: dict[str, list[float]] = {}  # arrival, tokens left and members under way
        self._unbegun: dict[str, dict[str, None]] = {}  # by group, who waits for the first slot
        self._told: dict[str, int] = {}  # length class that the dispatcher was told
        self._boundaries: tuple[tuple[int, float], ...] = ()
        self._begins: dict[str, int] = {}  # degree that the dispatcher was told, of those that a plan means for one
        self._sampled_tokens = self._read_tokens = 0
        self._hindsight = CalibrationLog()

    def handle(self, event: Event) -> tuple[SetPriority | Prefer, ...]:
        """Answer one event; deterministic in the sequence of events."""
        self.forecaster.handle(event)
        life = self._lives.handle(event)
        match event:
            case TrajectoryParked(key=key, phase=phase):
                assert life is not None
                return self._parked(key, life, self._patience.parked(key, phase))
            case QuantumStarted(key=key):
                self._patience.left(key)
                self._begun(key)
            case QuantumFinished(tokens=tokens, payload_tokens=payload):
                self._sampled_tokens += tokens
                self._read_tokens += payload
            case TrajectoryEnded(key=key, completed=completed):
                self._patience.left(key)
                self._hindsight.ended(key, life.generated_tokens if life is not None else 0, completed=completed)
                self._told.pop(key, None)
                self._begins.pop(key, None)
                if life is not None:
                    self._begun(key, life.group)
                    self._ended(life)
                    return self._anew(list(dict.fromkeys([*self._unbegun.get(life.group, ()), *self._next_anew()])))
            case BoundariesSet(boundaries=boundaries):
                self._boundaries = boundaries
                return self._prefer_anew()
        return ()

    def learn(self) -> None:
        """Have the forecaster do the dear part of its learning; called now and then, off the critical path."""
        self.forecaster.learn()

    def forget_live(self) -> None:
        """Forget who lives, and keep what was learned: its run starts anew, and they come again under other keys."""
        for key in list(self._lives.by_key):
            self.handle(TrajectoryEnded(key, completed=False))
        self._boundaries = ()  # of the layout that was

    def _parked(
        self, key: str, life: TrajectoryStats, overdue: list[tuple[str, int]]
    ) -> tuple[SetPriority | Prefer, ...]:
        waits_to_begin = life.phase is Phase.ROLLOUT and not life.generated_tokens
        if waits_to_begin:
            self._unbegun.setdefault(life.group, {})[key] = None
        mean, order, skill = self.forecaster.remaining(key)
        self._believe(life, mean)
        self._hindsight.believed(key, life.generated_tokens, life.generated_tokens + mean)
        level, reason = self._level(key, life, order, skill > UNTRUSTED)
        answers: list[SetPriority | Prefer] = [self._placed(key, life, level, reason, skill > UNTRUSTED)]
        if life.phase is Phase.ROLLOUT:
            answers += self._prefer(key, life, mean)
        for late, number in overdue:
            other = self._lives.by_key[late]
            other.level = OVERDUE
            answers.append(
                SetPriority(late, Priority(other.iteration, OVERDUE, number), "overdue: passed over for too long")
            )
        if not waits_to_begin and skill > UNTRUSTED:
            total = length_class(life.generated_tokens + mean)
            if total != life.total_class:
                life.total_class = total
                answers += self._siblings_anew(life)
        return tuple(answers)

    def _siblings_anew(self, life: TrajectoryStats) -> tuple[SetPriority | Prefer, ...]:
        """Those of its group that have not begun, where what is known of the group now gives them another level."""
        return self._anew(list(self._unbegun.get(life.group, ()))) if life.group else ()

    def _next_anew(self) -> list[str]:
        """Some of those that have not begun, whose turn it is to be looked at anew."""
        keys: list[str] = []
        while self._unbegun and len(keys) < ANEW_AT_AN_END:
            group = next(iter(self._unbegun))
            waiting = self._unbegun[group] = self._unbegun.pop(group)  # to the end of the row
            if keys and next(iter(waiting)) == keys[0]:
                break
            keys += waiting
        return keys

    def _anew(self, keys: list[str]) -> tuple[SetPriority | Prefer, ...]:
        answers: list[SetPriority | Prefer] = []
        anew = self._reconsiders.anew if self._reconsiders is not None else self.forecaster.remaining
        for key in keys:
            other = self._lives.by_key[key]
            if other.level == OVERDUE:
                continue
            mean, order, skill = anew(key)
            self._believe(other, mean)
            level, reason = self._level(key, other, order, skill > UNTRUSTED)
            if level != other.level:
                trusted = skill > UNTRUSTED
                answers += [self._placed(key, other, level, reason, trusted), *self._prefer(key, other, mean)]
        return tuple(answers)

    def _placed(self, key: str, life: TrajectoryStats, level: int, reason: str, trusted: bool) -> SetPriority:
        life.level = level
        in_groups = self.objective == "stream" and trusted and life.group
        place = int(self._groups[life.group][0]) if in_groups else life.arrival
        return SetPriority(key, Priority(life.iteration, level, place), reason)

    def _begun(self, key: str, group: str | None = None) -> None:
        """``key`` does not wait for its first slot any more."""
        if group is None:
            life = self._lives.by_key.get(key)
            if life is None:
                return
            group = life.group
        waiting = self._unbegun.get(group)
        if waiting is not None:
            waiting.pop(key, None)
            if not waiting:
                del self._unbegun[group]

    def _prefer(self, key: str, life: TrajectoryStats, mean_tokens: float) -> list[Prefer]:
        """What the dispatcher is to expect of it, whenever that has changed by a class: tokens left, context at the end."""
        begins = 0 if life.generated_tokens else self._begins_tp(mean_tokens)
        length = length_class(mean_tokens)
        if self._told.get(key) == length and self._begins.get(key, 0) == begins:
            return []
        growth = 1.0 + self._read_tokens / self._sampled_tokens if self._sampled_tokens else 1.0
        final = life.context_tokens + int(mean_tokens * growth)
        self._told[key] = length
        if begins:
            self._begins[key] = begins
        else:
            self._begins.pop(key, None)
        left = int(mean_tokens) if self.objective == "makespan" else 0
        planned = f", planned for TP {begins}" if begins else ""
        return [Prefer(key, (), f"cmlfq: {int(mean_tokens)} tokens left{planned}", left, final, begins)]

    def _begins_tp(self, tokens: float) -> int:
        """Least degree of the engines that a plan means for a trajectory of so many tokens; 0: there is no plan."""
        for tp, longest_tokens in self._boundaries:
            if tokens <= longest_tokens:
                return tp
        return self._boundaries[-1][0] + 1 if self._boundaries else 0

    def _prefer_anew(self) -> tuple[Prefer, ...]:
        """What is new for those that have not begun, where boundaries are."""
        waiting = [key for keys in self._unbegun.values() for key in keys]
        lives = self._lives.by_key
        return tuple(p for key in waiting for p in self._prefer(key, lives[key], lives[key].remaining_tokens))

    def _level(self, key: str, life: TrajectoryStats, order_tokens: float, trusted: bool) -> tuple[int, str]:
        begun = life.generated_tokens > 0
        if self.objective == "stream" and trusted:
            level = length_class(self._groups[life.group][1] if life.group else order_tokens)
            return 1 + level, f"cmlfq: class {level} by tokens left in the group"
        if not trusted and self.objective == "makespan":
            return (UNDER_WAY if begun else UNBEGUN), "cmlfq: no skill, by arrival"
        if not trusted:
            level = length_class(life.generated_tokens)
            return 1 + level + (0 if begun else UNBEGUN), f"cmlfq: no skill, class {level} by tokens generated"
        if begun:
            return UNDER_WAY, "cmlfq: under way"
        if self._reconsiders is not None and self._reconsiders.is_probe(key):
            return UNBEGUN, "cmlfq: probe of its group"
        level = length_class(order_tokens)
        return UNBEGUN + NUM_CLASSES - level, f"cmlfq: class {level} by tokens left"

    def _believe(self, life: TrajectoryStats, mean_tokens: float) -> None:
        before = life.remaining_tokens
        life.remaining_tokens = mean_tokens
        if life.group:
            group = self._groups.get(life.group)
            if group is None:
                group = self._groups[life.group] = [float(life.arrival), 0.0, 0.0]
            if not life.counted:
                life.counted = True
                group[2] += 1
            group[1] += mean_tokens - before

    def _ended(self, life: TrajectoryStats) -> None:
        group = self._groups.get(life.group)
        if group is not None and life.counted:
            group[1] -= life.remaining_tokens
            group[2] -= 1
            if group[2] <= 0:
                del self._groups[life.group]

    def shown(self) -> dict[str, Any]:
        """What people may want to see: skill and weights of the forecasts, and what was believed of those that are over.

        ``skill`` is None where the forecaster does not judge itself; ``outcomes`` are rows of
        `libra.policy.calibration_log.ForecastOutcome`.
        """
        judged = self.forecaster if isinstance(self.forecaster, SelfScoring) else None
        return {
            "objective": self.objective,
            "skill": round(judged.skill, 4) if judged is not None else None,
            "weights": {name: round(weight, 4) for name, weight in judged.weights.items()}
            if judged is not None
            else {},
            "outcomes": [[round(first), round(half), tokens] for first, half, tokens in self._hindsight.outcomes],
        }

    def snapshot(self) -> dict[str, Any]:
        """Everything it knows, as values that JSON can hold; see `restore`."""
        return {
            "objective": self.objective,
            "patience": self._patience.patience,
            "lives": self._lives.snapshot(),
            "waiting": self._patience.snapshot(),
            "groups": {group: list(state) for group, state in sorted(self._groups.items())},
            "unbegun": [[group, list(waiting)] for group, waiting in self._unbegun.items()],
            "told": dict(sorted(self._told.items())),
            "tokens": [self._sampled_tokens, self._read_tokens],
            "forecaster": self.forecaster.snapshot(),
            **({"boundaries": [list(pair) for pair in self._boundaries]} if self._boundaries else {}),
            **({"begins": dict(sorted(self._begins.items()))} if self._begins else {}),
        }

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Know what ``snapshot`` says and nothing else; KeyError, TypeError or ValueError where it is no snapshot."""
        self.objective = snapshot["objective"]
        self._patience = StarvationGuard(int(snapshot["patience"]))
        self._patience.restore(snapshot["waiting"])
        self._lives.restore(snapshot["lives"])
        self._groups = {str(group): [float(x) for x in state] for group, state in snapshot["groups"].items()}
        self._unbegun = {str(group): dict.fromkeys(waiting) for group, waiting in snapshot["unbegun"]}
        self._told = {str(key): int(length) for key, length in snapshot["told"].items()}
        self._boundaries = tuple((int(tp), float(tokens)) for tp, tokens in snapshot.get("boundaries", ()))
        self._begins = {str(key): int(tp) for key, tp in snapshot.get("begins", {}).items()}
        self._sampled_tokens, self._read_tokens = (int(tokens) for tokens in snapshot["tokens"])
        self._hindsight = CalibrationLog()
        self.forecaster.restore(snapshot["forecaster"])


class Predictor(CMLFQ):
    """C-MLFQ's rule with lengths predicted before anything runs, with stated accuracy; a baseline."""

    name: ClassVar[str] = "predictor"

    def __init__(
        self,
        totals: Mapping[str, int] | None = None,
        *,
        accuracy: float = 0.6,
        seed: int = 0,
        objective: Objective = "makespan",
        patience: int = PATIENCE,
    ) -> None:
        super().__init__(KnownLengths(totals, accuracy=accuracy, seed=seed), objective=objective, patience=patience)


class Oracle(CMLFQ):
    """C-MLFQ's rule with the true lengths: how much order and placement could win at most, by this rule."""

    name: ClassVar[str] = "oracle"

    def __init__(
        self,
        totals: Mapping[str, int] | None = None,
        *,
        objective: Objective = "makespan",
        patience: int = PATIENCE,
    ) -> None:
        super().__init__(KnownLengths(totals), objective=objective, patience=patience)

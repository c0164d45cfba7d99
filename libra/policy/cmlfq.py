"""C-MLFQ: a multi-level feedback queue over trajectories, driven by what is believed to be left of each.

The order is (iteration deadline, level, order). Levels are classes of remaining length, made anew at every parking from the
forecaster's answer; where its skill is not above 0, they are classes of attained service, least first, which needs no belief.

Objectives
----------
makespan
    The iteration is to be over soon: longest expected first. Whoever is under way goes before who has not begun, because its
    KV cache holds memory until it ends.
stream
    Groups are to be complete soon, one after the other: least left in the group first, within it by arrival.

Promises
--------
1. An earlier iteration always goes before a later one.
2. Nobody is passed over for ever; the bound is `libra.policy.patience`'s, whose overdue ones have level 0.
3. It says what it believes (`Prefer`) whenever that has changed by a class; where a trajectory goes follows from these beliefs,
   the load of the engines and the price of a move: see `libra.policy.loads`.
4. ``restore(snapshot())`` changes no later answer.

Differs from the paper (Libra, arXiv:2606.03077 v2, C-MLFQ): levels order one queue instead of being queues of servers; nothing is
decided by fixed lengths; moves are priced; waiting is bounded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from libra.policy.attained import PATIENCE, overdue_first
from libra.policy.fleet import Fleet
from libra.policy.forecast import Forecaster
from libra.policy.known_lengths import KnownLengths
from libra.policy.lives import NUM_CLASSES, Life, Lives, length_class
from libra.policy.messages import (
    Event,
    Prefer,
    Priority,
    QuantumFinished,
    QuantumStarted,
    SetPriority,
    TrajectoryEnded,
    TrajectoryParked,
)
from libra.policy.patience import Patience
from libra.policy.posterior import Posterior
from libra.types import Phase

Objective = Literal["makespan", "stream"]
UNTRUSTED = 0.0
"""Skill up to which a forecast orders nothing."""


class CMLFQ:
    """The ordering of this system; `Predictor` and `Oracle` are the same rule with other beliefs.

    Parameters
    ----------
    forecaster : Forecaster, optional
        Hears every event before it is asked. None: `Posterior`.
    objective : "makespan" or "stream"
    patience : int
        Parkings, per waiting trajectory, after which one goes first; see `libra.policy.patience`.
    """

    name: ClassVar[str] = "cmlfq"

    def __init__(
        self, forecaster: Forecaster | None = None, *, objective: Objective = "makespan", patience: int = PATIENCE
    ) -> None:
        if objective not in ("makespan", "stream"):
            raise ValueError(f"objective: got {objective!r}; allowed are 'makespan' and 'stream'")
        self.forecaster: Forecaster = Posterior() if forecaster is None else forecaster
        self.objective: Objective = objective
        self._lives = Lives()
        self._patience = Patience(patience)
        self._fleet = Fleet()
        self._groups: dict[str, list[float]] = {}  # arrival, tokens left and members under way
        self._told: dict[str, int] = {}  # length class that the dispatcher was told
        self._sampled_tokens = self._read_tokens = 0

    def handle(self, event: Event) -> tuple[SetPriority | Prefer, ...]:
        """Answer one event; deterministic in the sequence of events."""
        self._fleet.handle(event)
        self.forecaster.handle(event)
        life = self._lives.handle(event)
        match event:
            case TrajectoryParked(key=key, phase=phase):
                assert life is not None
                return self._parked(key, life, self._patience.parked(key, phase))
            case QuantumStarted(key=key):
                self._patience.left(key)
            case QuantumFinished(tokens=tokens, payload_tokens=payload):
                self._sampled_tokens += tokens
                self._read_tokens += payload
            case TrajectoryEnded(key=key):
                self._patience.left(key)
                self._told.pop(key, None)
                if life is not None:
                    self._ended(life)
        return ()

    def learn(self) -> None:
        """Have the forecaster do the dear part of its learning; called now and then, off the critical path."""
        self.forecaster.learn()

    def _parked(self, key: str, life: Life, overdue: list[tuple[str, int]]) -> tuple[SetPriority | Prefer, ...]:
        mean, order, skill = self.forecaster.remaining(key)
        trusted = skill > UNTRUSTED
        self._believe(life, mean)
        level, reason = self._level(life, order, trusted)
        place = life.arrival
        if self.objective == "stream" and trusted and life.group:
            place = int(self._groups[life.group][0])
        answers: list[SetPriority | Prefer] = [SetPriority(key, Priority(life.iteration, level, place), reason)]
        if life.phase is Phase.ROLLOUT:
            answers += self._prefer(key, mean)
        return (*answers, *overdue_first(overdue, self._lives))

    def _prefer(self, key: str, mean_tokens: float) -> list[Prefer]:
        """What the dispatcher is to expect of it, whenever that has changed by a class: tokens left, context at the end."""
        length = length_class(mean_tokens)
        growth = 1.0 + self._read_tokens / self._sampled_tokens if self._sampled_tokens else 1.0
        final = self._fleet.context_tokens.get(key, 0) + int(mean_tokens * growth)
        told = self._told.get(key)
        if told == length:
            return []
        self._told[key] = length
        left = int(mean_tokens) if self.objective == "makespan" else 0
        return [Prefer(key, (), f"cmlfq: {int(mean_tokens)} tokens left", left, final)]

    def _level(self, life: Life, order_tokens: float, trusted: bool) -> tuple[int, str]:
        begun = life.generated_tokens > 0
        if not trusted:
            level = length_class(life.generated_tokens)
            return 1 + level + (0 if begun else NUM_CLASSES), f"cmlfq: no skill, class {level} by tokens generated"
        if self.objective == "stream":
            level = length_class(self._groups[life.group][1] if life.group else order_tokens)
            return 1 + level, f"cmlfq: class {level} by tokens left in the group"
        level = length_class(order_tokens)
        away = NUM_CLASSES - 1 - level
        return 1 + away + (0 if begun else NUM_CLASSES), f"cmlfq: class {level} by tokens left"

    def _believe(self, life: Life, mean_tokens: float) -> None:
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

    def _ended(self, life: Life) -> None:
        group = self._groups.get(life.group)
        if group is not None and life.counted:
            group[1] -= life.remaining_tokens
            group[2] -= 1
            if group[2] <= 0:
                del self._groups[life.group]

    def snapshot(self) -> dict[str, Any]:
        """Everything it knows, as values that JSON can hold; see `restore`."""
        return {
            "objective": self.objective,
            "patience": self._patience.patience,
            "lives": self._lives.snapshot(),
            "waiting": self._patience.snapshot(),
            "fleet": self._fleet.snapshot(),
            "groups": {group: list(state) for group, state in sorted(self._groups.items())},
            "told": dict(sorted(self._told.items())),
            "tokens": [self._sampled_tokens, self._read_tokens],
            "forecaster": self.forecaster.snapshot(),
        }

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Know what ``snapshot`` says and nothing else; KeyError, TypeError or ValueError where it is no snapshot."""
        self.objective = snapshot["objective"]
        self._patience = Patience(int(snapshot["patience"]))
        self._patience.restore(snapshot["waiting"])
        self._lives.restore(snapshot["lives"])
        self._fleet.restore(snapshot["fleet"])
        self._groups = {str(group): [float(x) for x in state] for group, state in snapshot["groups"].items()}
        self._told = {str(key): int(length) for key, length in snapshot["told"].items()}
        self._sampled_tokens, self._read_tokens = (int(tokens) for tokens in snapshot["tokens"])
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

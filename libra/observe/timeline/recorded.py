"""Timeline of an event log, read once, with turns, forecasts, decisions and failures.

Only turns of the newest iteration are kept, so memory does not grow with the number of quanta.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from libra import facts, keys
from libra.errors import StoreError
from libra.facts import Fact, Line
from libra.observe.run_directory import setting, whole_number
from libra.observe.timeline.decision_outcomes import DecisionOutcomes
from libra.observe.timeline.states import Slot
from libra.observe.timeline.timeline import DECISIONS, LATE, TROUBLES, Timeline
from libra.store.event_log import EventReader
from libra.types import Phase

MAX_FORECASTS: Final = 4000
MAX_DECISIONS: Final = 400
MAX_TROUBLES: Final = 200


class TurnSpan(NamedTuple):
    """One quantum, from its dispatch or the previous quantum in its slot to its report."""

    key: str
    phase: str
    worker: str
    start_s: float
    stop_s: float
    tokens: int
    tool: str


class ForecastPair(NamedTuple):
    """Forecasts of a trajectory's total tokens, at the start and half way, and the actual tokens."""

    first: float
    half: float
    tokens: int


class Logged(NamedTuple):
    """A fact, its time over all starts, and its index in `RecordedTimeline.outcomes`."""

    t_s: float
    event: Fact
    outcome: int | None = None


class RecordedTimeline(Timeline):
    """Timeline of an event log with details for the report, filled by `read_on`.

    ``turns`` are of iteration ``turns_of``, the newest in which a training trajectory ended.
    ``forecasts`` are of trajectories that ended by themselves. ``failed_attempts`` counts by
    (class, detail).
    """

    def __init__(self, trainers: Sequence[str] = ()) -> None:
        super().__init__(trainers)
        self.starts = self.num_facts = 0
        self.turns: list[TurnSpan] = []
        self.turns_of = -1
        self.forecasts: deque[ForecastPair] = deque(maxlen=MAX_FORECASTS)
        self.decisions: deque[Logged] = deque(maxlen=MAX_DECISIONS)
        self.troubles: deque[Logged] = deque(maxlen=MAX_TROUBLES)
        self.outcomes = DecisionOutcomes()
        self.failed_attempts: Counter[tuple[str, str]] = Counter()
        self._forecast: dict[str, list[tuple[int, int]]] = {}  # by open trajectory: (generated, forecast remaining)
        self._turns: dict[int, list[TurnSpan]] = {}

    def add(self, line: Line) -> None:
        """Process the next log line."""
        self.num_facts += 1
        fact = line.fact
        before = self.places.open.get(getattr(fact, "key", ""))
        slot = before.slot if before is not None else None
        super().add(line)
        match fact:
            case facts.RunStarted():
                self.starts += 1
                self._forecast.clear()
            case facts.QuantumFinished():
                self._turn_finished(fact, slot)
            case facts.Prefer() if fact.left_tokens > 0:
                tokens = before.tokens if before is not None else 0
                self._forecast.setdefault(fact.key, []).append((tokens, fact.left_tokens))
            case facts.TrajectoryEnded():
                self._trajectory_ended(fact, before.tokens if before is not None else 0)
            case facts.FailureClassified():
                attempt = fact.failure, fact.detail
                if attempt in self.failed_attempts or len(self.failed_attempts) < MAX_TROUBLES:
                    self.failed_attempts[attempt] += 1
        outcome = self.outcomes.add(line)
        if isinstance(fact, TROUBLES):
            self.troubles.append(Logged(self.now_s, fact))
        elif isinstance(fact, (*DECISIONS, *LATE)):
            self.decisions.append(Logged(self.now_s, fact, outcome))

    def _turn_finished(self, fact: facts.QuantumFinished, slot: Slot | None) -> None:
        slot = slot or Slot(fact.worker, fact.phase, self.now_s - fact.latency_s)
        parsed = keys.parse(fact.key)
        if parsed is not None and parsed.split == "train" and len(parsed.indices) == 3:
            tool = fact.tool if fact.phase == Phase.TOOL else ""
            span = TurnSpan(fact.key, str(fact.phase), slot.worker, slot.since_s, self.now_s, fact.tokens, tool)
            self._turns.setdefault(parsed.indices[0], []).append(span)

    def _trajectory_ended(self, fact: facts.TrajectoryEnded, tokens: int) -> None:
        forecast, parsed = self._forecast.pop(fact.key, None), keys.parse(fact.key)
        if parsed is not None and parsed.split == "train" and parsed.indices[0] > self.turns_of:
            self.turns_of = parsed.indices[0]
            self._turns = {k: turns for k, turns in self._turns.items() if k >= self.turns_of}
        self.turns = self._turns.get(self.turns_of, [])
        if forecast and fact.completed and tokens:
            totals = [(generated, generated + left) for generated, left in forecast]
            half = min(totals, key=lambda pair: abs(pair[0] - tokens / 2))
            self.forecasts.append(ForecastPair(totals[0][1], half[1], tokens))

    def read_on(self, path: Path) -> str:
        """Read new events up to any damage; returns why reading ended early, or ""."""
        if not path.is_file():
            return f"there is no event log ({path.name}): the run has not started"
        try:
            for line in read_log(path, self.num_facts + 1):
                self.add(line)
        except StoreError as error:
            return str(error)
        return "" if self.num_facts else f"the event log ({path.name}) has no event yet"


def read_log(path: Path, line: int = 1) -> Iterator[Line]:
    """Facts of a log from a line on, without a torn last line; StoreError names a bad line."""
    for number, values in EventReader(path, line=line):
        try:
            yield facts.from_dict(values)
        except StoreError as error:
            raise StoreError(f"{path}, line {number}: {error}") from error


def trainers_of(config: dict[str, Any]) -> tuple[str, ...]:
    """Training workers that the log does not name: of a local cluster, or a single one."""
    number = whole_number(config, "cluster", "train_workers", 1)
    if setting(config, "cluster", "scheduler") is None:
        return tuple(f"train-{rank}" for rank in range(number))
    return ("trainer",) if number == 1 else ()

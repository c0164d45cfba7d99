"""What a report needs of an event log, read once: worker time, turns of the last iteration, forecasts, decisions, troubles.

Memory does not grow with the number of quanta: of turns only the newest iteration's are kept, of forecasts a bounded number.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from libra import facts, keys
from libra.errors import StoreError
from libra.facts import Fact, Line
from libra.observe.decision_outcomes import DecisionOutcomes
from libra.observe.run_directory import setting, whole_number
from libra.observe.run_facts import DECISIONS, LATE, TROUBLES, RunFacts
from libra.store.event_log import EventReader
from libra.types import Phase

MAX_FORECASTS: Final = 4000
MAX_DECISIONS: Final = 400
MAX_TROUBLES: Final = 200


class TurnSpan(NamedTuple):
    """One quantum of a trajectory: from the dispatch, or the previous quantum in its slot, to the report of its end."""

    key: str
    phase: str
    worker: str
    start_s: float
    stop_s: float
    tokens: int
    tool: str


class ForecastPair(NamedTuple):
    """Tokens that a trajectory was forecast to generate in total, at first and half way, and those that it generated."""

    first: float
    half: float
    tokens: int


@dataclass(slots=True)
class _Live:
    """A trajectory that has not ended."""

    begun: tuple[float, str] | None = None
    tokens: int = 0
    forecasts: list[tuple[int, int]] = field(default_factory=list)  # generated so far, forecast remaining


class Logged(NamedTuple):
    """An event that is shown as it is, with its time over all starts of the run, and its place in `LogFacts.outcomes`."""

    t_s: float
    event: Fact
    outcome: int | None = None


class LogFacts:
    """Facts of one event log; `read_on` fills them.

    Attributes
    ----------
    run : RunFacts
        Counts, curves and worker time.
    starts : int
        Starts of the run that are in the log.
    num_events : int
    turns : list of TurnSpan
        Of the newest training iteration of which a trajectory ended, ``turns_of``.
    forecasts : deque of ForecastPair
        The latest of trajectories that ended by themselves.
    decisions, troubles : deque of Logged
    outcomes : DecisionOutcomes
        What came of the decisions.
    failures, lost_quanta : Counter, int
        Attempts that failed, by class; quanta that ended without a record.
    failure_details : Counter
        Failed attempts by (class, detail), of the first different ones.
    torn : bool
        The last line was cut off.
    """

    def __init__(self, trainers: Sequence[str] = ()) -> None:
        self.run = RunFacts(trainers)
        self.starts = self.num_events = self.lost_quanta = 0
        self.turns: list[TurnSpan] = []
        self.turns_of = -1
        self.forecasts: deque[ForecastPair] = deque(maxlen=MAX_FORECASTS)
        self.decisions: deque[Logged] = deque(maxlen=MAX_DECISIONS)
        self.troubles: deque[Logged] = deque(maxlen=MAX_TROUBLES)
        self.outcomes = DecisionOutcomes()
        self.failures: Counter[str] = Counter()
        self.failure_details: Counter[tuple[str, str]] = Counter()
        self.torn = False
        self._live: dict[str, _Live] = {}
        self._turns: dict[int, list[TurnSpan]] = {}

    def add(self, line: Line) -> None:
        """Take the next line of the log."""
        self.num_events += 1
        self.run.add(line)
        now_s, event = self.run.times.now_s, line.fact
        match event:
            case facts.RunStarted():
                self.starts += 1
                self._live.clear()
            case facts.QuantumDispatched() | facts.QuantumContinued():
                self._of(event.key).begun = now_s, event.worker
            case facts.QuantumFinished():
                self._finished(event, now_s)
            case facts.Prefer() if event.left_tokens > 0:
                live = self._of(event.key)
                live.forecasts.append((live.tokens, event.left_tokens))
            case facts.TrajectoryEnded():
                self._ended(event)
            case facts.QuantumLost():
                self.lost_quanta += 1
            case facts.FailureClassified():
                self.failures[event.failure] += 1
                detail = event.failure, event.detail
                if detail in self.failure_details or len(self.failure_details) < MAX_TROUBLES:
                    self.failure_details[detail] += 1
        outcome = self.outcomes.add(line)
        if isinstance(event, TROUBLES):
            self.troubles.append(Logged(now_s, event))
        elif isinstance(event, (*DECISIONS, *LATE)):
            self.decisions.append(Logged(now_s, event, outcome))

    def read_on(self, path: Path) -> str:
        """Take the events that were not read yet; why they end before the log's end, empty: they do not.

        A damaged log is read up to the damage.
        """
        if not path.is_file():
            return f"there is no event log ({path.name}): the run has observe.event_log=false, or has not begun"
        try:
            for line in read_log(path, self.num_events + 1):
                self.add(line)
        except StoreError as error:
            return str(error)
        return "" if self.num_events else f"the event log ({path.name}) has no event yet"

    def _of(self, key: str) -> _Live:
        live = self._live.get(key)
        if live is None:
            live = self._live[key] = _Live()
        return live

    def _finished(self, event: facts.QuantumFinished, now_s: float) -> None:
        live = self._of(event.key)
        live.tokens += event.tokens
        begun_s, worker = live.begun or (now_s - event.latency_s, event.worker)
        live.begun = None
        parsed = keys.parse(event.key)
        if parsed is not None and parsed.split == "train" and len(parsed.indices) == 3:
            tool = event.tool if event.phase == Phase.TOOL else ""
            span = TurnSpan(event.key, str(event.phase), worker, begun_s, now_s, event.tokens, tool)
            self._turns.setdefault(parsed.indices[0], []).append(span)

    def _ended(self, event: facts.TrajectoryEnded) -> None:
        live, parsed = self._live.pop(event.key, None), keys.parse(event.key)
        if parsed is not None and parsed.split == "train" and parsed.indices[0] > self.turns_of:
            self.turns_of = parsed.indices[0]
            for iteration in [iteration for iteration in self._turns if iteration < self.turns_of]:
                del self._turns[iteration]
        self.turns = self._turns.get(self.turns_of, [])
        if live is None or not event.completed or not live.forecasts or not live.tokens:
            return
        totals = [(generated, generated + left) for generated, left in live.forecasts]
        half = min(totals, key=lambda pair: abs(pair[0] - live.tokens / 2))
        self.forecasts.append(ForecastPair(totals[0][1], half[1], live.tokens))


def read_log(path: Path, line: int = 1) -> Iterator[Line]:
    """The events of a log from this line on, typed; a torn last line is left out.

    StoreError with the line where one cannot be read.
    """
    for number, values in EventReader(path, line=line):
        try:
            yield facts.from_dict(values)
        except StoreError as error:
            raise StoreError(f"{path}, line {number}: {error}") from error


def log_facts(path: Path, trainers: Sequence[str] = ()) -> tuple[LogFacts, str]:
    """The facts of a log, and why they end before its end; see `LogFacts.read_on`."""
    found = LogFacts(trainers)
    return found, found.read_on(path)


def trainers_of(config: dict[str, Any]) -> tuple[str, ...]:
    """Names of the training workers for `WorkerTimes`: those of a local cluster, or one without a name.

    Several of a cluster that Libra did not start form a group, and the log names them.
    """
    number = whole_number(config, "cluster", "train_workers", 1)
    if setting(config, "cluster", "scheduler") is None:
        return tuple(f"train-{rank}" for rank in range(number))
    return ("trainer",) if number == 1 else ()

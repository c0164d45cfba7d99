"""What the page shows of a run, from its events: live in the scheduler, or afterwards from the log, with the same result.

Invariants
----------
1. Nothing here reads a clock: time comes with the events, and with `RunFacts.sample`.
2. ``history`` has at most ``MAX_SAMPLES`` rows, evenly spaced over the whole run: when it is full, every second row goes.
3. What later iterations replace (a resumed run does some of them again) is counted once: curves are by iteration.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from libra import facts
from libra.facts import Fact, Line, said
from libra.observe.streamed_steps import OF_STEPS, StreamedSteps
from libra.observe.worker_time import WorkerTimes
from libra.types import Phase
from libra.untrusted import shown_line

DECISIONS: Final = (
    facts.LayoutPlanned, facts.PlanConsidered, facts.PlanAccepted, facts.PlanBlocked, facts.PlanRealised,
    facts.RoleChangeStarted, facts.RoleChanged, facts.RoleRestored, facts.RoleChangeFailed, facts.RoleChangeCancelled,
    facts.SlotsSet, facts.BoundariesSet, facts.StepsPlanned, facts.TakeSteps,
)  # fmt: skip
LATE: Final = (facts.LateRewardsTaken,)
TURNS: Final = (facts.Turn, facts.TurnRefused)
TROUBLES: Final = (
    facts.WorkerLost, facts.WorkerSetupFailed, facts.EngineQuarantined, facts.StallDetected,
    facts.GangLost, facts.RoleMemberFailed, facts.MismatchFound,
)  # fmt: skip
SAMPLE_S: Final = 0.5
"""Seconds between two rows of the history, at first."""
MAX_SAMPLES: Final = 1200
MAX_STEPS: Final = 400
"""Steps whose split is kept."""
LAST_DECISIONS: Final = 8
"""Kept of decisions and troubles; half as many of iterations and steps that were let through."""
RATE_INTERVALS: Final = 10
"""Iterations from whose mean duration the end of the run is estimated."""
BANDS: Final = ("overdue", "level 0–1", "level 2–10", "level 11–40", "level 41 and later")
_BAND_TOPS: Final = (-1, 1, 10, 40)


def band(level: int) -> int:
    """Index in `BANDS` of a policy's level."""
    return sum(level > top for top in _BAND_TOPS)


OF_A_BATCH: Final = {
    "grading": "grading and committing",
    "batch": "reading the batch",
    "training": "training",
    "moving": "publishing the weights",
}
"""States of training workers between a batch's last trajectory and the next iteration, in words."""


class RunFacts:
    """Counts, curves and worker time of a run, event by event.

    Parameters
    ----------
    trainers : sequence of str
        Names of the training workers; see `WorkerTimes`.
    keep : int or None
        Segments kept per worker; see `WorkerTimes`.

    Attributes
    ----------
    times : WorkerTimes
    streamed : StreamedSteps
    tokens : int
        Generated so far.
    quanta : Counter
        Finished, by phase.
    parts : int
        Of those, generations whose turn went on (`rollout.chunk_tokens`).
    history : list
        Rows (t_s, queued_rollout, queued_tool, used_rollout, used_tool, tokens, waiting for ROLLOUT in each of `BANDS`).
    """

    def __init__(self, trainers: Sequence[str] = (), *, keep: int | None = None) -> None:
        self.times = WorkerTimes(trainers, keep=keep)
        self.streamed = StreamedSteps()
        self.run = self.policy = ""
        self.epoch = self.eta = self.iterations = 0
        self.iteration, self.published = -1, -1
        self.tokens = self.groups = self.resampled = 0
        self.quanta: Counter[str] = Counter()
        self.parts = 0
        self.failures: Counter[str] = Counter()
        self.history: list[tuple[float, ...]] = []
        self._interval_s, self._next_s = SAMPLE_S, 0.0
        self._ended: dict[int, tuple[float, float | None, float]] = {}  # by iteration: when, reward, lag
        self._began_s = self._published_s = 0.0
        self._evaluations: dict[int, tuple[float | None, int]] = {}
        self._steps: dict[int, dict[str, float]] = {}
        self._decided: deque[tuple[float, Fact]] = deque(maxlen=LAST_DECISIONS)
        self._opened: deque[tuple[float, Fact]] = deque(maxlen=LAST_DECISIONS // 2)
        self._sent: tuple[float, facts.QuantumDispatched] | None = None
        self._begin()

    def _begin(self) -> None:
        """A start of the run: nothing waits, and no worker has said what it has."""
        self._waiting: dict[str, tuple[Phase, int]] = {}
        self._levels: dict[Phase, Counter[int]] = {phase: Counter() for phase in Phase}
        self._capacity: dict[str, tuple[int, int]] = {}
        self._served: dict[str, int] = {}

    # ---------------------------------------------------------------- reading

    def snapshot(self, now_s: float) -> dict[str, Any]:
        """What `libra.observe.page_snapshot` lists, as far as events tell it; JSON-able."""
        ended = sorted(self._ended.items())
        total = [sum(slots) for slots in zip(*self._capacity.values(), strict=True)] or [0, 0]
        return {
            "run": self.run, "epoch": self.epoch, "eta": self.eta, "iterations": self.iterations,
            "uptime_s": round(now_s, 3), "state": "running", "left_s": self.left_s(now_s),
            "iteration": self.iteration,
            "versions": {"published": max(self.published, 0), "served": dict(sorted(self._served.items()))},
            "slots": {
                str(phase): {"used": self.times.in_use(phase), "total": number}
                for phase, number in zip(Phase, total, strict=True)
            },
            "queue": {str(phase): {k: n for k, n in sorted(self._levels[phase].items()) if n} for phase in Phase},
            "quanta": {str(phase): self.quanta[phase] for phase in Phase}, "parts": self.parts,
            "tokens": self.tokens, "groups": self.groups, "failures": dict(self.failures), "resampled": self.resampled,
            "rewards": [[k, reward] for k, (_, reward, _) in ended if reward is not None],
            "lag": [[k, lag] for k, (_, _, lag) in ended],
            "evaluations": [[version, *found] for version, found in sorted(self._evaluations.items())],
            "waves": self.streamed.open_step(),
            "steps": [[step, split] for step, split in sorted(self._steps.items())],
            "decisions": self._decisions(),
            "history": [list(row) for row in self.history],
        }  # fmt: skip

    def left_s(self, now_s: float) -> float | None:
        """Estimated seconds to the end of the last iteration; None before one has ended."""
        if not self._ended:
            return None
        times = sorted(t_s for t_s, _, _ in self._ended.values())[-RATE_INTERVALS - 1 :]
        each_s = (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else times[0] - self._began_s
        left = self.iterations - 1 - max(self._ended)
        return max(0.0, left * each_s - max(0.0, now_s - times[-1])) if left > 0 else 0.0

    def training(self, now_s: float) -> str:
        """What the training workers do with a batch that is complete, since when, and how long the last step took there; ""
        while they wait for trajectories."""
        state, since_s = self.times.training_state()
        if state not in OF_A_BATCH:
            return ""
        last = self._steps[max(self._steps)].get(state) if self._steps else None
        took = f", {last:.0f} s in the last step" if last else ""
        return f"{OF_A_BATCH[state]} for {max(0.0, now_s - since_s):.0f} s{took}"

    def _decisions(self) -> list[list[Any]]:
        """[t_s, what, why] of the last decisions, the newest first."""
        logged = [*self._decided, *self._opened, *([self._sent] if self._sent else [])]
        rows = []
        for t_s, event in sorted(logged, key=lambda each: -each[0]):
            what, why = said(event)
            rows.append([round(t_s, 3), shown_line(what, 200), shown_line(why, 300)])
        return rows

    # ---------------------------------------------------------------- events

    def add(self, line: Line) -> None:
        """Take the next line of the log."""
        event, times = line.fact, self.times
        kind, now_s = type(event), times.time_of(line)
        if self._next_s <= now_s:
            self.sample(now_s)
        times.add(line, now_s)
        if kind is facts.RunStarted:
            self.run = line.run
        if kind in OF_STEPS:  # few: most events are of trajectories
            self.streamed.add(event, now_s)
        handler = _HANDLERS.get(kind)
        if handler is not None:
            handler(self, event)

    def sample(self, now_s: float) -> None:
        """Add the rows of the history that are due by ``now_s``."""
        while self._next_s <= now_s:
            waiting = self._levels[Phase.ROLLOUT]
            bands = [0] * len(BANDS)
            for level, number in waiting.items():
                bands[band(level)] += number
            used = (self.times.in_use(phase) for phase in Phase)
            queued = (self._levels[phase].total() for phase in Phase)
            self.history.append((round(self._next_s, 3), *queued, *used, self.tokens, *bands))
            if len(self.history) > MAX_SAMPLES:
                del self.history[1::2]
                self._interval_s *= 2
            self._next_s = self.history[-1][0] + self._interval_s

    def _run_started(self, event: facts.RunStarted) -> None:
        self.epoch, self.eta, self.policy = event.epoch, event.eta, event.policy
        self.iterations = event.iterations
        self._published_s = -1.0  # what the next version took is not a step's time
        self._begin()

    def _waits(self, key: str, where: tuple[Phase, int] | None) -> None:
        """The trajectory waits for a slot of a phase, at a level; None: it does not wait."""
        if (before := self._waiting.pop(key, None)) is not None:
            phase, level = before
            self._levels[phase][level] -= 1
            if not self._levels[phase][level]:
                del self._levels[phase][level]
        if where is not None:
            self._waiting[key] = where
            self._levels[where[0]][where[1]] += 1

    def _parked(self, event: facts.TrajectoryParked) -> None:
        self._waits(event.key, (event.phase, 0))

    def _priority_set(self, event: facts.SetPriority) -> None:
        if (before := self._waiting.get(event.key)) is not None:
            self._waits(event.key, (before[0], _level(event.priority)))

    def _dispatched(self, event: facts.QuantumDispatched) -> None:
        self._waits(event.key, None)
        self._sent = self.times.now_s, event

    def _finished(self, event: facts.QuantumFinished) -> None:
        self.quanta[str(event.phase)] += 1
        self.parts += event.unfinished
        self.tokens += event.tokens

    def _group_committed(self, event: facts.GroupCommitted) -> None:
        if event.split == "train":
            self.groups += 1
            self.failures.update(event.failures)
            self.resampled += event.resampled

    def _gate_opened(self, event: facts.OpenGate) -> None:
        if self.iteration < 0:
            self._began_s = self.times.now_s
        self.iteration = max(self.iteration, event.iteration)
        self._opened.append((self.times.now_s, event))

    def _version_published(self, event: facts.VersionPublished) -> None:
        now_s = self.times.now_s
        if event.version > self.published >= 0 and self._published_s >= 0:
            self._steps[event.version - 1] = {
                state: round(seconds, 6)
                for state, seconds in self.times.training_split(self._published_s, now_s).items()
            }
            while len(self._steps) > MAX_STEPS:
                del self._steps[min(self._steps)]
        self.published, self._published_s = max(self.published, event.version), now_s

    def _iteration_finished(self, event: facts.IterationFinished) -> None:
        self._ended[event.iteration] = self.times.now_s, event.reward, event.lag

    def _evaluated(self, event: facts.EvaluationFinished) -> None:
        self._evaluations[event.version] = event.reward, event.prompts

    def _capacity_told(self, event: facts.WorkerCapacity) -> None:
        self._capacity[event.worker] = event.rollout_slots, event.tool_slots

    def _version_served(self, event: facts.VersionServed) -> None:
        self._served[event.worker] = event.version

    def _withdrawn(self, event: facts.WorkerWithdrawn | facts.WorkerSetupFailed) -> None:
        self._capacity.pop(event.worker, None)
        self._served.pop(event.worker, None)

    def _noted(self, event: Fact) -> None:
        self._decided.append((self.times.now_s, event))

    def _role_change_started(self, event: facts.RoleChangeStarted) -> None:
        if not self.streamed.is_turn(event.generation):  # a turn has a line with the same reason
            self._noted(event)

    def _setup_failed(self, event: facts.WorkerSetupFailed) -> None:
        self._withdrawn(event)
        self._noted(event)

    def _role_changed(self, event: facts.RoleChanged) -> None:
        if event.to_role != "rollout":
            self._served.pop(event.worker, None)
        self._noted(event)


def _level(priority: Sequence[int]) -> int:
    """The policy's level in a priority (deadline, level, order); 0 of a policy without levels."""
    return int(priority[1]) if len(priority) > 1 else 0


_HANDLERS: Final[Mapping[type[Fact], Callable[[RunFacts, Any], None]]] = {
    **dict.fromkeys((*DECISIONS, *TURNS, *TROUBLES), RunFacts._noted),
    facts.RunStarted: RunFacts._run_started,
    facts.TrajectoryParked: RunFacts._parked,
    facts.SetPriority: RunFacts._priority_set,
    facts.QuantumDispatched: RunFacts._dispatched,
    facts.QuantumContinued: lambda self, event: self._waits(event.key, None),
    facts.PlacementVoid: lambda self, event: self._waits(event.key, None),
    facts.TrajectoryEnded: lambda self, event: self._waits(event.key, None),
    facts.QuantumFinished: RunFacts._finished,
    facts.GroupCommitted: RunFacts._group_committed,
    facts.OpenGate: RunFacts._gate_opened,
    facts.OpenBatch: lambda self, event: self._opened.append((self.times.now_s, event)),
    facts.LateRewardsTaken: lambda self, event: self._opened.append((self.times.now_s, event)),
    facts.VersionPublished: RunFacts._version_published,
    facts.IterationFinished: RunFacts._iteration_finished,
    facts.EvaluationFinished: RunFacts._evaluated,
    facts.WorkerCapacity: RunFacts._capacity_told,
    facts.VersionServed: RunFacts._version_served,
    facts.WorkerWithdrawn: RunFacts._withdrawn,
    facts.WorkerSetupFailed: RunFacts._setup_failed,
    facts.RoleChangeStarted: RunFacts._role_change_started,
    facts.RoleChanged: RunFacts._role_changed,
}

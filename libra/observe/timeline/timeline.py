"""The timeline of a run from its facts, the same live in the scheduler and from the log.

1. Nothing here reads a clock: time comes with facts and with `Timeline.sample`.
2. ``history`` has at most ``MAX_SAMPLES`` evenly spaced rows: when full, every second row is
   dropped.
3. An iteration that a resumed run repeats counts once: curves are by iteration.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any, Final

from libra import facts
from libra.facts import Fact, Line, said
from libra.observe.timeline.states import Places, busy_frac
from libra.observe.timeline.steps import Steps
from libra.observe.timeline.worker_times import OF_TRAJECTORIES, WorkerTimes
from libra.types import Phase
from libra.untrusted import shown_line

DECISIONS: Final = (
    facts.LayoutPlanned, facts.PlanConsidered, facts.PlanAccepted, facts.PlanBlocked, facts.PlanRealised,
    facts.RoleChangeStarted, facts.RoleChanged, facts.RoleRestored, facts.RoleChangeFailed, facts.RoleChangeCancelled,
    facts.SlotsSet, facts.BoundariesSet, facts.StepsPlanned, facts.TakeSteps,
)  # fmt: skip
LATE: Final = (facts.LateRewardsTaken,)
TROUBLES: Final = (
    facts.WorkerLost, facts.WorkerSetupFailed, facts.EngineQuarantined, facts.StallDetected,
    facts.GangLost, facts.RoleMemberFailed, facts.MismatchFound,
)  # fmt: skip
BUSY_WINDOW_S: Final = 60.0
"""Window in seconds for the "now" figure of busy worker time."""
NOTED: Final = (*DECISIONS, facts.Turn, facts.TurnRefused, *TROUBLES)
"""Facts listed among the page's last decisions, beside gates, batches and dispatches."""
SAMPLE_S: Final = 0.5
"""Initial seconds between two rows of the history."""
MAX_SAMPLES: Final = 1200
MAX_STEPS: Final = 400
"""Steps with a kept split."""
LAST_DECISIONS: Final = 8
"""Kept decisions and failures; half as many gates and batches."""
RATE_INTERVALS: Final = 10
"""Iterations whose mean duration gives the estimated end of the run."""
BANDS: Final = ("overdue", "level 0–1", "level 2–10", "level 11–40", "level 41 and later")
_BAND_TOPS: Final = (-1, 1, 10, 40)


def band(level: int) -> int:
    """Index in `BANDS` of a policy level."""
    return bisect_left(_BAND_TOPS, level)


OF_A_BATCH: Final = {
    "grading": "grading and committing",
    "batch": "reading the batch",
    "training": "training",
    "moving": "publishing the weights",
}
"""States of training workers between a batch's last trajectory and the next iteration, as text."""


class Timeline:
    """Counts, curves, worker time and steps of a run, fact by fact.

    ``trainers`` and ``keep`` are as in `WorkerTimes`. ``quanta`` counts finished quanta by phase,
    ``parts`` unfinished generations (`rollout.chunk_tokens`). Rows of ``history`` are (t_s,
    queued_rollout, queued_tool, used_rollout, used_tool, tokens, waiting for ROLLOUT in each of
    `BANDS`).
    """

    def __init__(self, trainers: Sequence[str] = (), *, keep: int | None = None) -> None:
        self.places, self.steps = Places(), Steps()
        self.workers = WorkerTimes(self.places, trainers, keep=keep)
        self.run = self.policy = ""
        self.epoch = self.eta = self.iterations = 0
        self.iteration, self.published = -1, -1
        self.tokens = self.groups = self.resampled = self.parts = 0
        self.quanta: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        self.history: list[tuple[float, ...]] = []
        self._base_s = self._next_s = 0.0
        self._interval_s = SAMPLE_S
        self._ended: dict[int, tuple[float, float | None, float]] = {}  # by iteration: end, reward, lag
        self._began_s = self._published_s = 0.0
        self._evaluations: dict[int, tuple[float | None, int]] = {}
        self._steps: dict[int, dict[str, float]] = {}
        self._decided: deque[tuple[float, Fact]] = deque(maxlen=LAST_DECISIONS)
        self._opened: deque[tuple[float, Fact]] = deque(maxlen=LAST_DECISIONS // 2)
        self._sent: tuple[float, facts.QuantumDispatched] | None = None
        self._capacity: dict[str, tuple[int, int]] = {}
        self._served: dict[str, int] = {}

    @property
    def now_s(self) -> float:
        """Time of the newest fact over all starts of the run, without pauses between starts."""
        return self.workers.now_s

    # ---------------------------------------------------------------- reading

    def snapshot(self, now_s: float) -> dict[str, Any]:
        """The fact-based part of a snapshot (`libra.observe.page_snapshots`), JSON-able."""
        ended = sorted(self._ended.items())
        total = [sum(slots) for slots in zip(*self._capacity.values(), strict=True)] or [0, 0]
        return {
            "run": self.run, "epoch": self.epoch, "eta": self.eta, "iterations": self.iterations,
            "uptime_s": round(now_s, 3), "state": "running", "left_s": self.left_s(now_s),
            "iteration": self.iteration,
            "versions": {"published": max(self.published, 0), "served": dict(sorted(self._served.items()))},
            "slots": {
                str(phase): {"used": self.places.used[phase], "total": number}
                for phase, number in zip(Phase, total, strict=True)
            },
            "queue": {str(phase): dict(sorted(self.places.levels[phase].items())) for phase in Phase},
            "quanta": {str(phase): self.quanta[phase] for phase in Phase}, "parts": self.parts,
            "tokens": self.tokens, "groups": self.groups, "failures": dict(self.failures), "resampled": self.resampled,
            "rewards": [[k, reward] for k, (_, reward, _) in ended if reward is not None],
            "lag": [[k, lag] for k, (_, _, lag) in ended],
            "evaluations": [[version, *found] for version, found in sorted(self._evaluations.items())],
            "waves": self.steps.open_step(),
            "steps": [[step, split] for step, split in sorted(self._steps.items())],
            "decisions": self._decisions(), "time": self.worker_time(now_s),
            "history": [list(row) for row in self.history],
        }  # fmt: skip

    def worker_time(self, now_s: float) -> dict[str, Any]:
        """Worker time over the run and over the last `BUSY_WINDOW_S`, JSON-able.

        ``until_s``, ``busy_frac``, ``now_busy_frac`` (None without time), ``shares``,
        ``now_shares`` {state: share}, ``workers``: [{"worker", "kind", "state" (empty after it
        left), "busy_frac", "slots_used_frac" (None without slots), "seconds": {state: s}}, ...].
        """
        whole, states = self.workers.times(now_s), self.workers.states()
        now = self.workers.times(now_s, max(now_s - BUSY_WINDOW_S, 1e-9))
        return {
            "until_s": whole.until_s, "busy_frac": whole.busy_frac, "now_busy_frac": now.busy_frac,
            "shares": whole.shares, "now_shares": now.shares,
            "workers": [
                {
                    "worker": each.worker, "kind": each.kind, "state": states.get(each.worker, ""),
                    "busy_frac": busy_frac(each.seconds) or 0.0, "slots_used_frac": each.slots_used_frac,
                    "seconds": dict(each.seconds),
                }
                for each in whole.workers
            ],
        }  # fmt: skip

    def left_s(self, now_s: float) -> float | None:
        """Estimated seconds to the end of the last iteration; None before an iteration has ended."""
        if not self._ended:
            return None
        times = sorted(t_s for t_s, _, _ in self._ended.values())[-RATE_INTERVALS - 1 :]
        each_s = (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else times[0] - self._began_s
        left = self.iterations - 1 - max(self._ended)
        return max(0.0, left * each_s - max(0.0, now_s - times[-1])) if left > 0 else 0.0

    def training(self, now_s: float) -> str:
        """Activity of training workers with a complete batch; "" without a batch."""
        state, since_s = self.workers.training_state()
        if state not in OF_A_BATCH:
            return ""
        last = self._steps[max(self._steps)].get(state) if self._steps else None
        took = f", {last:.0f} s in the last step" if last else ""
        return f"{OF_A_BATCH[state]} for {max(0.0, now_s - since_s):.0f} s{took}"

    def _decisions(self) -> list[list[Any]]:
        logged = [*self._decided, *self._opened, *([self._sent] if self._sent else [])]
        words = ((t_s, *said(fact)) for t_s, fact in sorted(logged, key=lambda each: -each[0]))
        return [[round(t_s, 3), shown_line(what, 200), shown_line(why, 300)] for t_s, what, why in words]

    # ---------------------------------------------------------------- facts

    def add(self, line: Line) -> None:
        """Process the next log line."""
        fact, workers = line.fact, self.workers
        kind, now_s = type(fact), workers.now_s
        if kind is facts.RunStarted:
            self._base_s = now_s
        if (now_s := max(now_s, self._base_s + line.t_s)) >= self._next_s:
            self.sample(now_s)
        if kind is facts.RunStarted:
            self.run = line.run
            workers.started()
        workers.now_s = now_s
        match fact:
            case facts.SetPriority():
                self.places.ranked(fact.key, fact.priority)
            case facts.Prefer():
                pass
            case facts.PlacementVoid():
                self.places.waits(fact.key, None)
            case _ if kind in OF_TRAJECTORIES:
                workers.take(fact)
                if kind is facts.QuantumFinished:
                    self._finished(fact)  # type: ignore[arg-type]
                elif kind is facts.QuantumDispatched:
                    self._sent = now_s, fact  # type: ignore[assignment]
                elif kind is facts.TrajectoryEnded:
                    self.steps.measure(fact, now_s)
            case _:
                workers.take(fact)
                self.steps.add(fact, now_s)
                self.steps.measure(fact, now_s)
                self._progressed(fact)
                self._changed(fact)

    def measured(self, version: int, now_s: float) -> facts.StepMeasured | None:
        """The step that publishes ``version`` at ``now_s``; None if unmeasured or partly unseen."""
        steps = self.steps
        if not steps.train_gpus:
            return None
        return steps.measured(version - 1, now_s, self.workers.times(since_s=steps.since_s))

    def sample(self, now_s: float) -> None:
        """Add the history rows due by ``now_s``."""
        places = self.places
        while self._next_s <= now_s:
            bands = [0] * len(BANDS)
            for level, number in places.levels[Phase.ROLLOUT].items():
                bands[band(level)] += number
            queued = (places.levels[phase].total() for phase in Phase)
            used = (places.used[phase] for phase in Phase)
            self.history.append((round(self._next_s, 3), *queued, *used, self.tokens, *bands))
            if len(self.history) > MAX_SAMPLES:
                del self.history[1::2]
                self._interval_s *= 2
            self._next_s = self.history[-1][0] + self._interval_s

    def _finished(self, fact: facts.QuantumFinished) -> None:
        self.steps.measure(fact, self.now_s)
        self.quanta[str(fact.phase)] += 1
        self.parts += fact.unfinished
        self.tokens += fact.tokens
        if (found := self.places.open.get(fact.key)) is not None:
            found.tokens += fact.tokens

    def _progressed(self, fact: Fact) -> None:
        now_s = self.now_s
        match fact:
            case facts.RunStarted():
                self.epoch, self.eta, self.policy = fact.epoch, fact.eta, fact.policy
                self.iterations = fact.iterations
                self._published_s = -1.0  # the next version's time is not a step's
                self._capacity.clear()
                self._served.clear()
            case facts.GroupCommitted(split="train"):
                self.groups += 1
                self.failures.update(fact.failures)
                self.resampled += fact.resampled
            case facts.OpenGate():
                self._began_s = now_s if self.iteration < 0 else self._began_s
                self.iteration = max(self.iteration, fact.iteration)
                self._opened.append((now_s, fact))
            case facts.OpenBatch() | facts.LateRewardsTaken():
                self._opened.append((now_s, fact))
            case facts.VersionPublished():
                if fact.version > self.published >= 0 and self._published_s >= 0:
                    split = self.workers.training_split(self._published_s, now_s)
                    self._steps[fact.version - 1] = {state: round(seconds, 6) for state, seconds in split.items()}
                    while len(self._steps) > MAX_STEPS:
                        del self._steps[min(self._steps)]
                self.published, self._published_s = max(self.published, fact.version), now_s
            case facts.IterationFinished():
                self._ended[fact.iteration] = now_s, fact.reward, fact.lag
            case facts.EvaluationFinished():
                self._evaluations[fact.version] = fact.reward, fact.prompts

    def _changed(self, fact: Fact) -> None:
        match fact:
            case facts.WorkerCapacity():
                self._capacity[fact.worker] = fact.rollout_slots, fact.tool_slots
            case facts.VersionServed():
                self._served[fact.worker] = fact.version
            case facts.WorkerWithdrawn() | facts.WorkerSetupFailed():
                self._capacity.pop(fact.worker, None)
                self._served.pop(fact.worker, None)
            case facts.RoleChanged() if fact.to_role != "rollout":
                self._served.pop(fact.worker, None)
        of_switch = isinstance(fact, facts.RoleChangeStarted) and self.steps.is_switching(fact.generation)
        if isinstance(fact, NOTED) and not of_switch:  # the switch has its own line with the same reason
            self._decided.append((self.now_s, fact))

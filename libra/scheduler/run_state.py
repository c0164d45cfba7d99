"""What the plugin knows of one run and of each trajectory in it."""

from __future__ import annotations

import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from libra.events import SCHEMA, PolicySnapshot, to_json
from libra.events.lines import Lines
from libra.keys import Key
from libra.policy import Admission, Inspectable, OnlineLearner, Ordering, learns_after
from libra.scheduler.version_holders import Holders
from libra.store.event_log import EventLog
from libra.types import EndReason, Phase

if TYPE_CHECKING:
    from libra.scheduler.stall_watchdog import StallGuard

HISTORY_ROWS = 1200
"""Rows kept for the dashboard's plots: ten minutes at two a second."""


KEPT_BLOCKS = 8192
"""Groups of which it is known who keeps their rows."""
SNAPSHOT_EVENTS = 10_000
"""Events between two snapshots of the policy objects in the event log: a replay of its tail reads about as many."""
SNAPSHOT_BYTES_PER_EVENT = 12
"""A large snapshot is written more seldom: about this many bytes for each event since the last, whose line has 250."""


@dataclass(slots=True)
class Tracked:
    """A trajectory key the plugin has seen parked."""

    key: str
    parsed: Key
    run: RunState
    phase: Phase = Phase.ROLLOUT
    quanta: int = 0
    reported: bool = False  # whether the quantum now running has reported
    given_back: bool = False  # whether the quantum now running was handed back instead, without a record
    lost: int = 0  # quanta in a row that ended without a report
    ended: bool = False
    at: tuple[Phase, str] | None = None  # phase and address of the slot it has
    worker: str = ""  # name of the worker where it has, or last had, a slot
    context_tokens: int = 0  # as of its last report; 0 before
    end: str = ""  # why it ended, as reported
    told_ended: bool = False  # whether the policy knows that it is over
    told_completed: bool = False  # and that it came to an end of its own, which it is told once
    group: str = ""  # as policies know it: split, iteration, number

    def __post_init__(self) -> None:
        self.group = "-".join(map(str, (self.parsed.split, *self.parsed.indices[:2])))

    @property
    def completed(self) -> bool:
        """Whether it came to an end of its own."""
        return self.end not in ("", str(EndReason.FAILURE))

    def found_ended(self, quanta: int, worker: str, end: str) -> None:
        """It was sent to a worker and had ended before: no quantum was run, and none is counted."""
        self.reported, self.lost, self.ended, self.quanta, self.end = True, 0, True, quanta, end
        self.run.emit("trajectory_found_ended", key=self.key, quanta=quanta, worker=worker, end=end)


@dataclass(slots=True)
class RunState:
    """Everything of one run that lives in the scheduler; made anew by ``libra_register_run``."""

    run: str
    epoch: int
    directory: Path
    eta: int
    iterations: int
    admission: Admission
    policy: Ordering
    log: EventLog | None
    family: str = ""  # of all its trajectories: the name of their environment
    started_s: float = field(default_factory=time.time)
    iteration: int = -1
    gates: dict[int, str] = field(default_factory=dict)
    eval_gates: dict[int, list[str]] = field(default_factory=dict)
    batches: dict[int, str] = field(default_factory=dict)
    served: dict[str, int] = field(default_factory=dict)
    engines: dict[str, str] = field(default_factory=dict)  # address of each worker that has served a version, by name
    holders: Holders = field(default_factory=Holders)
    blocks: OrderedDict[tuple[int, ...], dict[str, Any]] = field(
        default_factory=OrderedDict
    )  # who holds a group's rows
    quarantined: set[str] = field(default_factory=set)  # addresses whose engine serves nothing now
    joining: set[str] = field(
        default_factory=set
    )  # addresses that joined in mid-run, whose part of it is not set up yet
    asleep: set[str] = field(default_factory=set)  # addresses whose engine sleeps, or is about to
    quanta: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    groups: int = 0
    rewards: list[tuple[int, float]] = field(default_factory=list)
    lags: list[tuple[int, float]] = field(default_factory=list)
    history: deque[tuple[float, int, int, int, int, int]] = field(default_factory=lambda: deque(maxlen=HISTORY_ROWS))

    guard: StallGuard | None = None
    last_event: tuple[float, str, dict[str, Any]] = (0.0, "none", {})  # when, its name, its fields or the key
    lines: Lines = field(init=False)
    num_events: int = 0
    num_ended: int = 0  # trajectories that are over
    learned_ended: int = 0  # of those, how many when the policy last learned
    next_snapshot: int = 0  # number of events from which on one is due

    def __post_init__(self) -> None:
        self.lines = Lines(self.run, SCHEMA)

    @property
    def uptime_s(self) -> float:
        """Seconds since the run was registered."""
        return time.time() - self.started_s

    def sample(self, waiting: Mapping[Phase, int], used: Mapping[Phase, int]) -> None:
        """Twice a second: a row for the dashboard's plots, and everything logged so far to the disk."""
        row = (waiting[Phase.ROLLOUT], waiting[Phase.TOOL], used[Phase.ROLLOUT], used[Phase.TOOL], self.tokens)
        self.history.append((round(self.uptime_s, 3), *row))
        self.emit_snapshot_if_due()
        if self.log is not None:
            self.log.flush()

    def emit(self, name: str, **fields: Any) -> None:
        """Append one event of `libra.events` to the run's event log, where it keeps one; the frequent ones go to `note`."""
        t_s = round(time.time() - self.started_s, 6)
        self.last_event = (t_s, name, fields)
        if self.log is not None:
            self.num_events += 1
            self.log.write({"schema": SCHEMA, "name": name, "run": self.run, "t_s": t_s, **fields})

    def note(self, line: Callable[..., str], key: str, *rest: Any) -> None:
        """Append one event of a kind that comes many times a second: ``line`` is the method of `lines` that writes it."""
        t_s = round(time.time() - self.started_s, 6)
        self.last_event = (t_s, line.__name__, {"key": key})
        if self.log is not None:
            self.num_events += 1
            self.log.write_line(line(t_s, key, *rest))

    def holds(self, iteration: int, group: int, block: dict[str, Any] | None) -> None:
        """Somebody keeps the rows of a group in memory (None: nobody does); the newest are remembered."""
        if block is not None:
            self.blocks[iteration, group] = block
            while len(self.blocks) > KEPT_BLOCKS:
                self.blocks.popitem(last=False)

    def learn(self) -> None:
        """Have the policy do the dear part of its learning, where enough has finished since the last time."""
        if self.num_ended >= self.learned_ended + learns_after(self.learned_ended) and isinstance(
            self.policy, OnlineLearner
        ):
            self.learned_ended = self.num_ended
            began_s = time.perf_counter()
            self.policy.learn()
            self.emit("policy_learned", seconds=round(time.perf_counter() - began_s, 6))

    def progressed(self) -> None:
        """Something of the run went on: the watchdog, where there is one, is at ease."""
        if self.guard is not None:
            self.guard.progressed()

    def close(self) -> None:
        """The run is over here; what its tasks still do is no event of it."""
        if self.guard is not None:
            self.guard.stop()
        log, self.guard, self.log = self.log, None, None
        if log is not None:
            log.close()

    def last_event_text(self) -> str:
        """The last event and how long ago it was."""
        t_s, event, fields = self.last_event
        what = [event, *(str(fields[name]) for name in ("key", "iteration", "address") if name in fields)]
        return f"{' '.join(what)}, {self.uptime_s - t_s:.0f} s ago"

    def emit_snapshot_if_due(self) -> None:
        """Write a snapshot where enough has happened since the last; see `emit_snapshot`."""
        if self.num_events >= self.next_snapshot:
            self.emit_snapshot()

    def emit_snapshot(self) -> None:
        """Write down what the policy objects know. Call it between events, never between one and its commands."""
        if self.log is None:
            return
        t_s, order, admission = round(self.uptime_s, 6), self.policy.snapshot(), self.admission.snapshot()
        line = to_json(PolicySnapshot(self.run, t_s, self.policy.name, self.family, order, admission))
        self.log.write_line(line)
        self.num_events += 1
        self.next_snapshot = self.num_events + max(SNAPSHOT_EVENTS, len(line) // SNAPSHOT_BYTES_PER_EVENT)

    def shown(
        self, slots: dict[str, dict[str, int]], queue: dict[str, dict[int, int]], buckets: list[dict[str, Any]]
    ) -> dict[str, Any]:
        """The run as the dashboard page shows it; ``slots`` and ``queue`` are by phase, ``buckets`` `Dispatcher.buckets`."""
        nothing: dict[str, Any] = {"objective": "", "skill": None, "weights": {}, "outcomes": []}
        return {
            "run": self.run,
            "epoch": self.epoch,
            "uptime_s": round(self.uptime_s, 3),
            "eta": self.eta,
            "iterations": self.iterations,
            "iteration": self.iteration,
            "versions": {"published": self.admission.version, "served": dict(self.served)},
            "slots": slots,
            "queue": queue,
            "buckets": buckets,
            "policy": {
                "name": self.policy.name,
                **(self.policy.shown() if isinstance(self.policy, Inspectable) else nothing),
            },
            "quanta": {str(phase): self.quanta[phase] for phase in Phase},
            "tokens": self.tokens,
            "groups": self.groups,
            "failures": dict(self.failures),
            "rewards": [list(row) for row in self.rewards],
            "lag": [list(row) for row in self.lags],
            "history": [list(row) for row in self.history],
        }

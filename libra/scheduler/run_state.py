"""The plugin's state of one run and of each trajectory in it."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self
from urllib.parse import urlsplit

import msgspec

from libra import facts
from libra.config import config_from_dict
from libra.config.streaming import most_waves
from libra.errors import RecordExists, StoreError
from libra.facts import ToolNeeds
from libra.keys import Key
from libra.policy import (
    Admission,
    Inspectable,
    OneVersion,
    OnlineLearner,
    Ordering,
    Tail,
    TailSettings,
    Waves,
    WayChoice,
    WaySettings,
    keeps_version,
    learns_after,
    staleness_of,
)
from libra.policy.run_policies import RunPolicies
from libra.scheduler.run_log import RunLog
from libra.store.quantum_records import FailureRecord
from libra.store.run_records import read_batch
from libra.store.trajectory_journal import Journal
from libra.types import EndReason, FailureClass, Phase, TrajectoryId

if TYPE_CHECKING:
    from libra.config import RunConfig

task_logger = logging.getLogger("libra.scheduler.tasks")

KEPT_NOTICES = 100  # maximum number of notices kept: a driver reads once a second
KEPT_BLOCKS = 8192  # groups for which the worker that keeps their rows is recorded


class RunRegistration(msgspec.Struct, frozen=True, forbid_unknown_fields=True, dict=True):
    run: str
    epoch: int
    directory: str
    config: dict[str, Any] = msgspec.field(default_factory=dict)  # as plain data; see `settings`
    tools: dict[str, ToolNeeds] = msgspec.field(default_factory=dict)  # with resources
    watchdog_floors_s: dict[str, float] = msgspec.field(default_factory=dict)  # of time-outs
    restored: dict[str, Any] | None = None  # `Admission.snapshot` of a resumed run
    learned: str | None = None  # snapshot of its ordering, as JSON
    local: bool = False  # the driver started this cluster
    client: str = ""  # Dask's id of the driver's client

    @cached_property
    def settings(self) -> RunConfig:
        """The run's configuration; ConfigError if it is invalid."""
        # Dask's wire makes tuples of lists, and a configuration has lists.
        return config_from_dict(json.loads(json.dumps(self.config)))

    def admission(self) -> Admission:
        """The run's staleness bookkeeping, as earlier starts left it."""
        config = self.settings
        first_come = config.trainer.batches == "first_come"
        made = Admission(staleness_of(config), config.trainer.prompts, Waves.of(config), first_come=first_come)
        if self.restored is not None:
            made.restore(self.restored)
        return made


Handler = Callable[["RunState", Any, str], None]  # run, fact, sender's address


def process_name() -> str:
    return f"{socket.gethostname()}:{os.getpid()}"


class Notices:
    """Notices for the driver's terminal, numbered from 0, read with `libra_notices`."""

    def __init__(self) -> None:
        self._kept: deque[tuple[int, str]] = deque(maxlen=KEPT_NOTICES)
        self._next = 0

    def warn(self, logger: logging.Logger, text: str, level: int = logging.WARNING) -> None:
        """Write a line to the log of the scheduler's process, and to the driver's terminal."""
        logger.log(level, "%s", text)
        self._kept.append((self._next, text))
        self._next += 1

    def since(self, first: int) -> list[tuple[int, str]]:
        return [notice for notice in self._kept if notice[0] >= first]


class Holders:
    """Present workers that hold each version of a run's weights, as they reported.

    Nearest first: the worker's own host, then other rollout workers, then the trainer. Among equals
    the least often named worker comes first, so that a version spreads as a tree.
    """

    def __init__(self) -> None:
        self._at: dict[str, tuple[str, int]] = {}  # host and port of its weight server
        self._trainers: set[str] = set()
        self._versions: dict[int, set[str]] = {}
        self._digests: dict[int, str] = {}
        self._named: Counter[str] = Counter()

    def offers(self, worker: str, at: tuple[str, int] | None, *, trains: bool = False) -> None:
        if at is not None:
            self._at[worker] = at
            if trains:
                self._trainers.add(worker)

    def has(self, worker: str, version: int, digest: str = "") -> None:
        self._versions.setdefault(version, set()).add(worker)
        if digest:
            self._digests[version] = digest

    def digest(self, version: int) -> str | None:
        return self._digests.get(version)

    def lost(self, worker: str) -> None:
        self._at.pop(worker, None)
        self._trainers.discard(worker)
        for holders in self._versions.values():
            holders.discard(worker)

    def nearest(self, version: int, worker: str) -> list[tuple[str, int]]:
        """Servers from which ``worker`` should fetch ``version``, nearest first."""
        here = urlsplit(worker).hostname
        found = [other for other in self._versions.get(version, ()) if other != worker and other in self._at]
        found.sort(key=lambda at: (urlsplit(at).hostname != here, at in self._trainers, self._named[at], at))
        if found:
            self._named[found[0]] += 1
        return [self._at[other] for other in found]


@dataclass(slots=True)
class ParkedNodes:
    """Keys of waiting gates (by iteration or version), batches and waves."""

    gates: dict[int, str] = field(default_factory=dict)
    eval_gates: dict[int, list[str]] = field(default_factory=dict)
    batches: dict[int, str] = field(default_factory=dict)
    waves: dict[tuple[int, int], str] = field(default_factory=dict)


@dataclass(slots=True)
class RunWorkers:
    """A run's workers by name; ``blocks``: where rows are in memory, by (iteration, group)."""

    served: dict[str, int] = field(default_factory=dict)
    engines: dict[str, str] = field(default_factory=dict)
    holders: Holders = field(default_factory=Holders)
    blocks: OrderedDict[tuple[int, ...], dict[str, Any]] = field(default_factory=OrderedDict)
    kv: dict[str, tuple[str, int]] = field(default_factory=dict)

    def keeps_rows(self, iteration: int, group: int, block: dict[str, Any] | None) -> None:
        if block is not None:
            self.blocks[iteration, group] = block
            while len(self.blocks) > KEPT_BLOCKS:
                self.blocks.popitem(last=False)


@dataclass(slots=True)
class RunState(RunPolicies):
    registration: RunRegistration
    log: RunLog
    parked: ParkedNodes = field(default_factory=ParkedNodes)
    workers: RunWorkers = field(default_factory=RunWorkers)
    notices: Notices = field(default_factory=Notices)
    num_ended: int = 0
    learned_ended: int = 0  # as of the policy's last update
    sessions: Counter[str] = field(default_factory=Counter)  # by name in `SessionCounts`
    revoked: int = 0  # actions stopped for others

    @classmethod
    def of(cls, registration: RunRegistration, ordering: Ordering, log: RunLog) -> Self:
        config, admission = registration.settings, registration.admission()
        one = OneVersion(rounded=config.staleness.engines == "rounded") if keeps_version(config) else None
        return cls(ordering, admission, Tail(admission, TailSettings.of(config)), one, registration, log)

    @property
    def family(self) -> str:
        return self.settings.environment.name

    def numbers(self) -> dict[str, float]:
        """Metrics that only the scheduler knows: forecast skill, sessions, revoked actions."""
        found: dict[str, float] = {f"sessions_{name}": count for name, count in self.sessions.items()}
        if any(needs.revocable for needs in self.registration.tools.values()):
            found["actions_revoked"] = self.revoked
        row = self.policy.dashboard_row() if isinstance(self.policy, Inspectable) else None
        if row is not None and row["skill"] is not None:
            found |= {f"forecast_weight_{signal}": weight for signal, weight in row["weights"].items()}
            found["forecast_skill"] = row["skill"]
        return found

    @property
    def settings(self) -> RunConfig:
        return self.registration.settings

    @property
    def run(self) -> str:
        return self.registration.run

    @property
    def epoch(self) -> int:
        return self.registration.epoch

    @property
    def directory(self) -> Path:
        return Path(self.registration.directory)

    def members(self, batch: int) -> list[list[int]]:
        """Groups of an opened batch, as [iteration, group]."""
        members = self.admission.opened.get(batch)
        if members is None:  # opened long before: it is committed
            ids = read_batch(self.directory / "batches", batch)
            members = tuple(dict.fromkeys((each.iteration, each.group) for each in ids))
        return [list(member) for member in members]

    def waves(self, batch: int) -> list[list[list[int]]]:
        """Groups of each wave of a batch, as [iteration, group]; empty for batches long past."""
        return [[list(member) for member in wave] for wave in self.admission.waves.opened.get(batch, ())]

    def begin(self) -> None:
        config, choice = self.settings, WaySettings.of(self.settings)
        run, groups = config.run, config.trainer.prompts
        started = facts.RunStarted(self.epoch, run.eta, run.iterations, groups, self.policy.name, self.family)
        self.log.emit(started)
        if choice is not None:
            self.admission.ways = WayChoice(choice, config.run.eta, most_waves(config))
            self.log.timeline.steps.train_gpus = choice.train_gpus
        self.emit_snapshot()
        if choice is not None:
            self.log.emit(facts.StepsPlanned(ways=choice.ways, way=choice.way, reason=choice.reason))

    def sample(self) -> None:
        """Called twice a second: sample the dashboard's plots, and write the log to disk."""
        self.log.timeline.sample(self.log.uptime_s)
        if self.log.snapshot_is_due:
            self.emit_snapshot()
        self.log.flush()

    def emit_snapshot(self) -> None:
        self.log.emit_snapshot(self, self.family)

    def learn(self) -> None:
        due = self.num_ended >= self.learned_ended + learns_after(self.learned_ended)
        if due and isinstance(self.policy, OnlineLearner):
            self.learned_ended = self.num_ended
            began_s = time.perf_counter()
            self.policy.learn()
            self.log.emit(facts.PolicyLearned(seconds=round(time.perf_counter() - began_s, 6)))

    def dashboard_row(self, buckets: list[dict[str, Any]]) -> dict[str, Any]:
        nothing: dict[str, Any] = {"objective": "", "skill": None, "weights": {}, "outcomes": []}
        policy = self.policy.dashboard_row() if isinstance(self.policy, Inspectable) else nothing
        snapshot = self.log.timeline.snapshot(self.log.uptime_s)
        return snapshot | {"buckets": buckets, "policy": {"name": self.policy.name, **policy}}


@dataclass(slots=True)
class Tracked:
    key: str
    parsed: Key
    run: RunState
    phase: Phase = Phase.ROLLOUT
    quanta: int = 0
    outcome: Literal["", "reported", "given_back", "revoked"] = ""  # of the running quantum
    lost: int = 0  # quanta in a row without a report
    ended: bool = False
    at: tuple[Phase, str] | None = None  # phase and address of its slot
    worker: str = ""  # name, of its last slot too
    context_tokens: int = 0  # as of its last report
    end: str = ""  # why it ended, as reported
    policy_ended: bool = False  # the policy knows that it ended
    policy_completed: bool = False  # and that it completed
    group: str = ""  # split-iteration-number
    calls: tuple[str, ...] = ()  # tools of its next action, if one has resources
    parked_s: float = 0.0  # monotonic
    leased: tuple[int, float] | None = None  # cores of its action, seconds it waited for them

    def __post_init__(self) -> None:
        self.group = "-".join(map(str, (self.parsed.split, *self.parsed.indices[:2])))
        self.begin()

    def begin(self) -> None:
        self.phase = Phase.TOOL if self.run.settings.agent.given else Phase.ROLLOUT

    @property
    def completed(self) -> bool:
        return self.end not in ("", str(EndReason.FAILURE))

    def end_attempt(self, address: str) -> bool:
        """Record a ``worker`` failure: a quantum killed its workers. False if it has no record."""
        iteration, group, sample = self.parsed.indices
        tid = TrajectoryId(iteration, group, sample, self.parsed.split)
        detail = f"quantum {self.quanta} was lost {self.lost} times, the last time with {address}"
        record = FailureRecord(failure=FailureClass.WORKER, detail=detail, worker=address, epoch=self.run.epoch)
        journal, written = Journal(self.run.directory / "journal"), 1
        try:
            journal.append(str(tid), self.quanta, record)
            self.run.log.emit(facts.FailureClassified(self.key, str(FailureClass.WORKER), detail))
        except RecordExists:  # only its report was lost
            with contextlib.suppress(StoreError):  # unreadable: it counts as one
                written = len(journal.read_at(str(tid), self.quanta))
        except StoreError as error:
            task_logger.error("%s: its failure could not be recorded: %s", self.key, error)
            return False
        self.quanta += written
        self.lost = 0  # another attempt begins, unless the next report corrects this
        self.begin()
        return True

"""The plugin's state of one run and of each trajectory in it."""

from __future__ import annotations

import json
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

import msgspec

from libra import facts
from libra.config import config_from_dict
from libra.config.streaming import most_waves
from libra.facts import Command, Fact, ToolNeeds
from libra.keys import Key
from libra.policy import (
    Admission,
    Inspectable,
    OneVersion,
    OnlineLearner,
    Ordering,
    Tail,
    Waves,
    WayChoice,
    WaySettings,
    keeps_version,
    learns_after,
    staleness_of,
)
from libra.scheduler.notices import Notices
from libra.scheduler.run_log import RunLog
from libra.scheduler.version_holders import Holders
from libra.store.run_records import read_batch
from libra.types import EndReason, Phase

if TYPE_CHECKING:
    from libra.config import RunConfig

KEPT_BLOCKS = 8192
"""Maximum number of groups for which the worker that keeps their rows is recorded."""


class RunRegistration(msgspec.Struct, frozen=True, forbid_unknown_fields=True, dict=True):
    """A driver's registration of its run.

    Attributes
    ----------
    config : dict
        The run's configuration as plain data; see `settings`.
    tools : dict of str to ToolNeeds
        Tools of its environment that declare resources, by name; empty: actions take slots.
    watchdog_floors_s : dict
        Least limits of ``watchdog.timeout_s=auto``, by kind of task, for tasks with a time-out.
    restored : dict or None
        The `Admission.snapshot` from which a resumed run goes on.
    learned : str or None
        Snapshot of the ordering as JSON, from which a resumed run goes on.
    local : bool
        Whether the driver started this cluster for the run, and starts lost workers again.
    client : str
        Dask's id of the driver's client; empty: not known.
    """

    run: str
    epoch: int
    directory: str
    config: dict[str, Any] = msgspec.field(default_factory=dict)
    tools: dict[str, ToolNeeds] = msgspec.field(default_factory=dict)
    watchdog_floors_s: dict[str, float] = msgspec.field(default_factory=dict)
    restored: dict[str, Any] | None = None
    learned: str | None = None
    local: bool = False
    client: str = ""

    @cached_property
    def settings(self) -> RunConfig:
        """The run's configuration; ConfigError if it is not one."""
        # Dask's wire makes tuples of lists, and a configuration has lists.
        return config_from_dict(json.loads(json.dumps(self.config)))

    def as_message(self) -> dict[str, Any]:
        """As plain data, for Dask's wire; `from_message` reads it."""
        return cast(dict[str, Any], msgspec.to_builtins(self))

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> Self:
        """The registration of a message; `msgspec.ValidationError` if a field is unknown, missing or of another type."""
        return msgspec.convert(message, cls)

    def admission(self) -> Admission:
        """What decides about its gates, batches and waves, as earlier starts of the run left it."""
        config = self.settings
        first_come = config.trainer.batches == "first_come"
        made = Admission(staleness_of(config), config.trainer.prompts, Waves.of(config), first_come=first_come)
        if self.restored is not None:
            made.restore(self.restored)
        return made


Handler = Callable[["RunState", Any, str], None]
"""What to do with a fact of a run that a worker at this address (empty: the driver) sent."""


@dataclass(slots=True)
class ParkedNodes:
    """Keys of the gates, batches and waves that wait: by iteration, by version that an evaluation waits for, by batch and wave."""

    gates: dict[int, str] = field(default_factory=dict)
    eval_gates: dict[int, list[str]] = field(default_factory=dict)
    batches: dict[int, str] = field(default_factory=dict)
    waves: dict[tuple[int, int], str] = field(default_factory=dict)


@dataclass(slots=True)
class RunWorkers:
    """The workers of a run: ``served`` versions and addresses of ``engines`` are by worker name, the sets have addresses.

    Attributes
    ----------
    quarantined : set of str
        The engine failed the version check.
    out : dict of str to str
        Those that failed it again after a restart and stay out of service: version, layer and numbers.
    joining : set of str
        Joined during the run; its part of the run is not set up yet.
    ready : set of str
        Its part of the run is set up.
    asleep : set of str
        The engine sleeps, or is about to.
    blocks : OrderedDict
        The worker that keeps a group's rows in memory, by (iteration, group).
    kv : dict
        Host and port at which a worker gives KV objects, by its name.
    """

    served: dict[str, int] = field(default_factory=dict)
    engines: dict[str, str] = field(default_factory=dict)
    holders: Holders = field(default_factory=Holders)
    quarantined: set[str] = field(default_factory=set)
    out: dict[str, str] = field(default_factory=dict)
    joining: set[str] = field(default_factory=set)
    ready: set[str] = field(default_factory=set)
    asleep: set[str] = field(default_factory=set)
    blocks: OrderedDict[tuple[int, ...], dict[str, Any]] = field(default_factory=OrderedDict)
    kv: dict[str, tuple[str, int]] = field(default_factory=dict)

    def keeps_rows(self, iteration: int, group: int, block: dict[str, Any] | None) -> None:
        """A worker keeps the rows of a group in memory (None: no worker does); only the newest groups are recorded."""
        if block is not None:
            self.blocks[iteration, group] = block
            while len(self.blocks) > KEPT_BLOCKS:
                self.blocks.popitem(last=False)

    def lost(self, address: str) -> None:
        """A worker has left the cluster."""
        self.holders.lost(address)
        self.joining.discard(address)
        self.ready.discard(address)
        self.asleep.discard(address)
        self.quarantined.discard(address)
        self.out.pop(address, None)


@dataclass(slots=True)
class RunState:
    """One run in the scheduler, by parts; a new one comes with each registration.

    ``num_ended`` trajectories have ended, ``learned_ended`` of them before the policy's last update. ``sessions``: what the pools
    of its workers have done, by the names of `libra.envs.sessions.SessionCounts`. ``revoked``: actions that were stopped for
    others. ``family`` is the name of the environment of all its trajectories, ``first_phase`` what each begins with.
    """

    registration: RunRegistration
    admission: Admission
    policy: Ordering
    log: RunLog
    tail: Tail
    parked: ParkedNodes = field(default_factory=ParkedNodes)
    workers: RunWorkers = field(default_factory=RunWorkers)
    notices: Notices = field(default_factory=Notices)
    num_ended: int = 0
    learned_ended: int = 0
    one: OneVersion | None = None
    family: str = ""
    first_phase: Phase = Phase.ROLLOUT
    sessions: Counter[str] = field(default_factory=Counter)
    revoked: int = 0

    def __post_init__(self) -> None:
        config = self.settings
        self.family = config.environment.name
        self.first_phase = Phase.TOOL if config.agent.given else Phase.ROLLOUT
        self.one = OneVersion(rounded=config.staleness.engines == "rounded") if keeps_version(config) else None

    def handle(self, event: Fact) -> tuple[Command, ...]:
        """Pass an event to the policy objects; the answers of the ordering, and the engines that take new weights."""
        self.tail.handle(event)
        answers = self.policy.handle(event)
        return answers if self.one is None else (*answers, *self.one.handle(event))

    def numbers(self) -> dict[str, float]:
        """Metrics that only the scheduler knows: the skill of the ordering's forecasts and the weight of each signal, if it scores
        them, and counts since this start: of sessions, if there were any, and of actions that were stopped, if any may be."""
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
        """Its configuration."""
        return self.registration.settings

    @property
    def run(self) -> str:
        """Its name."""
        return self.registration.run

    @property
    def epoch(self) -> int:
        """Number of its start."""
        return self.registration.epoch

    @property
    def directory(self) -> Path:
        """Where it keeps its files."""
        return Path(self.registration.directory)

    def members(self, batch: int) -> list[list[int]]:
        """Groups of a batch that was opened, as [iteration, group]."""
        members = self.admission.opened.get(batch)
        if members is None:  # opened long before: it is committed
            ids = read_batch(self.directory / "batches", batch)
            members = tuple(dict.fromkeys((each.iteration, each.group) for each in ids))
        return [list(member) for member in members]

    def waves(self, batch: int) -> list[list[list[int]]]:
        """Groups of each wave of a batch that was opened, as [iteration, group]; empty if that was long before."""
        return [[list(member) for member in wave] for wave in self.admission.waves.opened.get(batch, ())]

    def begin(self) -> None:
        """Log the start of the run, and the state of its policy objects."""
        config, choice = self.settings, WaySettings.of(self.settings)
        self.log.emit(
            facts.RunStarted(
                epoch=self.epoch,
                eta=config.run.eta,
                iterations=config.run.iterations,
                groups_per_batch=config.trainer.prompts,
                policy=self.policy.name,
                family=self.family,
            )
        )
        if choice is not None:
            self.admission.ways = WayChoice(choice, config.run.eta, most_waves(config))
            self.log.timeline.steps.train_gpus = choice.train_gpus
        self.emit_snapshot()
        if choice is not None:
            self.log.emit(facts.StepsPlanned(ways=choice.ways, way=choice.way, reason=choice.reason))

    def measured(self, version: int) -> tuple[Command, ...] | None:
        """Log the step whose weights are published now, if it was measured; what it changes. None: it was not."""
        step = self.log.timeline.measured(version, self.log.uptime_s)
        if step is None:
            return None
        self.log.emit(step)
        return self.admission.steps_measured(step)

    def sample(self) -> None:
        """Twice a second: the rows of the dashboard's plots that are due, and everything logged so far to the disk."""
        self.log.timeline.sample(self.log.uptime_s)
        if self.log.snapshot_is_due:
            self.emit_snapshot()
        self.log.flush()

    def emit_snapshot(self) -> None:
        """Log the state of the policy objects; see `RunLog.emit_snapshot`."""
        self.log.emit_snapshot(self.policy, self.admission, self.tail, self.family, self.one)

    def learn(self) -> None:
        """Run the policy's expensive update if enough trajectories have ended since the last."""
        if self.num_ended >= self.learned_ended + learns_after(self.learned_ended) and isinstance(
            self.policy, OnlineLearner
        ):
            self.learned_ended = self.num_ended
            began_s = time.perf_counter()
            self.policy.learn()
            self.log.emit(facts.PolicyLearned(seconds=round(time.perf_counter() - began_s, 6)))

    def dashboard_row(self, buckets: list[dict[str, Any]]) -> dict[str, Any]:
        """The run as shown on the dashboard page; ``buckets``: `Dispatcher.buckets`."""
        nothing: dict[str, Any] = {"objective": "", "skill": None, "weights": {}, "outcomes": []}
        policy = self.policy.dashboard_row() if isinstance(self.policy, Inspectable) else nothing
        snapshot = self.log.timeline.snapshot(self.log.uptime_s)
        return snapshot | {"buckets": buckets, "policy": {"name": self.policy.name, **policy}}


@dataclass(slots=True)
class Tracked:
    """A trajectory key the plugin has seen parked.

    Attributes
    ----------
    reported, given_back, revoked : bool
        Whether the quantum now running has reported, or was handed back without a record, as its lease was revoked.
    lost : int
        Quanta in a row that ended without a report.
    at : (Phase, str) or None
        Phase and address of the slot it has.
    worker : str
        Name of the worker where it has, or last had, a slot.
    context_tokens : int
        As of its last report; 0 before.
    end : str
        Why it ended, as reported.
    policy_ended, policy_completed : bool
        Whether the policy was notified that it ended, and that it completed, which happens once.
    group : str
        As policies know it: split, iteration, number.
    calls : tuple of str
        Tools that its next action calls, if one of them has resources.
    parked_s : float
        When it last parked, by the scheduler's clock.
    leased : (int, float) or None
        Cores of the action that it runs, and the seconds that it waited for them.
    """

    key: str
    parsed: Key
    run: RunState
    phase: Phase = Phase.ROLLOUT
    quanta: int = 0
    reported: bool = False
    given_back: bool = False
    revoked: bool = False
    lost: int = 0
    ended: bool = False
    at: tuple[Phase, str] | None = None
    worker: str = ""
    context_tokens: int = 0
    end: str = ""
    policy_ended: bool = False
    policy_completed: bool = False
    group: str = ""
    calls: tuple[str, ...] = ()
    parked_s: float = 0.0
    leased: tuple[int, float] | None = None

    def __post_init__(self) -> None:
        self.group = "-".join(map(str, (self.parsed.split, *self.parsed.indices[:2])))
        self.begin()

    def begin(self) -> None:
        """It needs what a trajectory begins with."""
        self.phase = self.run.first_phase

    @property
    def completed(self) -> bool:
        """Whether it completed by itself."""
        return self.end not in ("", str(EndReason.FAILURE))

"""LibraPlugin: parked trajectories, gates and batches of every run on this scheduler.

A trajectory is one Dask task that runs in quanta. Between quanta it waits *parked*; the plugin gives it a slot of the
phase it needs, in the order of ``ts.priority``, on the worker that holds its KV cache if that has room. At the end of a
quantum the task reports (``log_event``, topic ``libra``) and raises ``Reschedule``; the report arrives first.

The plugin is the hooks: it finds out which run and which part something concerns. `Trajectories` tells policy objects what
happens to trajectories, `Applier` carries out what they answer.

Invariants
----------
1. Only the applier writes priorities and releases tasks, each from a logged decision.
2. A hook never raises for what a worker reports: unknown runs and keys are ignored, and logged at DEBUG.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distributed.diagnostics.plugin import SchedulerPlugin
from tornado.ioloop import PeriodicCallback

from libra import keys
from libra.observe.page import attach_page
from libra.policy import (
    Admission,
    BoundariesSet,
    Command,
    CommittedGroup,
    Fifo,
    Inspectable,
    VersionPublished,
    boundaries_of,
    groups_named,
    make_ordering,
)
from libra.scheduler import dask_internals
from libra.scheduler.announcements import announce_version, engine_reported, newest_version, published, tell_contention
from libra.scheduler.run_state import RunState
from libra.scheduler.slot_limits import Concurrency
from libra.scheduler.stall_watchdog import StallGuard
from libra.scheduler.trajectories import Trajectories
from libra.scheduler.unready_workers import NotReady
from libra.store.event_log import EventLog
from libra.types import Phase

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler

logger = logging.getLogger(__name__)
task_logger = logging.getLogger(__name__ + ".tasks")

TOPIC = "libra"
SAMPLE_MS = 500


class LibraPlugin(SchedulerPlugin):
    """One per scheduler, shared by all runs; registered by every driver, kept from the first."""

    name = "libra"
    idempotent = True

    def __init__(self) -> None:
        self.runs: dict[str, RunState] = {}
        self._signs: dict[Any, float] = {}  # monotonic seconds when a task on a worker was sent there, or last reported

    async def start(self, scheduler: Scheduler) -> None:
        """Hook into the scheduler: RPC handlers, the page, the task stream and a sampler."""
        self._scheduler = scheduler
        dask_internals.collect_seldom()
        dask_internals.add_handlers(
            scheduler,
            {
                "libra_register_run": self.register_run,
                "libra_members": self.members,
                "libra_blocks": lambda run, groups: [self.runs[run].blocks.get(tuple(group)) for group in groups],
                "libra_newest": lambda run, worker: newest_version(self.runs[run], worker),
                "libra_snapshots": self.snapshots,
                "libra_forecast_trust": self.forecast_trust,
                "libra_set_slots": self.set_slots,
                "libra_engines": self.engines,
                "libra_end_run": self.end_run,
            },
        )
        attach_page(scheduler, self.snapshots)
        self.not_ready = NotReady(scheduler)
        self.trajectories = Trajectories(scheduler, self.runs, self._signs)
        self.concurrency = Concurrency(scheduler, self.trajectories.kick)
        sampler = scheduler.periodic_callbacks["libra-sample"] = PeriodicCallback(self._sample, SAMPLE_MS)
        sampler.start()

    # ---------------------------------------------------------------- calls from the driver and from workers

    def register_run(
        self,
        run: str,
        epoch: int,
        directory: str,
        eta: int,
        iterations: int,
        groups_per_batch: int,
        event_log: bool,
        restored: dict[str, Any] | None = None,
        watchdog_s: float | None = None,
        watchdog_restart: bool = False,
        policy: dict[str, Any] | None = None,
        family: str = "",
        learned: str | None = None,
    ) -> dict[str, Any]:
        """Make a run known; a run of the same name and a newer epoch replaces the older one.

        ``restored`` is the `Admission.snapshot` that a run which is resumed goes on from. ``watchdog_s`` is
        ``watchdog.timeout_s``, None where nobody looks for stalls. ``policy`` is what `libra.policy.make_ordering` takes, None
        for first come, first served; ``family`` the name of the environment. ``learned`` is a snapshot of it as JSON, from which
        that of a run which is resumed goes on.
        """
        old = self.runs.get(run)
        if old is not None and old.epoch >= epoch:
            return {"error": f"run {run!r} is already on this scheduler with epoch {old.epoch}"}
        if old is not None:
            self.end_run(run)
        log = EventLog(Path(directory) / "events.jsonl") if event_log else None
        admission, policy = Admission(eta, groups_per_batch), dict(policy or {"name": Fifo.name})
        boundaries = boundaries_of(policy.pop("boundaries_tokens", {}))
        if restored is not None:
            admission.restore(restored)
        ordering = make_ordering(**policy)
        if learned is not None:
            ordering.restore(json.loads(learned))
        state = RunState(run, epoch, Path(directory), eta, iterations, admission, ordering, log, family)
        self.runs[run] = state
        state.emit(
            "run_started",
            epoch=epoch,
            eta=eta,
            iterations=iterations,
            groups_per_batch=groups_per_batch,
            policy=state.policy.name,
            family=family,
        )
        state.emit_snapshot()
        self.trajectories.register_run(state)
        if boundaries:
            self._set_boundaries(state, boundaries, "policy.boundaries_tokens")
        if watchdog_s is not None:
            state.guard = StallGuard(
                self._scheduler, state, self._signs, self.trajectories.phase_of, watchdog_s, watchdog_restart
            )
            state.guard.start()
        return {"started_s": state.started_s}

    def forecast_trust(self, run: str) -> dict[str, float]:
        """Metrics of a run's ordering: its skill, and the weight of each signal; empty where it judges no forecasts."""
        state = self.runs.get(run)
        if state is None or not isinstance(state.policy, Inspectable):
            return {}
        shown = state.policy.shown()
        if shown["skill"] is None:
            return {}
        weights = {f"forecast_weight_{signal}": weight for signal, weight in shown["weights"].items()}
        return {"forecast_skill": shown["skill"], **weights}

    def end_run(self, run: str) -> None:
        """Close a run's event log, stop its watchdog, forget the run."""
        state = self.runs.pop(run, None)
        if state is not None:
            self.not_ready.ended(run)
            self.concurrency.ended(run)
            state.close()

    def set_slots(
        self, run: str, epoch: int, slots: Mapping[str, Mapping[str, int]], reason: str = "asked for"
    ) -> dict[str, Any]:
        """Limit how many trajectories engines generate for at once; see `Concurrency.set`."""
        state = self.runs.get(run)
        if state is None or state.epoch != epoch:
            return {"error": f"run {run!r}, epoch {epoch}, is not on this scheduler"}
        return self.concurrency.set(state, slots, reason)

    def engines(self, run: str, epoch: int) -> list[dict[str, Any]]:
        """What engines of a run are, may use and have declared (`Concurrency.rows`); ``residents``: trajectories at home."""
        state = self.runs.get(run)
        rows = [] if state is None or state.epoch != epoch else self.concurrency.rows(state)
        return [row | {"residents": self.trajectories.dispatcher.residents(row["worker"])} for row in rows]

    def members(self, run: str, batch: int) -> list[list[int]]:
        """Groups of a batch that was opened, as [iteration, group]."""
        return [list(member) for member in self.runs[run].admission.opened[batch]]

    # ---------------------------------------------------------------- scheduler hooks

    def transition(self, key: Any, start: str, finish: str, *args: Any, **kwargs: Any) -> None:
        """Follow parked tasks through Dask's states; the hot path of the plugin."""
        if start == "processing":
            self._signs.pop(key, None)
            tracked = self.trajectories.tracked.get(key)
            if tracked is not None:
                self.trajectories.left_worker(tracked)
            elif finish == "memory":
                self._progressed(key)
        elif finish == "processing":
            self._signs[key] = time.monotonic()
        if finish == "no-worker":
            ts = self._scheduler.tasks[key]
            if dask_internals.is_parked(ts):
                self._parked(key)
        elif finish == "forgotten":
            self.trajectories.forgotten(key)

    def log_event(self, topic: str, msg: Any) -> None:
        """A worker reports; see ``libra.worker.reports`` for the messages."""
        if topic != TOPIC or not isinstance(msg, dict):
            return
        state = self.runs.get(msg.get("run", ""))
        if state is None or msg.get("epoch") != state.epoch:
            logger.debug("a report of an unknown run or an older epoch is ignored: %s", msg)
            return
        state.progressed()
        match msg["kind"]:
            case "quantum" | "ended" | "given_back":
                self.trajectories.reported(state, msg)
            case "group":
                self._group_reported(state, msg)
            case "published":
                published(state, msg)
                self._apply(state, state.policy.handle(VersionPublished(msg["version"])))
                self._apply(state, state.admission.version_published(msg["version"]))
                for version in [v for v in state.eval_gates if v <= state.admission.version]:
                    for gate in state.eval_gates.pop(version):
                        self.trajectories.applier.open(state, gate, keys.GRADE)
                announce_version(self._scheduler, state, msg["version"])
            case "joined" | "served" | "quarantined" | "asleep" | "awake":
                self._engine_reported(state, msg)
            case "declared" | "ready" | "not_ready":
                self._set_up(state, msg)
            case "plan" | "prompts" | "boundaries":
                self._driver_reported(state, msg)
            case "step":
                state.emit("step_finished", step=msg["step"], loss=msg["loss"], train_s=msg["train_s"])
            case "iteration":
                self._iteration_reported(state, msg)

    def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        """New slots may be free."""
        for state in self.runs.values():
            if state.guard is not None:
                state.guard.granted()
            if dask_internals.installs(scheduler, keys.host_name(state.run)):
                state.joining.add(worker)
                self.not_ready.joined(state.run, worker)
            state.emit("worker_joined", worker=dask_internals.worker_name(scheduler, worker), address=worker)
        self.trajectories.kick()

    def remove_worker(self, scheduler: Scheduler, worker: str, **kwargs: Any) -> None:
        """Its slots are gone; its tasks have already left ``processing``."""
        self.not_ready.left(worker)
        for state in self.runs.values():
            state.holders.lost(worker)
            state.joining.discard(worker)
            state.asleep.discard(worker)
            state.emit("worker_lost", address=worker)
        self.trajectories.worker_gone(worker)

    async def close(self) -> None:
        """The scheduler stops."""
        for run in list(self.runs):
            self.end_run(run)

    def _progressed(self, key: Any) -> None:
        """A task that is no trajectory was completed."""
        parsed = keys.parse(key)
        state = self.runs.get(parsed.run) if parsed is not None else None
        if state is not None:
            state.progressed()

    # ---------------------------------------------------------------- parked tasks

    def _parked(self, key: str) -> None:
        if key in self.trajectories.tracked:
            self.trajectories.parked(key, None, None)
            return
        parsed = keys.parse(key)
        state = self.runs.get(parsed.run) if parsed else None
        if parsed is None or state is None or parsed.epoch != state.epoch:
            task_logger.debug("%s waits for a run that is not on this scheduler", key)
        elif parsed.node == "gate":
            self._gate_parked(state, parsed, key)
        elif parsed.node == "batch":
            state.batches[parsed.indices[0]] = key
            state.emit("batch_parked", batch=parsed.indices[0])
            self._apply(state, state.admission.batch_parked(parsed.indices[0]))
        else:
            self.trajectories.parked(key, state, parsed)

    def _gate_parked(self, state: RunState, parsed: keys.Key, key: str) -> None:
        state.progressed()  # the driver asks for more
        index = parsed.indices[0]
        if parsed.split == "eval":
            if index <= state.admission.version:
                self.trajectories.applier.open(state, key, keys.GRADE)
            else:
                state.eval_gates.setdefault(index, []).append(key)
            return
        state.gates[index] = key
        state.emit("gate_parked", iteration=index)
        self._apply(state, state.admission.gate_parked(index))

    def _apply(self, state: RunState, commands: tuple[Command, ...]) -> None:
        self.trajectories.applier.apply(state, commands)

    # ---------------------------------------------------------------- reports

    def _driver_reported(self, state: RunState, msg: dict[str, Any]) -> None:
        if msg["kind"] == "plan":
            state.emit(msg["event"], **msg["fields"])
            return
        if msg["kind"] == "boundaries":
            self._set_boundaries(state, boundaries_of(msg["tokens"]), msg["reason"])
            return
        state.emit("prompts_named", iteration=msg["iteration"], prompts=msg["prompts"])
        self._apply(state, state.policy.handle(groups_named("train", msg["iteration"], msg["prompts"])))

    def _set_boundaries(self, state: RunState, boundaries: tuple[tuple[int, float], ...], reason: str) -> None:
        logger.info("%s: trajectories of %s begin by their length: %s", reason, state.run, boundaries)
        state.emit("boundaries_set", boundaries=boundaries, reason=reason)
        self._apply(state, state.policy.handle(BoundariesSet(boundaries)))

    def _engine_reported(self, state: RunState, msg: dict[str, Any]) -> None:
        engine_reported(state, msg)
        if msg["kind"] == "joined" and "engine" in msg:
            self.concurrency.joined(state.run, msg["name"], msg["engine"])
            self.concurrency.apply(state.run, msg["address"])
        if self.trajectories.contended:
            tell_contention(self._scheduler, msg["address"], True)
        self.trajectories.kick()

    def _set_up(self, state: RunState, msg: dict[str, Any]) -> None:
        """What a worker needs for a run is there, or could not be made; then it goes on counting as one that joins. Or its engine
        says what it is."""
        if msg["kind"] == "not_ready":
            self.not_ready.failed(state, msg)
            return
        if msg["kind"] == "declared":
            self.trajectories.workers.declared(state, msg)
            self.concurrency.declared(state.run, msg)
            self.trajectories.kick()
            return
        state.joining.discard(msg["address"])
        self.not_ready.ready(state.run, msg["address"])
        self.concurrency.apply(state.run, msg["address"])
        self.trajectories.kick()

    def _group_reported(self, state: RunState, msg: dict[str, Any]) -> None:
        if msg["split"] == "train":
            state.groups += 1
            state.holds(msg["iteration"], msg["group"], msg.get("block"))
        for failure, count in msg["failures"].items():
            state.failures[failure] += count
        said = ("split", "iteration", "group", "oldest_version", "reward", "failures")
        state.emit("group_committed", **{name: msg[name] for name in said})
        if msg["split"] == "train":
            done = CommittedGroup(msg["iteration"], msg["group"], msg["oldest_version"])
            self._apply(state, state.admission.group_committed(done))

    def _iteration_reported(self, state: RunState, msg: dict[str, Any]) -> None:
        if msg["reward"] is not None:
            state.rewards.append((msg["iteration"], msg["reward"]))
        state.lags.append((msg["iteration"], msg["lag"]))
        state.emit("iteration_finished", iteration=msg["iteration"], reward=msg["reward"], lag=msg["lag"])

    # ---------------------------------------------------------------- seeing it

    def _sample(self) -> None:
        if not self.runs:
            return
        self.trajectories.kick()  # a worker that has just joined takes tasks a moment after the hook that told us
        dispatcher = self.trajectories.dispatcher
        waiting = {phase: dispatcher.num_waiting(phase) for phase in Phase}
        used = {phase: dispatcher.slots(phase)[0] for phase in Phase}
        for state in self.runs.values():
            state.sample(waiting, used)

    def snapshots(self) -> list[dict[str, Any]]:
        """State of every run, JSON-able; what the dashboard page and its JSON route show."""
        slots = self.trajectories.slots()
        buckets = self.trajectories.dispatcher.buckets()
        roles: Any = self._scheduler.plugins.get("libra-roles")
        return [
            state.shown(slots, self.trajectories.levels(state.run), buckets)
            | {"roles": roles.roles(state.run, state.epoch) if roles is not None else []}
            | {"not_ready": self.not_ready.rows(state.run)}
            for state in self.runs.values()
        ]

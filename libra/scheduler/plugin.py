"""LibraPlugin: parked trajectories, gates and batches of every run on this scheduler.

A trajectory is one Dask task that runs in quanta and is *parked* between them. The plugin gives it
a slot of the phase it needs, in the order of ``ts.priority``, preferably on the worker with its KV
cache. At the end of a quantum its worker sends facts (`libra.facts`) on its stream; then the task
raises ``Reschedule``. The plugin has the hooks and RPC handlers, `Trajectories` passes events to
the policy objects, and `Applier` carries out their commands.

Invariants
----------
1. Only the applier writes priorities and releases tasks, each from a logged decision.
2. A worker's report never makes a hook raise: unknown runs and keys are logged at DEBUG.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from distributed.diagnostics.plugin import SchedulerPlugin
from tornado.ioloop import PeriodicCallback

from libra import facts, keys
from libra.cluster.page_names import check_names
from libra.cluster.settings import bound_key_cache
from libra.errors import ConfigError
from libra.facts import Fact, Signal, boundaries_of
from libra.observe.endpoints import attach_page
from libra.policy.liveness import Liveness
from libra.policy.stall import Limits
from libra.scheduler import scheduler_internals
from libra.scheduler.command_applier import announce_version, newest_version
from libra.scheduler.gangs import Gangs
from libra.scheduler.run_log import EndedRuns, RunLog
from libra.scheduler.run_state import Handler, RunRegistration, RunState, process_name
from libra.scheduler.stall_watchdog import StallGuard
from libra.scheduler.trajectory_tasks import Trajectories
from libra.scheduler.worker_roles import WorkerRoles
from libra.scheduler.worker_supply import Concurrency
from libra.scheduler.worker_watch import WorkerWatch
from libra.store.event_log import EventLog
from libra.user_orderings import ordering_of

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler

logger = logging.getLogger(__name__)
task_logger = logging.getLogger(__name__ + ".tasks")

SAMPLE_MS = 500


class LibraPlugin(SchedulerPlugin):
    """One per scheduler, shared by all runs; each driver registers it, the first instance stays."""

    name = "libra"
    idempotent = True

    def __init__(self) -> None:
        self.runs: dict[str, RunState] = {}
        self.guards: dict[str, StallGuard] = {}  # of runs with a watchdog
        self._last_activity: dict[Any, float] = {}  # monotonic, by task: it was sent, or reported

    async def start(self, scheduler: Scheduler) -> None:
        """Hook into the scheduler: RPC handlers, the page, the task stream and a sampler."""
        self._scheduler = scheduler
        scheduler_internals.collect_rarely()
        called = (
            self.snapshots, self.numbers, self.set_slots, self.engines, self.notices, self.progress, self.end_run, self.told,
        )  # fmt: skip
        scheduler_internals.add_handlers(scheduler, {f"libra_{method.__name__}": method for method in called})
        scheduler_internals.add_handlers(scheduler, {
            "libra_register_run": self._register,
            "libra_members": lambda run, batch: self.runs[run].members(batch),
            "libra_waves": lambda run, batch: self.runs[run].waves(batch),
            "libra_blocks": lambda run, groups: [self.runs[run].workers.blocks.get(tuple(at)) for at in groups],
            "libra_newest": lambda run, worker: newest_version(self.runs[run], worker),
        })  # fmt: skip
        scheduler.stream_handlers[facts.STREAM_OP] = self.told
        attach_page(scheduler, self.snapshots)
        check_names(scheduler.http_application, shared=True)  # Libra's own clusters did so already
        self.liveness, self.ended = Liveness(), EndedRuns(scheduler)
        self.trajectories = Trajectories(scheduler, self.runs, self._last_activity, self.liveness)
        self.watch = WorkerWatch(scheduler, self.liveness)
        self.concurrency = Concurrency(scheduler, self.trajectories.workers_changed)
        self.gangs = Gangs(scheduler, self.runs)
        self.roles = WorkerRoles(scheduler, self.runs, self.trajectories, self.concurrency)
        self.trajectories.applier.set_roles = self.roles.set_roles
        self._handlers: dict[type[Fact], Handler] = self._own_handlers() | self.trajectories.handlers()
        self._handlers |= self.gangs.handlers() | self.roles.handlers()
        sampler = scheduler.periodic_callbacks["libra-sample"] = PeriodicCallback(self._sample, SAMPLE_MS)
        sampler.start()

    async def _register(self, registration: Mapping[str, Any]) -> dict[str, Any]:
        new = msgspec.convert(registration, RunRegistration)
        if (refusal := self._refusal(new)) is not None:
            return refusal
        self.end_run(new.run)
        await self.ended.cleared(new.run)
        path = Path(new.directory) / "events.jsonl"
        log = await asyncio.to_thread(EventLog, path)
        has_left = new.client not in self._scheduler.clients
        answer = {"error": f"the driver of run {new.run!r} has left"} if has_left else self.register_run(new, log)
        if "started_s" not in answer:
            log.close(wait=False)
        return answer

    def _refusal(self, new: RunRegistration) -> dict[str, Any] | None:
        old = self.runs.get(new.run)
        if old is None or old.epoch < new.epoch:
            return None
        return {"error": f"run {new.run!r} is already on this scheduler with epoch {old.epoch}"}

    def register_run(self, new: RunRegistration, log: EventLog | None = None) -> dict[str, Any]:
        """Register a run; a newer epoch of the same name replaces the older one."""
        if (refusal := self._refusal(new)) is not None:
            return refusal
        config = new.settings
        policy = config.policy.model_dump()
        boundaries = boundaries_of(policy.pop("boundaries_tokens", {}))
        try:
            ordering = ordering_of(**policy)
        except ConfigError as error:
            return {"policy": f"{error} (on the scheduler, {process_name()})"}
        self.end_run(new.run)
        file = log or EventLog(Path(new.directory) / "events.jsonl")
        if new.learned is not None:
            ordering.restore(json.loads(new.learned))
        logged = RunLog(new.run, file, scheduler_internals.trainers(self._scheduler))
        state = self.runs[new.run] = RunState.of(new, ordering, logged)
        state.begin()
        self.trajectories.register_run(state)
        if boundaries:
            self._boundaries_set(state, facts.BoundariesSet(boundaries, "policy.boundaries_tokens"), "")
        if (timeout_s := config.watchdog.timeout_s) is not None:
            limits = Limits(new.watchdog_floors_s, fixed_s=None if timeout_s == "auto" else timeout_s)
            activity, restart = self._last_activity, config.watchdog.restart
            guard = StallGuard(self._scheduler, state, activity, self.trajectories.phase_of, limits, restart)
            self.guards[new.run] = guard
        return {"started_s": state.log.started_s, "process": process_name()}

    def _of(self, run: str, epoch: int) -> RunState | None:
        state = self.runs.get(run)
        return state if state is not None and state.epoch == epoch else None

    def numbers(self, run: str) -> dict[str, float]:
        state = self.runs.get(run)
        return {} if state is None else state.numbers()

    def end_run(self, run: str, epoch: int | None = None) -> None:
        """Close a run's event log, stop its watchdog and forget the run, if it is in this epoch."""
        state = self.runs.get(run)
        if state is None or epoch not in (None, state.epoch):
            return
        del self.runs[run]
        self.watch.ended(run)
        self.concurrency.ended(run)
        if guard := self.guards.pop(run, None):
            guard.stop()
        self.gangs.end_gang(run)
        self.roles.end_roles(run)
        self.ended.compressing(state.log.close())

    def notices(self, run: str, epoch: int, first: int) -> list[tuple[int, str]]:
        return [] if (state := self._of(run, epoch)) is None else state.notices.since(first)

    def progress(self, run: str, epoch: int) -> tuple[int, int, str, str]:
        """Ended trajectories, tokens, `WorkerWatch.missing_work` and `Timeline.training`."""
        if (state := self._of(run, epoch)) is None:
            return 0, 0, "", ""
        seen = state.log.timeline
        return state.num_ended, seen.tokens, self.watch.missing_work(run), seen.training(state.log.uptime_s)

    def set_slots(
        self, run: str, epoch: int, slots: Mapping[str, Mapping[str, int]], reason: str = "asked for"
    ) -> dict[str, Any]:
        if (state := self._of(run, epoch)) is None:
            return {"error": f"run {run!r}, epoch {epoch}, is not on this scheduler"}
        return self.concurrency.set(state, slots, reason)

    def engines(self, run: str, epoch: int) -> list[dict[str, Any]]:
        """Rows of `Concurrency.rows`, with ``residents``: trajectories whose KV the engine owns."""
        rows = [] if (state := self._of(run, epoch)) is None else self.concurrency.rows(state)
        return [row | {"residents": self.trajectories.dispatcher.residents(row["worker"])} for row in rows]

    def transition(self, key: Any, start: str, finish: str, *args: Any, **kwargs: Any) -> None:
        """Follow parked tasks through Dask's states. This is the plugin's hot path."""
        if start == "processing":
            since_s = self._last_activity.pop(key, None)
            tracked = self.trajectories.tracked.get(key)
            if tracked is not None:
                self.trajectories.left_worker(tracked)
            elif finish == "memory" and self.guards and (parsed := keys.parse(key)) is not None:
                self._progressed(parsed.run, key, since_s)
        elif finish == "processing":
            self._last_activity[key] = time.monotonic()
        if finish == "no-worker":
            ts = self._scheduler.tasks[key]
            if scheduler_internals.is_parked(ts):
                self._parked(key)
        elif finish == "forgotten":
            self.trajectories.forgotten(key)
        if self.gangs.present:
            self.gangs.transition(key, start, finish)

    def told(self, run: str, epoch: int, packed: bytes, worker: str = "", client: str = "") -> None:
        """Handle facts of a worker or the driver. Never raises: an error would close the stream."""
        if (state := self._of(run, epoch)) is None:
            logger.debug("ignored: facts of %s, epoch %s, which is not on this scheduler", run, epoch)
            return
        try:
            received = facts.unpack(packed)
        except msgspec.DecodeError as error:
            logger.error("run %s: malformed facts of %s are ignored: %s", run, worker or client, error)
            return
        for fact in received:
            try:
                self._take(state, fact, worker)
            except Exception:  # the boundary to Dask, where an exception would end the worker
                logger.exception("run %s: a fact of %s could not be taken in: %s", run, worker or client, fact)

    def _take(self, state: RunState, fact: Fact, worker: str) -> None:
        key = fact.key if type(fact) is facts.QuantumFinished else None
        self._progressed(state.run, key, self._last_activity.get(key))
        if (handler := self._handlers.get(type(fact))) is not None:
            handler(state, fact, worker)
        elif not isinstance(fact, Signal):
            state.log.emit(fact)

    def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        name = scheduler_internals.worker_name(scheduler, worker)
        self.watch.joined(
            worker, [run for run in self.runs if scheduler_internals.installs(scheduler, keys.host_name(run))]
        )
        for guard in self.guards.values():
            guard.granted()
        for state in self.runs.values():
            state.log.emit(facts.WorkerJoined(name, worker))
        self.roles.add_worker(worker)
        self.trajectories.workers_changed()

    def remove_worker(self, scheduler: Scheduler, worker: str, **kwargs: Any) -> None:
        self.watch.left(worker)
        for state in self.runs.values():
            state.workers.holders.lost(worker)
            known = {**state.workers.engines, **self.trajectories.workers.address}.items()
            name = next((name for name, address in known if address == worker), "")
            state.log.emit(facts.WorkerLost(worker, name))
        self.trajectories.worker_gone(worker)
        self.gangs.remove_worker(worker)
        self.roles.remove_worker(worker)

    def remove_client(self, scheduler: Scheduler, client: str) -> None:
        """If the client was a run's driver, the run is over."""
        for state in [state for state in self.runs.values() if state.registration.client == client]:
            logger.warning(
                "run %s: its driver has left; type libra resume %s to continue the run", state.run, state.directory
            )
            self.end_run(state.run)
            if not state.registration.local:  # a cluster of the run's own has ended with its driver
                self.ended.driver_left(state.run)

    async def close(self) -> None:
        for run in list(self.runs):
            self.end_run(run)
        await self.ended.close()

    def _progressed(self, run: str, key: str | None = None, since_s: float | None = None) -> None:
        if guard := self.guards.get(run):
            guard.progressed(key, since_s)

    def _parked(self, key: str) -> None:
        if key in self.trajectories.tracked:
            self.trajectories.parked(key, None, None)
            return
        parsed = keys.parse(key)
        state = self._of(parsed.run, parsed.epoch) if parsed else None
        if parsed is None or state is None:
            task_logger.debug("%s waits for a run that is not on this scheduler", key)
        elif parsed.node == "gate":
            self._gate_parked(state, parsed, key)
        elif parsed.node == "batch":
            state.parked.batches[parsed.indices[0]] = key
            self._tell(state, facts.BatchParked(parsed.indices[0]))
        elif parsed.node == "wave":
            batch, wave = parsed.indices
            state.parked.waves[batch, wave] = key
            self._tell(state, facts.WaveParked(batch, wave))
        else:
            self.trajectories.parked(key, state, parsed)

    def _gate_parked(self, state: RunState, parsed: keys.Key, key: str) -> None:
        self._progressed(state.run)  # the driver requests more
        index = parsed.indices[0]
        if parsed.split == "eval":
            if index <= state.admission.version:
                self.trajectories.applier.open(state, key, keys.GRADE)
            else:
                state.parked.eval_gates.setdefault(index, []).append(key)
            return
        state.parked.gates[index] = key
        self._tell(state, facts.GateParked(index))

    def _tell(self, state: RunState, fact: Fact, _: str = "") -> None:
        self.trajectories.applier.tell(state, fact)

    def _own_handlers(self) -> dict[type[Fact], Handler]:
        engine: dict[type[Fact], Handler] = dict.fromkeys(
            (facts.EngineJoined, facts.EngineSlept, facts.EngineWoke, facts.VersionServed, facts.EngineQuarantined),
            self._engine_told,
        )
        told: dict[type[Fact], Handler] = dict.fromkeys(
            (facts.GroupCommitted, facts.StepFinished, facts.WaveTrained, facts.PromptsNamed), self._tell
        )
        own: dict[type[Fact], Handler] = {
            facts.VersionPublished: self._version_published,
            facts.WeightsHeld: self._weights_held,
            facts.EngineDeclared: self._engine_declared,
            facts.WorkerReady: self._ready,
            facts.SetupFailed: self._setup_failed,
            facts.RowsKept: lambda state, fact, _: state.workers.keeps_rows(fact.iteration, fact.group, fact.block),
            facts.SessionsUsed: lambda state, fact, _: state.sessions.update(facts.fields_of(fact)),
            facts.MismatchFound: self._mismatch_found,
            facts.BoundariesSet: self._boundaries_set,
        }
        return engine | told | own

    def _version_published(self, state: RunState, fact: facts.VersionPublished, _: str) -> None:
        if (step := state.log.timeline.measured(fact.version, state.log.uptime_s)) is not None:
            self._tell(state, step)
        self._tell(state, fact)
        for version in [v for v in state.parked.eval_gates if v <= state.admission.version]:
            for gate in state.parked.eval_gates.pop(version):
                self.trajectories.applier.open(state, gate, keys.GRADE)
        if state.one is None:
            announce_version(self._scheduler, state, fact.version)

    def _weights_held(self, state: RunState, fact: facts.WeightsHeld, address: str) -> None:
        state.workers.holders.offers(address, fact.at, trains=True)
        state.workers.holders.has(address, fact.version, fact.digest)

    def _boundaries_set(self, state: RunState, fact: facts.BoundariesSet, _: str) -> None:
        logger.info("run %s: %s", state.run, facts.sentence(fact))
        self._tell(state, fact)

    def _engine_told(self, state: RunState, fact: Fact, address: str) -> None:
        if not isinstance(fact, Signal):
            self._tell(state, fact)
        workers = state.workers
        match fact:
            case facts.EngineJoined(worker=name, weights=weights, kv=kv):
                workers.engines[name] = address
                workers.holders.offers(address, weights)
                if kv is not None:
                    workers.kv[name] = kv
                self.concurrency.joined(state.run, name, fact.engine)
                self.concurrency.apply(state.run, address)
            case facts.VersionServed(worker=name, version=version):
                workers.engines[name] = address
                self.liveness.checked(state.run, address, passed=True)
                workers.served[name] = version
                workers.holders.has(address, version)
            case facts.EngineSlept() | facts.EngineWoke():
                self.liveness.slept(state.run, address, asleep=isinstance(fact, facts.EngineSlept))
            case facts.EngineQuarantined(version=version, layer=layer, detail=detail, out=out):
                why = f"version {version}: {layer}: {detail}" if out else ""
                self.liveness.checked(state.run, address, passed=False, out=why)
        if (ahead := self.trajectories.ahead) is not None:
            scheduler_internals.tell_worker(self._scheduler, address, {"op": "libra-ahead", "ahead": ahead})
        self.trajectories.workers_changed()

    def _engine_declared(self, state: RunState, fact: facts.EngineDeclared, _: str) -> None:
        state.log.emit(fact)
        self.trajectories.workers.declared(fact)
        self.concurrency.declared(state.run, fact)
        self.trajectories.workers_changed()

    def _ready(self, state: RunState, fact: facts.WorkerReady, address: str) -> None:
        self.watch.ready(state, address)
        self.concurrency.apply(state.run, address)
        self.trajectories.workers_changed()

    def _setup_failed(self, state: RunState, fact: facts.SetupFailed, address: str) -> None:
        self.watch.failed(state, fact, address)
        self.roles.setup_failed(state, fact, address)

    def _mismatch_found(self, state: RunState, fact: facts.MismatchFound, _: str) -> None:
        state.log.emit(fact)
        state.notices.warn(logger, f"run {state.run}: {fact.detail}")

    def _sample(self) -> None:
        if not self.runs:
            return
        bound_key_cache()
        self.trajectories.workers_changed()  # it takes tasks a moment after `add_worker`
        for state in self.runs.values():
            state.sample()
            self.watch.look(state)

    def snapshots(self) -> list[dict[str, Any]]:
        """State of every run, JSON-able, for the dashboard page and its JSON route."""
        buckets = self.trajectories.dispatcher.buckets()
        return [
            state.dashboard_row(buckets)
            | {"roles": self.roles.roles(state.run, state.epoch)}
            | {"not_ready": self.liveness.rows(state.run, time.monotonic())}
            for state in self.runs.values()
        ]

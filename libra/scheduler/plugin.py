"""LibraPlugin: parked trajectories, gates and batches of every run on this scheduler.

A trajectory is one Dask task that runs in quanta. Between quanta it waits *parked*; the plugin gives it a slot of the
phase it needs, in the order of ``ts.priority``, on the worker that holds its KV cache if that has room. At the end of a
quantum the task reports (``log_event``, topic ``libra``) and raises ``Reschedule``; the report arrives first.

Invariants
----------
1. ``ts.priority`` is the single source of order: per phase, trajectories leave the queue in its order.
2. A worker never holds more quanta of a phase than it declares slots for. A trajectory may run its next generation in
   the slot it has, without parking, while no trajectory waits for one; when one does, rollout workers are told, and a
   slot comes free when a turn ends.
3. Only ``_apply`` writes priorities and only ``_dispatch`` and ``_open`` release tasks, each from a logged decision.
4. Whatever ends a quantum (report, worker loss, cancel), its slot is given back and its restrictions are parked again.
5. A hook never raises for what a worker reports: unknown runs and keys are ignored, and logged at DEBUG.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distributed.diagnostics.plugin import SchedulerPlugin
from tornado.ioloop import PeriodicCallback

from libra import keys
from libra.errors import RecordExists, StoreError
from libra.observe.page import attach_page
from libra.observe.task_stream import QuantumStream
from libra.policy import (
    Admission,
    Command,
    CommittedGroup,
    Fifo,
    OpenBatch,
    OpenGate,
    QuantumFinished,
    SetPriority,
    TrajectoryEnded,
    TrajectoryParked,
)
from libra.scheduler import private
from libra.scheduler.queue import ParkedQueue
from libra.scheduler.run_state import RunState, Tracked
from libra.scheduler.slots import Slots, choose
from libra.store.event_log import EventLog
from libra.store.journal import Journal
from libra.types import FailureClass, Phase, TrajectoryId

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler

logger = logging.getLogger(__name__)
task_logger = logging.getLogger(__name__ + ".tasks")

TOPIC = "libra"
SAMPLE_MS = 500
MAX_LOST_QUANTA = 3
"""A quantum whose worker died this often in a row ends its trajectory as a ``worker`` failure."""


class LibraPlugin(SchedulerPlugin):
    """One per scheduler, shared by all runs; registered by every driver, kept from the first."""

    name = "libra"
    idempotent = True

    def __init__(self) -> None:
        self.runs: dict[str, RunState] = {}
        self._tracked: dict[str, Tracked] = {}
        self._queues = {phase: ParkedQueue() for phase in Phase}
        self._slots = Slots()
        self._kicked = False
        self._dispatches = 0
        self._contended = False

    async def start(self, scheduler: Scheduler) -> None:
        """Hook into the scheduler: RPC handlers, the page, the task stream and a sampler."""
        self._scheduler = scheduler
        private.add_handlers(
            scheduler,
            {
                "libra_register_run": self.register_run,
                "libra_members": self.members,
                "libra_snapshots": self.snapshots,
                "libra_end_run": self.end_run,
            },
        )
        attach_page(scheduler, self.snapshots)
        self._stream = QuantumStream(scheduler)
        sampler = scheduler.periodic_callbacks["libra-sample"] = PeriodicCallback(self._sample, SAMPLE_MS)
        sampler.start()

    # ---------------------------------------------------------------- calls from the driver and from workers

    def register_run(
        self, run: str, epoch: int, directory: str, eta: int, iterations: int, groups_per_batch: int, event_log: bool
    ) -> dict[str, Any]:
        """Make a run known; a run of the same name and a newer epoch replaces the older one."""
        old = self.runs.get(run)
        if old is not None and old.epoch >= epoch:
            return {"error": f"run {run!r} is already on this scheduler with epoch {old.epoch}"}
        if old is not None:
            self.end_run(run)
        log = EventLog(Path(directory) / "events.jsonl") if event_log else None
        state = RunState(run, epoch, Path(directory), eta, iterations, Admission(eta, groups_per_batch), Fifo(), log)
        self.runs[run] = state
        state.emit("run_started", epoch=epoch, eta=eta, iterations=iterations)
        return {"started_s": state.started_s}

    def end_run(self, run: str) -> None:
        """Close a run's event log and forget the run."""
        state = self.runs.pop(run, None)
        if state is not None and state.log is not None:
            state.log.close()

    def members(self, run: str, batch: int) -> list[list[int]]:
        """Groups of a batch that was opened, as [iteration, group]."""
        return [list(member) for member in self.runs[run].admission.opened[batch]]

    # ---------------------------------------------------------------- scheduler hooks

    def transition(self, key: Any, start: str, finish: str, *args: Any, **kwargs: Any) -> None:
        """Follow parked tasks through Dask's states; the hot path of the plugin."""
        if start == "processing":
            tracked = self._tracked.get(key)
            if tracked is not None:
                self._left_worker(tracked)
        if finish == "no-worker":
            ts = self._scheduler.tasks[key]
            if private.is_parked(ts):
                self._parked(key)
        elif finish == "forgotten":
            tracked = self._tracked.pop(key, None)
            if tracked is not None:
                self._queues[tracked.phase].drop(key)
                tracked.run.policy.handle(TrajectoryEnded(key))

    def log_event(self, topic: str, msg: Any) -> None:
        """A worker reports; see ``libra.graph.reports`` for the messages."""
        if topic != TOPIC or not isinstance(msg, dict):
            return
        state = self.runs.get(msg.get("run", ""))
        if state is None or msg.get("epoch") != state.epoch:
            logger.debug("a report of an unknown run or an older epoch is ignored: %s", msg)
            return
        match msg["kind"]:
            case "quantum":
                self._quantum_reported(state, msg)
            case "group":
                self._group_reported(state, msg)
            case "published":
                state.emit(
                    "version_published", version=msg["version"], digest=msg["digest"], num_bytes=msg["num_bytes"]
                )
                self._apply(state, state.admission.version_published(msg["version"]))
                for version in [v for v in state.eval_gates if v <= state.admission.version]:
                    for gate in state.eval_gates.pop(version):
                        self._open(state, gate, keys.GRADE)
                self._announce(state, msg["version"])
            case "served":
                state.served[msg["name"]] = msg["version"]
                state.engines[msg["name"]] = msg["address"]
                state.emit("version_served", version=msg["version"], worker=msg["name"], load_s=msg["load_s"])
                if self._contended and msg["address"] in self._scheduler.workers:
                    self._tell_contention(msg["address"])
            case "step":
                state.emit("step_finished", step=msg["step"], loss=msg["loss"], train_s=msg["train_s"])
            case "iteration":
                if msg["reward"] is not None:
                    state.rewards.append((msg["iteration"], msg["reward"]))
                state.lags.append((msg["iteration"], msg["lag"]))
                state.emit("iteration_finished", iteration=msg["iteration"], reward=msg["reward"], lag=msg["lag"])

    def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        """New slots may be free."""
        for state in self.runs.values():
            state.emit("worker_joined", worker=private.worker_name(scheduler, worker), address=worker)
        self._kick()

    def remove_worker(self, scheduler: Scheduler, worker: str, **kwargs: Any) -> None:
        """Its slots are gone; its tasks have already left ``processing``."""
        self._slots.lose(worker)
        for state in self.runs.values():
            state.emit("worker_lost", address=worker)
        self._kick()

    async def close(self) -> None:
        """The scheduler stops."""
        for run in list(self.runs):
            self.end_run(run)

    # ---------------------------------------------------------------- parked tasks

    def _parked(self, key: str) -> None:
        tracked = self._tracked.get(key)
        if tracked is None:
            parsed = keys.parse(key)
            state = self.runs.get(parsed.run) if parsed else None
            if parsed is None or state is None or parsed.epoch != state.epoch:
                task_logger.debug("%s waits for a run that is not on this scheduler", key)
                return
            if parsed.node == "gate":
                self._gate_parked(state, parsed, key)
                return
            if parsed.node == "batch":
                state.batches[parsed.indices[0]] = key
                self._apply(state, state.admission.batch_parked(parsed.indices[0]))
                return
            tracked = self._tracked[key] = Tracked(key, parsed, state)
        state, iteration = tracked.run, tracked.parsed.indices[0]
        self._apply(state, state.policy.handle(TrajectoryParked(key, iteration, tracked.phase, tracked.quanta)))
        priority = list(self._scheduler.tasks[key].priority or ())
        state.emit("trajectory_parked", key=key, phase=tracked.phase, quanta=tracked.quanta, priority=priority)

    def _gate_parked(self, state: RunState, parsed: keys.Key, key: str) -> None:
        index = parsed.indices[0]
        if parsed.split == "eval":
            if index <= state.admission.version:
                self._open(state, key, keys.GRADE)
            else:
                state.eval_gates.setdefault(index, []).append(key)
            return
        state.gates[index] = key
        self._apply(state, state.admission.gate_parked(index))

    def _apply(self, state: RunState, commands: tuple[Command, ...]) -> None:
        """The one command applier."""
        for command in commands:
            match command:
                case SetPriority(key=key, priority=priority):
                    private.set_priority(self._scheduler.tasks[key], priority)
                    self._queues[self._tracked[key].phase].push(key, priority)
                    self._kick()
                case OpenGate(iteration=iteration, reason=reason):
                    state.iteration = max(state.iteration, iteration)
                    state.emit("gate_opened", iteration=iteration, reason=reason)
                    self._open(state, state.gates.pop(iteration), keys.GRADE)
                case OpenBatch(batch=batch, members=members, reason=reason):
                    state.emit("batch_opened", batch=batch, members=[list(m) for m in members], reason=reason)
                    self._open(state, state.batches.pop(batch), keys.COMMIT)

    def _open(self, state: RunState, key: str, resource: str) -> None:
        """Release a gate or a batch, outside of the transition that brought us here."""
        logger.debug("%s: %s opens", state.run, key)
        release = private.Release(key, {resource: 1}, None)
        self._scheduler.loop.add_callback(private.release, self._scheduler, [release], f"libra-open-{key}")

    def _kick(self) -> None:
        """Dispatch once, after what is going on now."""
        if not self._kicked:
            self._kicked = True
            self._scheduler.loop.add_callback(self._dispatch)

    def _dispatch(self) -> None:
        """Give free slots to parked trajectories, in order, phase by phase."""
        self._kicked = False
        scheduler = self._scheduler
        releases: list[private.Release] = []
        for phase, queue in self._queues.items():
            free = self._slots.free(phase, private.supply(scheduler, phase)) if len(queue) else {}
            while free:
                key = queue.pop()
                if key is None:
                    break
                ts, tracked = scheduler.tasks.get(key), self._tracked.get(key)
                if ts is None or tracked is None or ts.state != "no-worker":
                    continue
                address = choose(free, tracked.home.get(phase))
                free[address] -= 1
                if not free[address]:
                    del free[address]
                self._given(tracked, phase, address)
                releases.append(private.Release(key, {str(phase): 1}, address))
        if releases:
            self._dispatches += 1
            private.release(scheduler, releases, f"libra-dispatch-{self._dispatches}")
        contended = len(self._queues[Phase.ROLLOUT]) > 0
        if contended != self._contended:
            self._contended = contended
            for address in {address for state in self.runs.values() for address in state.engines.values()}:
                if address in scheduler.workers:
                    self._tell_contention(address)

    def _tell_contention(self, address: str) -> None:
        """Let a rollout worker know whether a trajectory that could go on at once must park instead."""
        self._scheduler.worker_send(address, {"op": "libra-contended", "contended": self._contended})

    def _given(self, tracked: Tracked, phase: Phase, address: str) -> None:
        state = tracked.run
        tracked.home[phase] = address
        tracked.at = (phase, address)
        tracked.reported = False
        self._slots.take(phase, address, tracked.key)
        if phase is Phase.ROLLOUT and tracked.parsed.split == "train":
            iteration, group, _ = tracked.parsed.indices
            state.admission.generation_started(iteration, group, state.admission.version)
        state.emit(
            "quantum_dispatched",
            key=tracked.key,
            phase=phase,
            quantum=tracked.quanta,
            worker=private.worker_name(self._scheduler, address),
            priority=list(self._scheduler.tasks[tracked.key].priority or ()),
        )

    def _left_worker(self, tracked: Tracked) -> None:
        """The quantum is over, one way or another."""
        if tracked.at is not None:
            phase, address = tracked.at
            tracked.at = None
            self._slots.give_back(phase, address, tracked.key)
            self._kick()
            if not tracked.reported and not tracked.ended:
                self._lost(tracked, phase, address)
        ts = self._scheduler.tasks.get(tracked.key)
        if (
            ts is not None
        ):  # also when it finished: a result lost with its worker is computed again, and must park first
            private.park(ts)

    def _lost(self, tracked: Tracked, phase: Phase, address: str) -> None:
        """A quantum ended without a report: its worker died, or was cancelled. The third time the attempt is over."""
        tracked.lost += 1
        state = tracked.run
        state.emit(
            "quantum_lost", key=tracked.key, phase=phase, quantum=tracked.quanta, address=address, times=tracked.lost
        )
        if tracked.lost < MAX_LOST_QUANTA:
            return
        detail = f"quantum {tracked.quanta} was lost {tracked.lost} times, the last time with {address}"
        record = {
            "kind": "failure",
            "failure": str(FailureClass.WORKER),
            "detail": detail,
            "worker": address,
            "start_s": 0.0,
            "stop_s": 0.0,
            "epoch": state.epoch,
        }
        iteration, group, sample = tracked.parsed.indices
        tid = TrajectoryId(iteration, group, sample, tracked.parsed.split)
        try:
            Journal(state.directory / "journal").append(str(tid), tracked.quanta, record)
        except RecordExists:
            task_logger.debug("%s: quantum %d was written, only its report was lost", tracked.key, tracked.quanta)
        except StoreError as error:
            logger.error("%s: its failure could not be recorded: %s", tracked.key, error)
            return
        else:
            state.failures[str(FailureClass.WORKER)] += 1
            state.emit("failure_classified", key=tracked.key, failure=str(FailureClass.WORKER), detail=detail)
        tracked.quanta += 1
        # Another attempt begins with a generation. Where the trajectory stands elsewhere, or is over, its next report says so.
        tracked.lost, tracked.phase = 0, Phase.ROLLOUT
        tracked.home.clear()
        ts = self._scheduler.tasks.get(tracked.key)
        if ts is not None:
            private.forgive(ts)

    # ---------------------------------------------------------------- reports

    def _quantum_reported(self, state: RunState, msg: dict[str, Any]) -> None:
        tracked = self._tracked.get(msg["key"])
        if tracked is None or tracked.at is None:
            task_logger.debug("late report ignored: %s", msg)
            return
        phase, address = tracked.at
        tracked.reported, tracked.lost = True, 0
        tracked.quanta = msg["quantum"] + 1
        if msg["next"]:
            tracked.phase = Phase(msg["next"])
        else:
            tracked.ended, tracked.phase = True, Phase.ROLLOUT
        ts = self._scheduler.tasks.get(msg["key"])
        if ts is not None:
            private.forgive(ts)
        if msg["goes_on"]:
            tracked.reported = False
        state.quanta[phase] += 1
        state.tokens += msg["tokens"]
        state.policy.handle(
            QuantumFinished(
                msg["key"], phase, msg["tokens"], msg["tool"], msg["status"], msg["stop_s"] - msg["start_s"]
            )
        )
        self._stream.add(
            msg["key"],
            address,
            str(phase),
            msg["start_s"],
            msg["stop_s"],
            msg["tool"] if phase is Phase.TOOL else "generate",
        )
        state.emit(
            "quantum_finished",
            key=msg["key"],
            phase=phase,
            quantum=msg["quantum"],
            tokens=msg["tokens"],
            tool=msg["tool"],
            status=msg["status"],
            payload_tokens=msg["payload_tokens"],
            latency_s=round(msg["stop_s"] - msg["start_s"], 6),
            worker=private.worker_name(self._scheduler, address),
            version=msg["version"],
            end=msg["end"],
        )
        if msg["goes_on"]:
            worker = private.worker_name(self._scheduler, address)
            state.emit("quantum_continued", key=msg["key"], phase=phase, quantum=tracked.quanta, worker=worker)
        if msg["failure"] != "none":
            if msg["next"]:
                tracked.home.clear()  # another attempt goes where there is room, not where this one failed
            state.failures[msg["failure"]] += 1
            state.emit("failure_classified", key=msg["key"], failure=msg["failure"], detail=msg["detail"])

    def _group_reported(self, state: RunState, msg: dict[str, Any]) -> None:
        if msg["split"] == "train":
            state.groups += 1
        for failure, count in msg["failures"].items():
            state.failures[failure] += count
        state.emit(
            "group_committed",
            split=msg["split"],
            iteration=msg["iteration"],
            group=msg["group"],
            oldest_version=msg["oldest_version"],
            reward=msg["reward"],
            failures=msg["failures"],
        )
        if msg["split"] == "train":
            done = CommittedGroup(msg["iteration"], msg["group"], msg["oldest_version"])
            self._apply(state, state.admission.group_committed(done))

    def _announce(self, state: RunState, version: int) -> None:
        """Tell every rollout worker that a version can be pulled, so that running requests need not wait for a new quantum."""
        message = {"op": "libra-version", "run": state.run, "epoch": state.epoch, "version": version}
        for worker, address in list(state.engines.items()):
            if (
                address in self._scheduler.workers
            ):  # only where a host said so: elsewhere the message would close the worker
                self._scheduler.worker_send(address, message)
            else:
                del state.engines[worker]
                state.served.pop(worker, None)

    # ---------------------------------------------------------------- seeing it

    def _sample(self) -> None:
        if not self.runs:
            return
        self._kick()  # a worker that has just joined takes tasks a moment after the hook that told us
        waiting = {phase: len(queue) for phase, queue in self._queues.items()}
        used = {phase: self._slots.used(phase) for phase in Phase}
        for state in self.runs.values():
            row = (waiting[Phase.ROLLOUT], waiting[Phase.TOOL], used[Phase.ROLLOUT], used[Phase.TOOL], state.tokens)
            state.history.append((round(state.uptime_s, 3), *row))
            if state.log is not None:
                state.log.flush()

    def snapshots(self) -> list[dict[str, Any]]:
        """State of every run, JSON-able; what the dashboard page and its JSON route show."""
        run_of = {key: tracked.run.run for key, tracked in self._tracked.items()}
        slots = {
            str(phase): {
                "used": self._slots.used(phase),
                "total": sum(private.supply(self._scheduler, phase).values()),
            }
            for phase in Phase
        }
        return [
            {
                "run": state.run,
                "epoch": state.epoch,
                "uptime_s": round(state.uptime_s, 3),
                "eta": state.eta,
                "iterations": state.iterations,
                "iteration": state.iteration,
                "versions": {"published": state.admission.version, "served": dict(state.served)},
                "slots": slots,
                "queue": {str(phase): queue.levels(run_of, state.run) for phase, queue in self._queues.items()},
                "quanta": {str(phase): state.quanta[phase] for phase in Phase},
                "tokens": state.tokens,
                "groups": state.groups,
                "failures": dict(state.failures),
                "rewards": [list(row) for row in state.rewards],
                "lag": [list(row) for row in state.lags],
                "history": [list(row) for row in state.history],
            }
            for state in self.runs.values()
        ]

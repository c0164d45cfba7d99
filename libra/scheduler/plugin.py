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
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distributed.diagnostics.plugin import SchedulerPlugin
from tornado.ioloop import PeriodicCallback

from libra import keys
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
from libra.scheduler.announcements import announce_version, engine_reported, newest_version, published, tell_contention
from libra.scheduler.lost_quanta import record_worker_failure
from libra.scheduler.queue import ParkedQueue
from libra.scheduler.run_state import RunState, Tracked
from libra.scheduler.slots import Slots, choose
from libra.scheduler.watchdog import StallGuard
from libra.store.event_log import EventLog
from libra.types import Phase

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
        self._signs: dict[Any, float] = {}  # monotonic seconds when a task on a worker was sent there, or last reported
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
                "libra_newest": lambda run, worker: newest_version(self.runs[run], worker),
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
    ) -> dict[str, Any]:
        """Make a run known; a run of the same name and a newer epoch replaces the older one.

        ``restored`` is the `Admission.snapshot` that a run which is resumed goes on from. ``watchdog_s`` is
        ``watchdog.timeout_s``, None where nobody looks for stalls.
        """
        old = self.runs.get(run)
        if old is not None and old.epoch >= epoch:
            return {"error": f"run {run!r} is already on this scheduler with epoch {old.epoch}"}
        if old is not None:
            self.end_run(run)
        log = EventLog(Path(directory) / "events.jsonl") if event_log else None
        admission = Admission(eta, groups_per_batch)
        if restored is not None:
            admission.restore(restored)
        state = RunState(run, epoch, Path(directory), eta, iterations, admission, Fifo(), log)
        self.runs[run] = state
        state.emit(
            "run_started",
            epoch=epoch,
            eta=eta,
            iterations=iterations,
            groups_per_batch=groups_per_batch,
            policy=state.policy.name,
        )
        state.emit_snapshot()
        if watchdog_s is not None:
            state.guard = StallGuard(self._scheduler, state, self._signs, self._phase_of, watchdog_s, watchdog_restart)
            state.guard.start()
        return {"started_s": state.started_s}

    def end_run(self, run: str) -> None:
        """Close a run's event log, stop its watchdog, forget the run."""
        state = self.runs.pop(run, None)
        if state is not None:
            state.close()

    def members(self, run: str, batch: int) -> list[list[int]]:
        """Groups of a batch that was opened, as [iteration, group]."""
        return [list(member) for member in self.runs[run].admission.opened[batch]]

    # ---------------------------------------------------------------- scheduler hooks

    def transition(self, key: Any, start: str, finish: str, *args: Any, **kwargs: Any) -> None:
        """Follow parked tasks through Dask's states; the hot path of the plugin."""
        if start == "processing":
            self._signs.pop(key, None)
            tracked = self._tracked.get(key)
            if tracked is not None:
                self._left_worker(tracked)
            elif finish == "memory":
                self._progressed(key)
        elif finish == "processing":
            self._signs[key] = time.monotonic()
        if finish == "no-worker":
            ts = self._scheduler.tasks[key]
            if private.is_parked(ts):
                self._parked(key)
        elif finish == "forgotten":
            tracked = self._tracked.pop(key, None)
            if tracked is not None:
                self._queues[tracked.phase].drop(key)
                tracked.run.emit("trajectory_ended", key=key)
                self._apply(tracked.run, tracked.run.policy.handle(TrajectoryEnded(key)))

    def log_event(self, topic: str, msg: Any) -> None:
        """A worker reports; see ``libra.graph.reports`` for the messages."""
        if topic != TOPIC or not isinstance(msg, dict):
            return
        state = self.runs.get(msg.get("run", ""))
        if state is None or msg.get("epoch") != state.epoch:
            logger.debug("a report of an unknown run or an older epoch is ignored: %s", msg)
            return
        state.progressed()
        match msg["kind"]:
            case "quantum" | "ended":
                self._quantum_reported(state, msg)
            case "group":
                self._group_reported(state, msg)
            case "published":
                published(state, msg)
                self._apply(state, state.admission.version_published(msg["version"]))
                for version in [v for v in state.eval_gates if v <= state.admission.version]:
                    for gate in state.eval_gates.pop(version):
                        self._open(state, gate, keys.GRADE)
                announce_version(self._scheduler, state, msg["version"])
            case "joined" | "served" | "quarantined":
                engine_reported(state, msg)
                if self._contended:
                    tell_contention(self._scheduler, msg["address"], True)
                self._kick()
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
            if state.guard is not None:
                state.guard.granted()
            state.emit("worker_joined", worker=private.worker_name(scheduler, worker), address=worker)
        self._kick()

    def remove_worker(self, scheduler: Scheduler, worker: str, **kwargs: Any) -> None:
        """Its slots are gone; its tasks have already left ``processing``."""
        self._slots.lose(worker)
        for state in self.runs.values():
            state.holders.lost(worker)
            state.emit("worker_lost", address=worker)
        self._kick()

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

    def _phase_of(self, key: str) -> Phase:
        tracked = self._tracked.get(key)
        if tracked is None:
            return Phase.ROLLOUT
        return tracked.at[0] if tracked.at is not None else tracked.phase

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
                state.emit("batch_parked", batch=parsed.indices[0])
                self._apply(state, state.admission.batch_parked(parsed.indices[0]))
                return
            tracked = self._tracked[key] = Tracked(key, parsed, state)
        state, iteration = tracked.run, tracked.parsed.indices[0]
        commands = state.policy.handle(TrajectoryParked(key, iteration, tracked.phase, tracked.quanta))
        own = commands[0] if commands and commands[0].key == key else None
        state.emit(
            "trajectory_parked",
            key=key,
            phase=tracked.phase,
            quanta=tracked.quanta,
            priority=own.priority if own else (),
            reason=own.reason if own else "",
        )
        self._apply(state, commands, on_the_line=own)

    def _gate_parked(self, state: RunState, parsed: keys.Key, key: str) -> None:
        state.progressed()  # the driver asks for more
        index = parsed.indices[0]
        if parsed.split == "eval":
            if index <= state.admission.version:
                self._open(state, key, keys.GRADE)
            else:
                state.eval_gates.setdefault(index, []).append(key)
            return
        state.gates[index] = key
        state.emit("gate_parked", iteration=index)
        self._apply(state, state.admission.gate_parked(index))

    def _apply(self, state: RunState, commands: tuple[Command, ...], on_the_line: Command | None = None) -> None:
        """The one command applier; every command gets a line, but ``on_the_line``, which is on that of its event already."""
        for command in commands:
            match command:
                case SetPriority(key=key, priority=priority, reason=reason):
                    if command is not on_the_line:
                        state.emit("priority_set", key=key, priority=priority, reason=reason)
                    ts, tracked = self._scheduler.tasks.get(key), self._tracked.get(key)
                    if ts is None or tracked is None:
                        continue
                    private.set_priority(ts, priority)
                    if ts.state == "no-worker":  # else it runs, and is given its place anew when it parks
                        self._queues[tracked.phase].push(key, priority)
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
                key = queue.pop(partial(self._fits, phase, free))
                if key is None:
                    break
                ts, tracked = scheduler.tasks.get(key), self._tracked.get(key)
                if ts is None or tracked is None or ts.state != "no-worker":
                    continue
                address = choose(free, tracked.home.get(phase), tracked.barred(phase))
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
                tell_contention(scheduler, address, contended)

    def _fits(self, phase: Phase, free: dict[str, int], key: str) -> bool:
        """Whether one of the workers with room may run a trajectory."""
        tracked = self._tracked.get(key)
        return tracked is None or not tracked.barred(phase) >= free.keys()

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
            priority=self._scheduler.tasks[tracked.key].priority or (),
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
        if tracked.lost >= MAX_LOST_QUANTA and record_worker_failure(tracked, address):
            private.forgive(self._scheduler.tasks.get(tracked.key))

    # ---------------------------------------------------------------- reports

    def _quantum_reported(self, state: RunState, msg: dict[str, Any]) -> None:
        tracked = self._tracked.get(msg["key"])
        if tracked is None or tracked.at is None:
            task_logger.debug("late report ignored: %s", msg)
            return
        phase, address = tracked.at
        if msg["kind"] == "ended":
            tracked.found_ended(msg["quanta"], private.worker_name(self._scheduler, address), msg["end"])
            return
        tracked.reported, tracked.lost = True, 0
        tracked.quanta = msg["quantum"] + 1
        if msg["next"]:
            tracked.phase = Phase(msg["next"])
        else:
            tracked.ended, tracked.phase = True, Phase.ROLLOUT
        private.forgive(self._scheduler.tasks.get(msg["key"]))
        if msg["goes_on"]:
            tracked.reported = False
            self._signs[msg["key"]] = time.monotonic()
        state.quanta[phase] += 1
        state.tokens += msg["tokens"]
        latency_s = round(msg["stop_s"] - msg["start_s"], 6)
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
            latency_s=latency_s,
            worker=private.worker_name(self._scheduler, address),
            version=msg["version"],
            end=msg["end"],
        )
        done = QuantumFinished(msg["key"], phase, msg["tokens"], msg["tool"], msg["status"], latency_s)
        self._apply(state, state.policy.handle(done))
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
        said = ("split", "iteration", "group", "oldest_version", "reward", "failures")
        state.emit("group_committed", **{name: msg[name] for name in said})
        if msg["split"] == "train":
            done = CommittedGroup(msg["iteration"], msg["group"], msg["oldest_version"])
            self._apply(state, state.admission.group_committed(done))

    # ---------------------------------------------------------------- seeing it

    def _sample(self) -> None:
        if not self.runs:
            return
        self._kick()  # a worker that has just joined takes tasks a moment after the hook that told us
        waiting = {phase: len(queue) for phase, queue in self._queues.items()}
        used = {phase: self._slots.used(phase) for phase in Phase}
        for state in self.runs.values():
            state.sample(waiting, used)

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
            state.shown(slots, {str(phase): queue.levels(run_of, state.run) for phase, queue in self._queues.items()})
            for state in self.runs.values()
        ]

"""Trajectories of all runs on a scheduler: parked, placed, reported, lost, over.

The dispatcher says who goes where, the orderings of the runs say in which order; this tells them what happens, in order, and
has the applier carry out what they answer.

Invariants
----------
1. ``ts.priority`` is the order: a free slot goes to the first of those that may have it (`libra.policy.dispatcher`).
2. A worker never holds more quanta of a phase than it declares slots for. A trajectory may run its next generation in
   the slot it has, without parking, while no trajectory waits for one; when one does, rollout workers are told, and a
   slot comes free when a turn ends.
3. Whatever ends a quantum (report, worker loss, cancel), its slot is given back and its restrictions are parked again.
4. Everything that policy objects are told is in the event log of the run first, in the same order.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from libra import keys
from libra.observe.task_stream import QuantumStream
from libra.policy import (
    Dispatcher,
    Event,
    HomeForgotten,
    QuantumFinished,
    QuantumStarted,
    TrajectoryEnded,
    TrajectoryParked,
    WorkerJoined,
    WorkerLeft,
)
from libra.scheduler import dask_internals
from libra.scheduler.announcements import tell_contention
from libra.scheduler.command_applier import Applier
from libra.scheduler.lost_quanta import record_worker_failure
from libra.scheduler.run_state import RunState, Tracked
from libra.scheduler.worker_registry import Workers
from libra.types import Phase, tool_outcome

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler

task_logger = logging.getLogger("libra.scheduler.tasks")

MAX_LOST_QUANTA = 3
"""A quantum whose worker died this often in a row ends its trajectory as a ``worker`` failure."""


_SEVERAL = object()


class Trajectories:
    """One per scheduler. ``runs`` is the plugin's own; ``signs`` has when a task was last seen to live, by key."""

    def __init__(self, scheduler: Scheduler, runs: dict[str, RunState], signs: dict[Any, float]) -> None:
        self._scheduler, self._runs, self._signs = scheduler, runs, signs
        self.dispatcher = Dispatcher()
        self.applier = Applier(scheduler, self.dispatcher, self.kick)
        self.workers = Workers(scheduler)
        self.stream = QuantumStream(scheduler)
        self.tracked: dict[str, Tracked] = {}
        self.contended = False
        self._only: RunState | object | None = None  # the one run that this dispatcher has ever been told of
        self.kicked = False
        self._dispatches = 0

    # ---------------------------------------------------------------- telling the policy objects

    def _tell(self, state: RunState, event: Event) -> None:
        """Tell the dispatcher and the run's ordering, and carry out what it answers."""
        self.dispatcher.handle(event)
        self.applier.apply(state, state.policy.handle(event))

    def register_run(self, state: RunState) -> None:
        """Tell a run that is new here which workers there are."""
        self._only = state if self._only is None and not self.tracked else _SEVERAL
        self._meet_workers(new=state)
        for joined in self.workers.told.values():
            self._tell_run(state, joined)

    def _meet_workers(self, new: RunState | None = None) -> None:
        """Tell everybody which workers came, left or changed since the last time; ``new`` is told of all afterwards."""
        silent = {address for state in self._runs.values() for address in state.quarantined | state.asleep}
        joining = {address for state in self._runs.values() for address in state.joining}
        for event in self.workers.changes(silent, joining):
            self._tell_all(event, new)

    def _tell_all(self, event: WorkerJoined | WorkerLeft, but: RunState | None = None) -> None:
        self.dispatcher.handle(event)
        for state in self._runs.values():
            if state is not but:
                self._tell_run(state, event)

    def _tell_run(self, state: RunState, event: WorkerJoined | WorkerLeft) -> None:
        if isinstance(event, WorkerJoined):
            state.emit("worker_capacity", **asdict(event))
        else:
            state.emit("worker_withdrawn", worker=event.worker)
        self.applier.apply(state, state.policy.handle(event))

    # ---------------------------------------------------------------- workers

    def worker_gone(self, address: str) -> None:
        """Its slots are gone; its tasks have already left ``processing``."""
        for event in self.workers.left(address):
            self._tell_all(event)
        self.kick()

    # ---------------------------------------------------------------- parked

    def parked(self, key: str, state: RunState | None, parsed: keys.Key | None) -> None:
        """A trajectory's task waits for the resource that nobody has; ``state`` and ``parsed`` where it is a new one."""
        tracked = self.tracked.get(key)
        if tracked is None:
            assert state is not None
            assert parsed is not None
            tracked = self.tracked[key] = Tracked(key, parsed, state)
        state, indices = tracked.run, tracked.parsed.indices
        tracked.told_ended = False
        event = TrajectoryParked(
            key, indices[0], tracked.phase, tracked.quanta, tracked.group, state.family, tracked.context_tokens
        )
        self.dispatcher.handle(event)
        commands = state.policy.handle(event)
        own = commands[0] if commands and commands[0].key == key else None
        state.note(
            state.lines.trajectory_parked,
            key,
            tracked.phase,
            tracked.quanta,
            tracked.context_tokens,
            getattr(own, "priority", ()),
            own.reason if own else "",
        )
        self.applier.apply(state, commands, on_the_line=own)

    def forgotten(self, key: str) -> None:
        """The scheduler has forgotten the task."""
        tracked = self.tracked.pop(key, None)
        if tracked is not None:
            self._over(tracked, completed=False)

    def _over(self, tracked: Tracked, *, completed: bool) -> None:
        """The trajectory has no more to do, which its run is told once for each time that it parked first."""
        if not tracked.told_ended:
            tracked.told_ended = True
            completed = (
                completed and not tracked.told_completed
            )  # a lost result is computed again, and teaches nothing new
            tracked.told_completed |= completed
            tracked.run.num_ended += 1
            tracked.run.emit("trajectory_ended", key=tracked.key, completed=completed)
            self._tell(tracked.run, TrajectoryEnded(tracked.key, completed))
            self._scheduler.loop.add_callback(tracked.run.learn)  # after what is going on now

    # ---------------------------------------------------------------- dispatch

    def kick(self) -> None:
        """Dispatch once, after what is going on now."""
        if not self.kicked:
            self.kicked = True
            self._scheduler.loop.add_callback(self._dispatch)

    def _dispatch(self) -> None:
        """Give free slots to parked trajectories, phase by phase."""
        self.kicked = False
        scheduler, dispatcher = self._scheduler, self.dispatcher
        self._meet_workers()
        releases: list[dask_internals.Release] = []
        alone = len(self._runs) == 1 and self._only is next(iter(self._runs.values()))
        for phase in Phase:
            for place in dispatcher.dispatch(phase):
                ts, tracked = scheduler.tasks.get(place.key), self.tracked.get(place.key)
                if ts is None or tracked is None or ts.state != "no-worker":
                    if tracked is not None:
                        tracked.run.emit("placement_void", key=place.key, phase=phase)
                    dispatcher.stopped(place.key)  # cancelled; it parks again if it is wanted
                    continue
                address = self.workers.address[place.worker]
                self._given(tracked, phase, place.worker, address, place.reason, alone)
                releases.append(dask_internals.Release(place.key, {str(phase): 1}, address))
        if releases:
            self._dispatches += 1
            self.applier.release(releases, f"libra-dispatch-{self._dispatches}")
        contended = dispatcher.num_waiting(Phase.ROLLOUT) > 0 or dispatcher.overfull()
        if contended != self.contended:
            self.contended = contended
            for address in {address for state in self._runs.values() for address in state.engines.values()}:
                tell_contention(scheduler, address, contended)

    def _given(self, tracked: Tracked, phase: Phase, worker: str, address: str, reason: str, alone: bool) -> None:
        state = tracked.run
        tracked.at, tracked.worker = (phase, address), worker
        tracked.reported = tracked.given_back = False
        if phase is Phase.ROLLOUT and tracked.parsed.split == "train":
            iteration, group, _ = tracked.parsed.indices
            state.admission.generation_started(iteration, group, state.admission.version)
        priority = self._scheduler.tasks[tracked.key].priority or ()
        task_logger.debug("%s: %s gets a %s slot of %s", reason, tracked.key, phase, worker)
        state.note(state.lines.quantum_dispatched, tracked.key, phase, tracked.quanta, worker, priority, reason, alone)
        self.applier.apply(state, state.policy.handle(QuantumStarted(tracked.key, phase, worker)))

    def left_worker(self, tracked: Tracked) -> None:
        """The quantum is over, one way or another."""
        if tracked.at is not None:
            phase, address = tracked.at
            tracked.at = None
            self.dispatcher.stopped(tracked.key)
            self.kick()
            if tracked.given_back:
                tracked.run.emit(
                    "quantum_given_back", key=tracked.key, phase=phase, quantum=tracked.quanta, address=address
                )
                self._forget_home(tracked)
            elif not tracked.reported and not tracked.ended:
                self._lost(tracked, phase, address)
        ts = self._scheduler.tasks.get(tracked.key)
        if ts is not None:
            # Also when it finished: a result lost with its worker is computed again, and must park first.
            dask_internals.park(ts)

    def _lost(self, tracked: Tracked, phase: Phase, address: str) -> None:
        """A quantum ended without a report: its worker died, or was cancelled. The third time the attempt is over."""
        tracked.lost += 1
        state = tracked.run
        state.emit(
            "quantum_lost", key=tracked.key, phase=phase, quantum=tracked.quanta, address=address, times=tracked.lost
        )
        if tracked.lost >= MAX_LOST_QUANTA and record_worker_failure(tracked, address):
            dask_internals.forgive(self._scheduler.tasks.get(tracked.key))
            self._forget_home(tracked)

    def _forget_home(self, tracked: Tracked) -> None:
        """Another attempt goes where there is room, not where this one failed."""
        tracked.run.emit("home_forgotten", key=tracked.key)
        self._tell(tracked.run, HomeForgotten(tracked.key))

    # ---------------------------------------------------------------- reports

    def reported(self, state: RunState, msg: dict[str, Any]) -> None:
        """A worker says what a quantum did, before its task leaves it."""
        tracked = self.tracked.get(msg["key"])
        if tracked is None or tracked.at is None:
            task_logger.debug("late report ignored: %s", msg)
            return
        phase, address = tracked.at
        if msg["kind"] == "given_back":
            tracked.given_back = True
            dask_internals.forgive(self._scheduler.tasks.get(msg["key"]))
            return
        if msg["kind"] == "ended":
            tracked.found_ended(msg["quanta"], tracked.worker, msg["end"])
            self._over(tracked, completed=False)  # it was counted when it ended
            return
        tracked.reported, tracked.lost = True, 0
        tracked.quanta = msg["quantum"] + 1
        tracked.context_tokens = msg["context_tokens"]
        tracked.end = msg["end"]
        if msg["next"]:
            tracked.phase = Phase(msg["next"])
        else:
            tracked.ended, tracked.phase = True, Phase.ROLLOUT
        dask_internals.forgive(self._scheduler.tasks.get(msg["key"]))
        if msg["goes_on"]:
            tracked.reported = False
            self._signs[msg["key"]] = time.monotonic()
        state.quanta[phase] += 1
        state.tokens += msg["tokens"]
        latency_s = round(msg["stop_s"] - msg["start_s"], 6)
        name = msg["tool"] if phase is Phase.TOOL else "generate"
        self.stream.add(msg["key"], address, phase, msg["start_s"], msg["stop_s"], name)
        tokens, tool, payload = msg["tokens"], msg["tool"], msg["payload_tokens"]
        status = tool_outcome(msg["status"])
        state.note(
            state.lines.quantum_finished,
            msg["key"],
            phase,
            msg["quantum"],
            tokens,
            tool,
            status,
            payload,
            latency_s,
            tracked.worker,
            msg["version"],
            msg["end"],
        )
        done = QuantumFinished(msg["key"], phase, tokens, tool, status, latency_s, payload)
        self._tell(state, done)
        if msg["goes_on"]:
            state.emit("quantum_continued", key=msg["key"], phase=phase, quantum=tracked.quanta, worker=tracked.worker)
            self._tell(state, QuantumStarted(msg["key"], phase, tracked.worker))
        if tracked.ended:
            self._over(tracked, completed=tracked.completed)
        if msg["failure"] != "none":
            state.failures[msg["failure"]] += 1
            state.emit("failure_classified", key=msg["key"], failure=msg["failure"], detail=msg["detail"])
            if msg["next"]:
                self._forget_home(tracked)

    # ---------------------------------------------------------------- seeing it

    def slots(self) -> dict[str, dict[str, int]]:
        """Slots by phase, taken and in all."""
        return {str(phase): dict(zip(("used", "total"), self.dispatcher.slots(phase), strict=True)) for phase in Phase}

    def levels(self, run: str) -> dict[str, dict[int, int]]:
        """How many trajectories of a run wait at each level, by phase."""
        return {
            str(phase): dict(
                Counter(p.level for key, p in self.dispatcher.waiting(phase).items() if self._of(key, run))
            )
            for phase in Phase
        }

    def _of(self, key: str, run: str) -> bool:
        tracked = self.tracked.get(key)
        return tracked is not None and tracked.run.run == run

    def phase_of(self, key: str) -> Phase:
        """The phase that a task of ours runs, or waits for."""
        tracked = self.tracked.get(key)
        if tracked is None:
            return Phase.ROLLOUT
        return tracked.at[0] if tracked.at is not None else tracked.phase

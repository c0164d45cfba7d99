"""Trajectories of all runs on a scheduler: parked, placed, reported, lost, ended.

The dispatcher chooses workers, the orderings of the runs choose the order. This module passes them the events in order, and
their commands to the applier.

Invariants
----------
1. ``ts.priority`` is the order: a free slot goes to the first trajectory that may have it (`libra.policy.dispatcher`).
2. A worker never holds more quanta of a phase than it declares slots for. A trajectory may run its next generation in its
   slot without parking while no other waits for one; when one does, rollout workers are notified, and a slot comes free when
   a turn ends.
3. However a quantum ends (report, worker loss, cancel), its slot is free again and its task has the parked restrictions.
4. Every event that policy objects receive is in the event log of the run first, in the same order.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any, cast

import msgspec

from libra import events, keys
from libra.events.reports import (
    FoundEndedReport,
    GivenBackReport,
    HomeChangedReport,
    QuantumReport,
    TrajectoryReport,
)
from libra.keys import TOOL_CORES, TOOL_GPUS, TOOL_MIB
from libra.observe.task_stream import QuantumStream
from libra.policy import (
    Dispatcher,
    Event,
    HomeForgotten,
    KVTransferred,
    Place,
    QuantumFinished,
    QuantumStarted,
    SetPriority,
    TrajectoryEnded,
    TrajectoryParked,
    WorkerJoined,
    WorkerLeft,
)
from libra.policy.messages import ActionRequested, LeaseTaken, ToolCapacity, ToolsDeclared
from libra.scheduler import dask_internals
from libra.scheduler.announcements import announce_move, announce_revocation, send_contention
from libra.scheduler.command_applier import Applier
from libra.scheduler.lost_quanta import record_worker_failure
from libra.scheduler.run_state import RunState, Tracked
from libra.scheduler.tool_workers import ToolWorkers
from libra.scheduler.worker_registry import Workers
from libra.types import Phase, tool_outcome

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler

task_logger = logging.getLogger("libra.scheduler.tasks")

MAX_LOST_QUANTA = 3
"""Consecutive times that a quantum's worker may die before the trajectory ends as a ``worker`` failure."""


_SEVERAL = object()


def _resources(place: Place) -> dict[str, float]:
    """What the task of a placed quantum takes of its worker, in Dask's terms."""
    taken: dict[str, float] = {str(place.phase): 1}
    if (lease := place.lease) is not None:
        amounts = {TOOL_CORES: lease.cores, TOOL_MIB: lease.memory_bytes >> 20, TOOL_GPUS: lease.gpus}
        taken |= {name: amount for name, amount in amounts.items() if amount}
    return taken


class Trajectories:
    """One per scheduler. ``runs`` is the plugin's own; ``signs`` has the time of each task's last sign of activity, by
    key."""

    def __init__(self, scheduler: Scheduler, runs: dict[str, RunState], signs: dict[Any, float]) -> None:
        self._scheduler, self._runs, self._signs = scheduler, runs, signs
        self.dispatcher = Dispatcher()
        self.applier = Applier(scheduler, self.dispatcher, self.kick)
        self.workers = Workers(scheduler)
        self.stream = QuantumStream(scheduler)
        self.tracked: dict[str, Tracked] = {}
        self.contended = False
        self._only: RunState | object | None = None  # the only run that this dispatcher has ever had
        self.kicked = False
        self._dispatches = 0
        self._tool_capacity: dict[str, tuple[str, ToolCapacity]] = {}
        self.tool_workers = ToolWorkers(scheduler, self.dispatcher, self.workers, runs)
        self._due: Any = None  # the timer of the next moment at which a quota may let an action go

    # ---------------------------------------------------------------- events for policy objects

    def _handle(self, state: RunState, event: Event) -> None:
        """Pass an event to the dispatcher and the run's ordering, and carry out its commands."""
        self.dispatcher.handle(event)
        self.applier.apply(state, state.handle(event))

    def register_run(self, state: RunState) -> None:
        """Notify a new run of the present workers."""
        if state.one is not None:
            self.dispatcher.allowed = self._allowed
        self._only = state if self._only is None and not self.tracked else _SEVERAL
        if state.registration.tools:
            self._declare_tools(state)
        self._update_workers(new=state)
        for joined in self.workers.known.values():
            self._notify_run(state, joined)

    def _declare_tools(self, state: RunState) -> None:
        """From now on actions hold leases; the tools of a run have its name before theirs."""
        registration = state.registration
        tools = {f"{state.run}/{name}": needs for name, needs in registration.tools.items()}
        plain = {name: msgspec.to_builtins(needs) for name, needs in tools.items()}
        state.log.emit(events.ToolsDeclared, tools=plain, quotas=registration.quotas)
        self.dispatcher.handle(ToolsDeclared(tools, registration.quotas))
        self._tool_capacity.clear()  # the log of this run has them, too

    def _update_tool_capacity(self) -> None:
        """Notify the leases of what workers have for actions besides slots."""
        supplies = [dask_internals.supply(self._scheduler, kind) for kind in (TOOL_CORES, TOOL_MIB, TOOL_GPUS)]
        for name, address in self.workers.address.items():
            cores, mib, gpus = (supply.get(address, 0) for supply in supplies)
            has = ToolCapacity(name, cores, mib << 20, gpus)
            if self._tool_capacity.get(name) != (address, has):
                self._tool_capacity[name] = address, has
                for state in self._runs.values():
                    state.log.emit(events.ToolCapacity, **msgspec.structs.asdict(has))
                self.dispatcher.handle(has)

    def _allowed(self, key: str, worker: str) -> bool:
        """Whether the version of a worker's engine is one that a trajectory may go on, or begin, with."""
        one = self.tracked[key].run.one
        return one is None or one.may(key, worker)

    def _update_workers(self, new: RunState | None = None) -> None:
        """Notify all runs but ``new`` of workers that joined, left or changed since the last call."""
        silent = {
            address for state in self._runs.values() for address in state.workers.quarantined | state.workers.asleep
        }
        joining = {address for state in self._runs.values() for address in state.workers.joining}
        for event in self.workers.changes(silent, joining):
            self._notify_all(event, new)

    def _notify_all(self, event: WorkerJoined | WorkerLeft, but: RunState | None = None) -> None:
        self.dispatcher.handle(event)
        for state in self._runs.values():
            if state is not but:
                self._notify_run(state, event)

    def _notify_run(self, state: RunState, event: WorkerJoined | WorkerLeft) -> None:
        if isinstance(event, WorkerJoined):
            state.log.emit(events.WorkerCapacity, **msgspec.structs.asdict(event))
        else:
            state.log.emit(events.WorkerWithdrawn, worker=event.worker)
        self.applier.apply(state, state.handle(event))

    # ---------------------------------------------------------------- workers

    def worker_gone(self, address: str) -> None:
        """Its slots are gone; its tasks have already left ``processing``."""
        for event in self.workers.left(address):
            self._notify_all(event)
        self.kick()

    # ---------------------------------------------------------------- parked

    def parked(self, key: str, state: RunState | None, parsed: keys.Key | None) -> None:
        """A trajectory's task is parked; ``state`` and ``parsed`` are given for a new one."""
        tracked = self.tracked.get(key)
        if tracked is None:
            assert state is not None
            assert parsed is not None
            tracked = self.tracked[key] = Tracked(key, parsed, state)
        state, indices = tracked.run, tracked.parsed.indices
        tracked.policy_ended = False
        tracked.parked_s = time.monotonic()
        if tracked.calls and tracked.phase is Phase.TOOL and self.dispatcher.leases is not None:
            tools = tuple(f"{state.run}/{name}" for name in tracked.calls)
            state.log.emit(events.ActionRequested, key, tools)
            self.dispatcher.handle(ActionRequested(key, tools))
        event = TrajectoryParked(
            key,
            indices[0],
            tracked.phase,
            tracked.quanta,
            tracked.group,
            state.registration.family,
            tracked.context_tokens,
        )
        self.dispatcher.handle(event)
        commands = state.handle(event)
        first = commands[0] if commands else None
        own = first if isinstance(first, SetPriority) and first.key == key else None
        state.log.emit(
            events.TrajectoryParked,
            key,
            tracked.phase,
            tracked.quanta,
            tracked.context_tokens,
            own.priority if own else (),
            own.reason if own else "",
        )
        self.applier.apply(state, commands, on_the_line=own)

    def forgotten(self, key: str) -> None:
        """The scheduler has forgotten the task."""
        tracked = self.tracked.pop(key, None)
        if tracked is not None:
            self._ended(tracked, completed=False)

    def _ended(self, tracked: Tracked, *, completed: bool) -> None:
        """The trajectory has ended; its run is notified once for each first parking."""
        if not tracked.policy_ended:
            tracked.policy_ended = True
            # A lost result is computed again, and gives the policy no new information.
            completed = completed and not tracked.policy_completed
            tracked.policy_completed |= completed
            tracked.run.num_ended += 1
            tracked.run.log.emit(events.TrajectoryEnded, key=tracked.key, completed=completed)
            self._handle(tracked.run, TrajectoryEnded(tracked.key, completed))
            self._scheduler.loop.add_callback(tracked.run.learn)  # after the current callback

    # ---------------------------------------------------------------- dispatch

    def kick(self) -> None:
        """Dispatch once, after the current callback."""
        if not self.kicked:
            self.kicked = True
            self._scheduler.loop.add_callback(self._dispatch)

    def _dispatch(self) -> None:
        """Give free slots to parked trajectories, phase by phase."""
        self.kicked = False
        scheduler, dispatcher = self._scheduler, self.dispatcher
        self._update_workers()
        at_s = round(time.monotonic(), 6)
        if dispatcher.leases is not None:
            self._update_tool_capacity()
        releases: list[dask_internals.Release] = []
        alone = len(self._runs) == 1 and self._only is next(iter(self._runs.values()))
        for phase in Phase:
            for place in dispatcher.dispatch(phase, at_s):
                ts, tracked = scheduler.tasks.get(place.key), self.tracked.get(place.key)
                if place.lease is not None and tracked is not None:
                    self._leased(tracked, place, place.lease)
                if ts is None or tracked is None or ts.state != "no-worker":
                    if tracked is not None:
                        tracked.run.log.emit(events.PlacementVoid, key=place.key, phase=phase)
                    dispatcher.stopped(place.key)  # cancelled; it parks again if it is still needed
                    continue
                address = self.workers.address[place.worker]
                self._dispatched(tracked, phase, address, place, alone)
                releases.append(dask_internals.Release(place.key, _resources(place), address))
        if releases:
            self._dispatches += 1
            self.applier.release(releases, f"libra-dispatch-{self._dispatches}")
        self._revoke(at_s, alone)
        if dispatcher.leases is not None:
            self._look_again(dispatcher.leases.table.next_s(at_s), at_s)
        emptying = any(state.one is not None and state.one.emptying for state in self._runs.values())
        contended = emptying or dispatcher.contended()
        if contended != self.contended:
            self.contended = contended
            for address in {address for state in self._runs.values() for address in state.workers.engines.values()}:
                send_contention(scheduler, address, contended)

    def _leased(self, tracked: Tracked, place: Place, lease: LeaseTaken) -> None:
        queued_s = round(max(0.0, lease.at_s - tracked.parked_s), 6)
        tracked.leased = lease.cores, queued_s
        fields = msgspec.structs.asdict(lease)
        tracked.run.log.emit(events.LeaseGranted, key=place.key, worker=place.worker, queued_s=queued_s, **fields)

    def _revoke(self, at_s: float, alone: bool) -> None:
        """Have actions stopped whose lease was revoked; those that have left their worker have released it."""
        for revoke in self.dispatcher.revocations():
            tracked = self.tracked.get(revoke.holder)
            if tracked is None or tracked.at is None:
                continue
            state, (_, address) = tracked.run, tracked.at
            state.revoked += 1
            task_logger.info("%s: %s stops on %s", revoke.reason, revoke.holder, revoke.worker)
            state.log.emit(
                events.LeaseRevoked, key=revoke.holder, worker=revoke.worker, at_s=at_s, ran_s=revoke.ran_s, reason=revoke.reason,
                alone=alone,
            )  # fmt: skip
            announce_revocation(self._scheduler, state, address, revoke.holder, tracked.quanta)

    def _look_again(self, next_s: float | None, at_s: float) -> None:
        """Dispatch when a quota may let an action go, if nothing else comes before."""
        loop = self._scheduler.loop
        if self._due is not None:
            loop.remove_timeout(self._due)
        self._due = None if next_s is None else loop.call_later(next_s - at_s + 1e-3, self.kick)

    def _dispatched(self, tracked: Tracked, phase: Phase, address: str, place: Place, alone: bool) -> None:
        state, worker, reason, move = tracked.run, place.worker, place.reason, place.move
        tracked.move = None
        if move is not None and announce_move(self._scheduler, state, worker, tracked.key, move):
            tracked.move = move
        tracked.at, tracked.worker = (phase, address), worker
        tracked.reported = tracked.given_back = tracked.revoked = False
        if phase is Phase.ROLLOUT and tracked.parsed.split == "train":
            iteration, group, _ = tracked.parsed.indices
            state.admission.generation_started(iteration, group, state.admission.version)
        priority = cast("tuple[int, ...]", self._scheduler.tasks[tracked.key].priority or ())  # as the applier set it
        task_logger.debug("%s: %s gets a %s slot of %s", reason, tracked.key, phase, worker)
        quantum = tracked.quanta
        state.log.emit(events.QuantumDispatched, tracked.key, phase, quantum, worker, priority, reason, alone)
        self.applier.apply(state, state.handle(QuantumStarted(tracked.key, phase, worker)))

    def left_worker(self, tracked: Tracked) -> None:
        """The quantum has ended, with or without a report."""
        if tracked.at is not None:
            phase, address = tracked.at
            tracked.at = None
            self.dispatcher.stopped(tracked.key)
            self.kick()
            if tracked.given_back:
                tracked.run.log.emit(events.QuantumGivenBack, tracked.key, phase, tracked.quanta, address)
                if not tracked.revoked:
                    self._forget_home(tracked)
            elif not tracked.reported and not tracked.ended:
                self._lost(tracked, phase, address)
        ts = self._scheduler.tasks.get(tracked.key)
        if ts is not None:
            # Also when it finished: a result lost with its worker is computed again, and must park first.
            dask_internals.park(ts)

    def _lost(self, tracked: Tracked, phase: Phase, address: str) -> None:
        """A quantum ended without a report: its worker died, or it was cancelled. The third time ends the attempt."""
        tracked.lost += 1
        state = tracked.run
        state.log.emit(events.QuantumLost, tracked.key, phase, tracked.quanta, address, tracked.lost)
        if tracked.lost >= MAX_LOST_QUANTA and record_worker_failure(tracked, address):
            dask_internals.forgive(self._scheduler.tasks.get(tracked.key))
            self._forget_home(tracked)

    def _forget_home(self, tracked: Tracked) -> None:
        """Clear the home, so that the next attempt goes to any worker with a free slot, not to the one where this attempt
        failed."""
        tracked.run.log.emit(events.HomeForgotten, key=tracked.key)
        self._handle(tracked.run, HomeForgotten(tracked.key))

    # ---------------------------------------------------------------- reports

    def reported(self, state: RunState, report: TrajectoryReport) -> None:
        """A worker reports a quantum, before its task leaves it."""
        tracked = self.tracked.get(report.key)
        if tracked is None or tracked.at is None:
            task_logger.debug("late report ignored: %s", report)
            return
        match report:
            case GivenBackReport(key=key, revoked=revoked):
                tracked.given_back, tracked.revoked = True, revoked
                dask_internals.forgive(self._scheduler.tasks.get(key))
            case FoundEndedReport(quanta=quanta, end=end):
                tracked.found_ended(quanta, tracked.worker, end)
                self._ended(tracked, completed=False)  # it was counted when it ended
            case HomeChangedReport():
                self._home_changed(state, tracked, report)
            case QuantumReport():
                self._quantum_finished(state, tracked, tracked.at, report)

    def _home_changed(self, state: RunState, tracked: Tracked, report: HomeChangedReport) -> None:
        move, tracked.move = tracked.move, None
        if move is None:
            return
        done = KVTransferred(report.num_bytes, report.took_s)
        expected_s = {"prefill_s": round(move.prefill_s, 9), "transfer_s": round(move.transfer_s or 0.0, 9)}
        state.log.emit(
            events.HomeChanged, key=tracked.key, home=move.home, worker=tracked.worker, tokens=move.tokens, sent=move.sends,
            took_s=done.seconds, num_bytes=done.num_bytes, refused=report.refused, **expected_s,
        )  # fmt: skip
        if done.num_bytes:
            self._handle(state, done)

    def _quantum_finished(
        self, state: RunState, tracked: Tracked, at: tuple[Phase, str], report: QuantumReport
    ) -> None:
        key, (phase, address) = report.key, at
        tracked.reported, tracked.lost = True, 0
        tracked.quanta = report.quantum + 1
        tracked.context_tokens = report.context_tokens
        tracked.end = report.end
        tracked.calls = report.calls
        if phase is Phase.TOOL and tracked.leased is not None:
            self._action_finished(state, tracked, report)
        if report.next:
            tracked.phase = Phase(report.next)
        else:
            tracked.ended = True
            tracked.begin()
        dask_internals.forgive(self._scheduler.tasks.get(key))
        if report.goes_on:
            tracked.reported = False
            self._signs[key] = time.monotonic()
        latency_s = round(report.stop_s - report.start_s, 6)
        if phase is Phase.TOOL:
            self.tool_workers.acted(latency_s)
        name = report.tool if phase is Phase.TOOL else "generate"
        self.stream.add(key, address, phase, report.start_s, report.stop_s, name)
        tokens, tool, payload = report.tokens, report.tool, report.payload_tokens
        status = tool_outcome(report.status)
        tools_s = round(min(report.ran_s, latency_s), 6) if phase is Phase.ROLLOUT else 0.0
        state.log.emit(
            events.QuantumFinished,
            key,
            phase,
            report.quantum,
            tokens,
            tool,
            status,
            payload,
            latency_s,
            tracked.worker,
            report.version,
            report.end,
            report.unfinished,
            tools_s,
        )
        done = QuantumFinished(key, phase, tokens, tool, status, latency_s, payload, tools_s)
        self._handle(state, done)
        if report.goes_on:
            state.log.emit(events.QuantumContinued, key, phase, tracked.quanta, tracked.worker)
            self._handle(state, QuantumStarted(key, phase, tracked.worker))
        if tracked.ended:
            self._ended(tracked, completed=tracked.completed)
        if report.failure != "none":
            state.log.emit(events.FailureClassified, key, report.failure, report.detail)
            if report.next:
                self._forget_home(tracked)

    def _action_finished(self, state: RunState, tracked: Tracked, report: QuantumReport) -> None:
        assert tracked.leased is not None
        (cores, queued_s), tracked.leased = tracked.leased, None
        whole_s = max(0.0, time.monotonic() - tracked.parked_s - queued_s)
        state.log.emit(
            events.ActionFinished, key=tracked.key, worker=tracked.worker, cores=cores, queued_s=queued_s,
            ran_s=round(report.ran_s, 6), overhead_s=round(max(0.0, whole_s - report.ran_s), 6),
            killed=report.failure == "tool" and "killed: it took more than" in report.detail,
        )  # fmt: skip

    # ---------------------------------------------------------------- for the dashboard

    def phase_of(self, key: str) -> Phase:
        """The phase that a task runs, or waits for."""
        tracked = self.tracked.get(key)
        if tracked is None:
            return Phase.ROLLOUT
        return tracked.at[0] if tracked.at is not None else tracked.phase

"""Trajectories of all runs on a scheduler: parked, placed, reported, lost, ended.

Invariants
----------
1. ``ts.priority`` is the order: a free slot goes to the first trajectory that may have it
   (`libra.policy.dispatcher`).
2. A worker never runs more quanta of a phase than it declares slots. A trajectory keeps its slot
   for its next generation unless a trajectory of an earlier iteration or a better level waits.
3. At every end of a quantum (report, worker loss, cancel) its slot becomes free and its task gets
   the parked restrictions.
4. The run's event log gets every event before the policy objects do, in the same order.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, cast

from libra import facts, keys
from libra.keys import TOOL_CORES, TOOL_GPUS, TOOL_MIB
from libra.observe.task_stream import QuantumStream
from libra.policy import EVERYONE, Dispatcher, Place
from libra.policy.leases.resources import Lease
from libra.policy.liveness import Liveness
from libra.scheduler import scheduler_internals
from libra.scheduler.command_applier import Applier, announce_move
from libra.scheduler.run_state import Handler, RunState, Tracked
from libra.scheduler.worker_supply import ToolWorkers, Workers
from libra.types import Phase

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler

task_logger = logging.getLogger("libra.scheduler.tasks")

MAX_LOST_QUANTA = 3  # worker deaths in a row under a quantum that end an attempt


AHEAD_EVERY_S = 0.02  # delay before a new best rank is announced


def _differ(ahead: facts.Priority | None, known: facts.Priority | None) -> bool:
    return (ahead and ahead[:2]) != (known and known[:2])


def _resources(place: Place) -> dict[str, float]:
    taken: dict[str, float] = {str(place.phase): 1}
    if place.lease is not None:
        has = place.lease.resources
        amounts = {TOOL_CORES: has.cores, TOOL_MIB: has.memory_bytes >> 20, TOOL_GPUS: has.gpus}
        taken |= {name: amount for name, amount in amounts.items() if amount}
    return taken


class Trajectories:
    def __init__(
        self, scheduler: Scheduler, runs: dict[str, RunState], last_activity: dict[Any, float], liveness: Liveness
    ) -> None:
        self._scheduler, self._runs, self._last_activity = scheduler, runs, last_activity
        self.dispatcher = Dispatcher()
        self.applier = Applier(scheduler, self.dispatcher, self.kick)
        self.workers = Workers(scheduler, liveness)
        self.stream = QuantumStream(scheduler)
        self.tracked: dict[str, Tracked] = {}
        self.ahead: facts.Priority | None = None  # as the rollout workers know it
        self._announces_ahead = False
        self._num_runs = 0  # so far
        self.kicked = False
        self._seen_running = -1  # running workers at the last look; -1: look again
        self._tool_capacity: dict[str, tuple[str, facts.ToolCapacity]] = {}
        self.tool_workers = ToolWorkers(scheduler, self.dispatcher, self.workers, runs)
        self._due: Any = None  # the timer of the next moment at which a quota may let an action go

    def _tell(self, state: RunState, fact: facts.Fact) -> None:
        state.log.emit(fact)
        self.dispatcher.handle(fact)
        self.applier.apply(state, state.tell(fact))

    def register_run(self, state: RunState) -> None:
        if state.one is not None:
            self.dispatcher.allowed = self._allowed
        self._num_runs += 1
        if state.registration.tools:
            self._declare_tools(state)
        self._notify_all(self.workers.changes(), but=state)
        for joined in self.workers.known.values():
            self.applier.tell(state, joined)

    def _declare_tools(self, state: RunState) -> None:
        tools = {f"{state.run}/{name}": needs for name, needs in state.registration.tools.items()}
        quotas = {name: str(quota) for name, quota in state.settings.environment.quotas.items()}
        declared = facts.ToolsDeclared(tools, quotas)
        state.log.emit(declared)
        self.dispatcher.handle(declared)
        self._tool_capacity.clear()  # the log of this run has them, too

    def _update_tool_capacity(self) -> None:
        supplies = [scheduler_internals.supply(self._scheduler, kind) for kind in (TOOL_CORES, TOOL_MIB, TOOL_GPUS)]
        for name, address in self.workers.address.items():
            cores, mib, gpus = (supply.get(address, 0) for supply in supplies)
            has = facts.ToolCapacity(name, cores, mib << 20, gpus)
            if self._tool_capacity.get(name) != (address, has):
                self._tool_capacity[name] = address, has
                for state in self._runs.values():
                    state.log.emit(has)
                self.dispatcher.handle(has)

    def _allowed(self, key: str, worker: str) -> bool:
        one = self.tracked[key].run.one
        return one is None or one.may(key, worker)

    def _notify_all(
        self, events: Iterable[facts.WorkerCapacity | facts.WorkerWithdrawn], but: RunState | None = None
    ) -> None:
        for event in events:
            self.dispatcher.handle(event)
            for state in self._runs.values():
                if state is not but:
                    self.applier.tell(state, event)

    def worker_gone(self, address: str) -> None:
        self._notify_all(self.workers.left(address))
        self.workers_changed()

    def parked(self, key: str, state: RunState | None, parsed: keys.Key | None) -> None:
        """A trajectory's task is parked; ``state`` and ``parsed`` come with a new trajectory."""
        if (tracked := self.tracked.get(key)) is None:
            assert state is not None and parsed is not None
            tracked = self.tracked[key] = Tracked(key, parsed, state)
        state, indices = tracked.run, tracked.parsed.indices
        tracked.policy_ended = False
        tracked.parked_s = time.monotonic()
        if tracked.calls and tracked.phase is Phase.TOOL and self.dispatcher.leases is not None:
            tools = tuple(f"{state.run}/{name}" for name in tracked.calls)
            requested = facts.ActionRequested(key, tools)
            state.log.emit(requested)
            self.dispatcher.handle(requested)
        at, context = tracked.quanta, tracked.context_tokens
        fact = facts.TrajectoryParked(key, indices[0], tracked.phase, at, tracked.group, state.family, context)
        self._tell(state, fact)

    def forgotten(self, key: str) -> None:
        tracked = self.tracked.pop(key, None)
        if tracked is not None:
            self._ended(tracked, completed=False)

    def _ended(self, tracked: Tracked, *, completed: bool) -> None:
        if not tracked.policy_ended:
            tracked.policy_ended = True
            # A lost result is computed again, and gives the policy no new information.
            completed = completed and not tracked.policy_completed
            tracked.policy_completed |= completed
            tracked.run.num_ended += 1
            self._tell(tracked.run, facts.TrajectoryEnded(tracked.key, completed))
            self._scheduler.loop.add_callback(tracked.run.learn)  # after the current callback

    def workers_changed(self) -> None:
        self._seen_running = -1
        self.kick()

    def kick(self) -> None:
        if not self.kicked:
            self.kicked = True
            self._scheduler.loop.add_callback(self._dispatch)

    def _dispatch(self) -> None:
        self.kicked = False
        scheduler, dispatcher = self._scheduler, self.dispatcher
        if len(scheduler.running) != self._seen_running:  # also if a worker was paused
            self._seen_running = len(scheduler.running)
            self._notify_all(self.workers.changes())
        at_s = round(time.monotonic(), 6)
        if dispatcher.leases is not None:
            self._update_tool_capacity()
        releases: list[scheduler_internals.Release] = []
        alone = self._num_runs == 1
        for phase in Phase:
            for place in dispatcher.dispatch(phase, at_s):
                ts, tracked = scheduler.tasks.get(place.key), self.tracked.get(place.key)
                if place.lease is not None and tracked is not None:
                    self._leased(tracked, place.lease)
                if ts is None or tracked is None or ts.state != "no-worker":
                    if tracked is not None:
                        tracked.run.log.emit(facts.PlacementVoid(place.key, phase))
                    dispatcher.stopped(place.key)  # cancelled; it parks again if it is still needed
                    continue
                address = self.workers.address[place.worker]
                self._dispatched(tracked, phase, address, place, alone)
                known = 0 if tracked.lost or tracked.ended else tracked.quanta  # maybe more
                releases.append(scheduler_internals.Release(place.key, _resources(place), address, known))
        if releases:
            scheduler_internals.release(scheduler, releases, f"libra-dispatch-{at_s}")
        self._revoke(at_s, alone)
        if dispatcher.leases is not None:
            self._look_again(dispatcher.leases.table.next_s(at_s), at_s)
        if not self._announces_ahead and _differ(self._best_waiting(), self.ahead):
            self._announces_ahead = True
            scheduler.loop.call_later(AHEAD_EVERY_S, self._announce_ahead)

    def _best_waiting(self) -> facts.Priority | None:
        emptying = any(state.one is not None and state.one.emptying for state in self._runs.values())
        return EVERYONE if emptying else self.dispatcher.ahead()

    def _announce_ahead(self) -> None:
        self._announces_ahead = False
        if _differ(ahead := self._best_waiting(), self.ahead):
            self.ahead = ahead
            for address in {address for state in self._runs.values() for address in state.workers.engines.values()}:
                scheduler_internals.tell_worker(self._scheduler, address, {"op": "libra-ahead", "ahead": ahead})

    def _leased(self, tracked: Tracked, lease: Lease) -> None:
        has, queued_s = lease.resources, round(max(0.0, lease.granted_s - tracked.parked_s), 6)
        tracked.leased = has.cores, queued_s
        amounts = has.cores, has.memory_bytes, has.gpus
        tracked.run.log.emit(facts.LeaseGranted(lease.holder, lease.worker, lease.granted_s, *amounts, queued_s))

    def _revoke(self, at_s: float, alone: bool) -> None:
        for revoke in self.dispatcher.revocations():
            tracked = self.tracked.get(revoke.holder)
            if tracked is None or tracked.at is None:
                continue
            state, (_, address) = tracked.run, tracked.at
            state.revoked += 1
            task_logger.info("%s: %s stops on %s", revoke.reason, revoke.holder, revoke.worker)
            state.log.emit(facts.LeaseRevoked(revoke.holder, revoke.worker, at_s, revoke.ran_s, revoke.reason, alone))
            message = {"op": "libra-revoke", "run": state.run, "epoch": state.epoch, "key": revoke.holder}
            scheduler_internals.tell_worker(self._scheduler, address, message | {"quantum": tracked.quanta})

    def _look_again(self, next_s: float | None, at_s: float) -> None:
        loop = self._scheduler.loop
        if self._due is not None:
            loop.remove_timeout(self._due)
        self._due = None if next_s is None else loop.call_later(next_s - at_s + 1e-3, self.kick)

    def _dispatched(self, tracked: Tracked, phase: Phase, address: str, place: Place, alone: bool) -> None:
        state, worker, reason = tracked.run, place.worker, place.reason
        if place.move is not None:
            announce_move(self._scheduler, state, worker, tracked.key, place.move)
        tracked.at, tracked.worker = (phase, address), worker
        tracked.outcome = ""
        priority = cast("tuple[int, ...]", self._scheduler.tasks[tracked.key].priority or ())
        task_logger.debug("%s: %s gets a %s slot of %s", reason, tracked.key, phase, worker)
        sent = facts.QuantumDispatched(tracked.key, phase, worker, tracked.quanta, priority, reason, alone)
        self.applier.tell(state, sent)

    def left_worker(self, tracked: Tracked) -> None:
        if tracked.at is not None:
            phase, address = tracked.at
            tracked.at = None
            self.dispatcher.stopped(tracked.key)
            self.kick()
            if tracked.outcome in ("given_back", "revoked"):
                tracked.run.log.emit(facts.QuantumGivenBack(tracked.key, phase, tracked.quanta, address))
                if tracked.outcome == "given_back":
                    self._forget_home(tracked)
            elif not tracked.outcome and not tracked.ended:
                self._lost(tracked, phase, address)
        ts = self._scheduler.tasks.get(tracked.key)
        if ts is not None:
            # Also when it finished: a lost result is computed again, and must park first.
            scheduler_internals.park(ts)

    def _lost(self, tracked: Tracked, phase: Phase, address: str) -> None:
        tracked.lost += 1
        state = tracked.run
        state.log.emit(facts.QuantumLost(tracked.key, phase, tracked.quanta, address, tracked.lost))
        if tracked.lost >= MAX_LOST_QUANTA and tracked.end_attempt(address):
            scheduler_internals.forgive(self._scheduler.tasks.get(tracked.key))
            self._forget_home(tracked)

    def _forget_home(self, tracked: Tracked) -> None:
        self._tell(tracked.run, facts.HomeForgotten(tracked.key))

    def handlers(self) -> dict[type[facts.Fact], Handler]:
        return {
            facts.QuantumFinished: self._quantum_finished,
            facts.GivenBack: self._given_back,
            facts.TrajectoryFoundEnded: self._found_ended,
            facts.HomeChanged: self._home_changed,
            facts.FailureClassified: self._failed,
        }

    def _running(self, fact: facts.Fact) -> Tracked | None:
        tracked = self.tracked.get(fact.key)  # type: ignore[attr-defined]  # handled facts have one
        if tracked is not None and tracked.at is not None:
            return tracked
        task_logger.debug("a late fact is ignored: %s", fact)
        return None

    def _given_back(self, state: RunState, fact: facts.GivenBack, _: str) -> None:
        if (tracked := self._running(fact)) is not None:
            tracked.outcome = "revoked" if fact.revoked else "given_back"
            scheduler_internals.forgive(self._scheduler.tasks.get(fact.key))

    def _found_ended(self, state: RunState, fact: facts.TrajectoryFoundEnded, _: str) -> None:
        if (tracked := self._running(fact)) is not None:
            tracked.outcome, tracked.ended = "reported", True
            tracked.lost, tracked.quanta, tracked.end = 0, fact.quanta, fact.end
            state.log.emit(fact)
            self._ended(tracked, completed=False)  # it was counted when it ended

    def _home_changed(self, state: RunState, fact: facts.HomeChanged, _: str) -> None:
        if self._running(fact) is not None:
            self._tell(state, fact)

    def _failed(self, state: RunState, fact: facts.FailureClassified, _: str) -> None:
        if (tracked := self._running(fact)) is not None:
            state.log.emit(fact)
            if not tracked.ended:
                self._forget_home(tracked)

    def _quantum_finished(self, state: RunState, fact: facts.QuantumFinished, address: str) -> None:
        if (tracked := self._running(fact)) is None:
            return
        key, phase = fact.key, fact.phase
        tracked.outcome, tracked.lost = "" if fact.goes_on else "reported", 0
        tracked.quanta = fact.quantum + 1
        tracked.context_tokens, tracked.end, tracked.calls = fact.context_tokens, fact.end, fact.calls
        if phase is Phase.TOOL:
            if tracked.leased is not None:
                self._action_finished(state, tracked, fact)
            self.tool_workers.acted(fact.latency_s)
        if fact.next:
            tracked.phase = Phase(fact.next)
        else:
            tracked.ended = True
            tracked.begin()
        scheduler_internals.forgive(self._scheduler.tasks.get(key))
        name = fact.tool if phase is Phase.TOOL else "generate"
        self.stream.add(key, address, phase, fact.stop_s - fact.latency_s, fact.stop_s, name)
        self._tell(state, fact)
        if fact.goes_on:
            self._last_activity[key] = time.monotonic()
            self._tell(state, facts.QuantumContinued(key, phase, tracked.worker, tracked.quanta))
        if tracked.ended:
            self._ended(tracked, completed=tracked.completed)

    def _action_finished(self, state: RunState, tracked: Tracked, fact: facts.QuantumFinished) -> None:
        assert tracked.leased is not None
        (cores, queued_s), tracked.leased = tracked.leased, None
        whole_s = max(0.0, time.monotonic() - tracked.parked_s - queued_s)
        around_s = round(max(0.0, whole_s - fact.ran_s), 6)
        ran_s, worker = round(fact.ran_s, 6), tracked.worker
        state.log.emit(facts.ActionFinished(tracked.key, worker, cores, queued_s, ran_s, around_s, fact.killed))

    def phase_of(self, key: str) -> Phase:
        tracked = self.tracked.get(key)
        if tracked is None:
            return Phase.ROLLOUT
        return tracked.at[0] if tracked.at is not None else tracked.phase

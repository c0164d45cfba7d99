"""Assigns free slots of workers to parked trajectories; without a clock, for the plugin and the simulator alike.

Orderings choose the order (`SetPriority`) and the buckets that suit a trajectory besides its home (`Prefer`); the dispatcher
chooses the worker (`Place`).

Invariants
----------
1. A worker never holds more quanta of a phase than it has slots.
2. A slot goes to the first trajectory in order that may have it: one without a home; one at home there, unless a move pays off
   (`Loads.move`); one that prefers its bucket; one that is overdue (level -1); and, if the slot would stay free otherwise, one
   that waits for another worker so long that computing its context again pays off (`_pays`). Lengths and costs count only
   between engines that have declared themselves (`WorkerJoined.declared`): if one of those with a free slot has not, a first
   home is where most slots are free, and only moves to idle engines happen.
3. Overdue trajectories under way go before all others, overdue ones that have not begun before all that have not. So no
   trajectory waits for ever: those under way end, and their KV memory goes to the first in order.
4. If a plan assigns a bucket to its length, a trajectory without a home begins there, unless no slot there is free or another
   engine would finish sooner by `PLANNED_FACTOR`.
5. Work conserving: a slot stays free while a trajectory waits only if the KV of new ones would evict that of those under way
   (`Loads.fits`: who begins fits with all under way until they end, by what they hold and by what they are believed to hold; where
   engines exchange KV, by what they hold now), and no move pays off.
6. A trajectory whose KV does not fit any more has no home, and begins anew where it fits: contexts do not push each other out in
   turn, however wrong the forecasts are. Its last engine may have its KV in host memory, as one that was put to sleep has: the
   placement says so.
7. A trajectory waits once or runs once, never both: it is placed only after it was parked, and parked only when it stopped.
8. Once tools have declared resources, actions are placed by the lease table (`libra.policy.leases`): in the same order, with the
   resources that their calls take, beside a slot. Until then an action takes a slot. The table may revoke leases (`revocations`):
   who carries that out stops the quantum, and its trajectory parks again.
9. A `dispatch` that places nothing changes no later answer. The log has placements only, so that a replay asks less often.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from libra.facts import (
    ActionRequested,
    Command,
    Fact,
    HomeChanged,
    HomeForgotten,
    Prefer,
    Priority,
    QuantumFinished,
    QuantumStarted,
    SetPriority,
    ToolCapacity,
    ToolsDeclared,
    TrajectoryEnded,
    TrajectoryParked,
    Vacate,
    WorkerCapacity,
    WorkerWithdrawn,
)
from libra.policy.bucket_rows import bucket_rows
from libra.policy.engine_loads import SURE, UNSURE, Loads
from libra.policy.fleet import Fleet
from libra.policy.leases.actions import ActionLeases
from libra.policy.leases.resources import Revoke
from libra.policy.phase_queue import Entry, PhaseQueue, order_of
from libra.policy.placements import LeaseTaken, Place
from libra.policy.starvation_guard import OVERDUE
from libra.policy.strain import strained
from libra.types import Phase, ToolStatus

SCANNED_FOR_A_MOVE = 8
"""Waiting trajectories that are considered, in order, for a move to a slot that would stay free."""
SAMPLED_HOMES = 32
"""If more than twice this many engines have free slots, about this many, evenly spread, are compared."""
PLANNED_FACTOR = 1.25
"""A trajectory begins in the bucket planned for its length unless another engine would finish sooner by this factor."""
EVERYONE = Priority(-1 << 30, OVERDUE, 0)
"""Ahead of every trajectory: see `Dispatcher.ahead`."""
FORGETTING = 0.05
"""Weight of the newest quantum in the mean seconds of a quantum."""


def leaves_slot(rank: Sequence[int], ahead: Sequence[int] | None) -> bool:
    """Whether a trajectory of this rank releases its slot at the end of a quantum, where the best waiting one has rank ``ahead``.

    Only an earlier iteration or a better level takes a slot away: within a level it would cost a dispatch and gain nothing.
    """
    return ahead is not None and tuple(ahead[:2]) < tuple(rank[:2])


class Dispatcher:
    """One per scheduler, for all runs on it.

    ``sure``: forecasts of lengths are exact, as an oracle's are.
    """

    def __init__(self, *, sure: bool = False) -> None:
        self._fleet = Fleet()
        self._phases = {phase: PhaseQueue() for phase in Phase}
        self._queues = tuple(self._phases.values())
        self._phase_of: dict[str, Phase] = {}
        self._unplaced: set[str] = set()  # parked, without a priority yet
        self._tool_home: dict[str, str] = {}
        self._buckets: dict[str, tuple[str, ...]] = {}
        self._begins_tp: dict[str, int] = {}  # of trajectories with a planned degree
        self._loads = Loads(self._fleet, SURE if sure else UNSURE)
        self._last_home: dict[
            str, WorkerCapacity
        ] = {}  # of trajectories that have none now: an engine that may have their KV
        self._serial = 0
        self.allowed: Callable[[str, str], bool] | None = None
        """Whether a generation of a trajectory may be at a worker; None: at any."""
        self._quantum_s: dict[str, float] = {}
        self.leases: ActionLeases | None = None
        """None: no tool has declared resources."""

    # ---------------------------------------------------------------- events and commands

    def handle(self, event: Fact) -> None:
        """Follow one event; call it before the ordering's `handle`, whose commands go to `apply`."""
        if type(event) is QuantumFinished:
            self._finished(event)
        elif type(event) is TrajectoryParked:
            key = event.key
            self._loads.join(key, event.group)
            self._loads.parked(key, event.context_tokens)
            self.stopped(key)
            self._leave(key)
            self._phase_of[key] = event.phase
            self._unplaced.add(key)
            self._buckets.pop(key, None)
        elif isinstance(event, QuantumStarted):
            queue = self._phases[event.phase]
            if event.key not in queue.running and event.worker in queue.slots:  # otherwise it continues in its slot
                queue.leave(event.key)
                queue.take(event.key, event.worker)
        elif type(event) is HomeChanged:
            if event.num_bytes:
                self._loads.transfers.add(event.num_bytes, event.took_s)
        elif type(event) is HomeForgotten:
            self._tool_home.pop(event.key, None)
            self._last_home.pop(event.key, None)
        elif type(event) is TrajectoryEnded:
            self._ended(event.key)
        elif type(event) is WorkerCapacity:
            self._phases[Phase.ROLLOUT].supply(event.worker, event.rollout_slots)
            self._phases[Phase.TOOL].supply(event.worker, event.tool_slots)
            if self.leases is not None:
                self.leases.slots(event.worker, event.tool_slots)
        elif type(event) is WorkerWithdrawn:
            self._worker_left(event)
            return
        elif isinstance(event, ToolsDeclared | ToolCapacity | ActionRequested):
            self._lease(event)
            return
        self._fleet.handle(event)
        if type(event) is QuantumFinished:
            self._push_out(self._fleet.home.get(event.key))

    def apply(self, commands: Iterable[Command]) -> None:
        """Take over commands of orderings; those for trajectories that do not wait are ignored."""
        for command in commands:
            if type(command) is SetPriority:  # by far the most
                key = command.key
                phase = self._phase_of.get(key)
                if phase is not None and (key in self._unplaced or key in self._phases[phase].waiting):
                    self._unplaced.discard(key)
                    self._push(key, command.priority)
                continue
            match command:
                case Prefer(key=key, buckets=buckets):
                    if key in self._phase_of:
                        if command.final_tokens:
                            self._loads.set_forecast(key, command.left_tokens, command.final_tokens)
                        self._begins_tp[key] = command.begins_tp
                        if not buckets:
                            continue
                        self._buckets[key] = buckets
                        held = self._phases[self._phase_of[key]].waiting.get(key)
                        if held is not None:
                            self._push(key, held)
                case Vacate(worker=worker, keys=keys):
                    self._without_home([key for key in keys if self._fleet.home.get(key) == worker], worker)

    def _push_out(self, worker: str | None) -> None:
        """Those whose KV the engine drops have no home any more: they go on where it fits."""
        host = self._fleet.hosts.get(worker or "")
        if worker is None or host is None or not 0 < host.open_tokens < host.context_tokens:
            return
        self._without_home(self._loads.pushed_out(worker, self._phases[Phase.ROLLOUT].running.__contains__), worker)

    def _without_home(self, keys: Iterable[str], worker: str) -> None:
        """Trajectories have no home any more; their KV may be had from the engine of ``worker``."""
        queue = self._phases[Phase.ROLLOUT]
        for key in keys:
            self._last_home[key] = self._fleet.hosts[worker].spec
            self._loads.settle(key, None)
            self._fleet.handle(HomeForgotten(key))
            if key in queue.waiting:
                self._push(key, queue.waiting[key])

    def _lease(self, event: ToolsDeclared | ToolCapacity | ActionRequested) -> None:
        """Actions hold leases from the first declaration on."""
        if self.leases is None:
            self.leases = ActionLeases()
            queue = self._phases[Phase.TOOL]
            for worker, slots in queue.slots.items():
                self.leases.slots(worker, slots)
            for key, worker in queue.running.items():
                self.leases.adopt(key, worker)
            for key, priority in queue.waiting.items():
                self.leases.wait(key, priority, self._tool_home.get(key, ""))
        if isinstance(event, ToolsDeclared):
            self.leases.declare(event)
        elif isinstance(event, ToolCapacity):
            self.leases.capacity(event)
        else:
            self.leases.asked(event)

    def _leave(self, key: str) -> None:
        for queue in self._queues:
            queue.leave(key)
        if self.leases is not None:
            self.leases.table.cancel(key)

    def stopped(self, key: str) -> None:
        """The quantum of ``key`` has ended, for whatever reason; its slot is free."""
        if self.leases is not None:
            self.leases.table.release(key)
        for queue in self._queues:
            if key in queue.running:
                queue.give_back(key)

    def _finished(self, event: QuantumFinished) -> None:
        worker = self._phases[event.phase].running.get(event.key)
        if event.phase is Phase.ROLLOUT and worker is not None:
            mean = self._quantum_s.get(worker, event.latency_s)
            self._quantum_s[worker] = mean + FORGETTING * (event.latency_s - mean)
        if self.leases is not None and event.phase is Phase.TOOL:
            self.leases.ended(event.key)
            if event.status is not ToolStatus.MALFORMED:  # which no tool saw
                self.leases.table.release(event.key, event.latency_s, event.status)
        self.stopped(event.key)
        self._loads.generated(event.key, event.tokens, event.payload_tokens)

    def _ended(self, key: str) -> None:
        self.stopped(key)
        self._leave(key)
        if self.leases is not None:
            self.leases.forget(key)
        self._loads.end(key)
        self._unplaced.discard(key)
        for table in (self._phase_of, self._buckets, self._begins_tp, self._tool_home, self._last_home):
            table.pop(key, None)

    def _worker_left(self, event: WorkerWithdrawn) -> None:
        for phase in self._phases.values():
            phase.lose(event.worker)
        if self.leases is not None:
            self.leases.left(event.worker)
        self._quantum_s.pop(event.worker, None)
        self._loads.lose(event.worker)
        if (host := self._fleet.hosts.get(event.worker)) is not None:
            at_home = (key for key, home in self._fleet.home.items() if home == event.worker)
            self._last_home |= dict.fromkeys(at_home, host.spec)
        self._fleet.handle(event)
        queue = self._phases[Phase.ROLLOUT]
        for key in [key for key, home in queue.home_of.items() if home == event.worker]:
            self._push(key, queue.waiting[key])  # without_home now

    def _push(self, key: str, priority: Priority) -> None:
        phase = self._phase_of[key]
        queue = self._phases[phase]
        home = None if phase is Phase.TOOL else self._fleet.home.get(key)
        waits_there = queue.home_of.get(key)
        if waits_there != home:
            queue.leave(key)
        self._serial = serial = self._serial + 1
        queue.serials[key] = serial
        queue.waiting[key] = priority
        entry = (priority, serial, key)
        if phase is Phase.TOOL:
            queue.anywhere.push(entry)
            if self.leases is not None:
                self.leases.wait(key, priority, self._tool_home.get(key, ""))
            return
        queue.all_waiting.push(entry)
        if home is None or priority.level == OVERDUE:
            queue.anywhere.push(entry)
        if home is not None:
            if waits_there != home:
                queue.home_of[key] = home
                queue.waiting_at[home] = queue.waiting_at.get(home, 0) + 1
            order_of(queue.at_home, home, queue.serials).push(entry)
            for bucket in self._buckets.get(key, ()):
                order_of(queue.in_bucket, bucket, queue.serials).push(entry)

    # ---------------------------------------------------------------- queries and dispatch

    def num_waiting(self, phase: Phase) -> int:
        """How many trajectories wait for a slot of ``phase``."""
        return len(self._phases[phase].waiting)

    def waiting(self, phase: Phase) -> Mapping[str, Priority]:
        """The place of every trajectory that waits for a slot of ``phase``."""
        return self._phases[phase].waiting

    def slots(self, phase: Phase) -> tuple[int, int]:
        """Slots of ``phase``: taken, and in total."""
        queue = self._phases[phase]
        return len(queue.running), sum(queue.slots.values())

    def buckets(self) -> list[dict[str, Any]]:
        """A row per bucket of engines, for the dashboard (`libra.policy.bucket_rows`)."""
        return bucket_rows(self._phases[Phase.ROLLOUT], self._fleet, self._loads)

    def residents(self, worker: str) -> int:
        """How many trajectories are at home on the engine of ``worker``."""
        host = self._fleet.hosts.get(worker)
        return host.residents if host is not None else 0

    def overfull(self) -> bool:
        """Whether an engine runs more generations than it has slots now, so that some must release their slots."""
        return bool(self._phases[Phase.ROLLOUT].overfull)

    def ahead(self) -> Priority | None:
        """Rank of the best waiting generation: a trajectory that ends a quantum releases its slot if `leaves_slot`.

        None: nothing waits, and all keep their slots. `EVERYONE`: all release theirs, because an engine runs more generations than
        it has slots, or engines that exchange KV are so full or so unevenly loaded that order and places matter
        (`libra.policy.strain`).
        """
        if self.overfull() or (self._fleet.exchanging and strained(self._fleet, self._loads)):
            return EVERYONE
        entry = self._phases[Phase.ROLLOUT].all_waiting.first()
        return None if entry is None else entry[0]

    def running_on(self, worker: str, phase: Phase) -> int:
        """How many quanta of ``phase`` hold a slot of ``worker``."""
        return self._phases[phase].taken.get(worker, 0)

    def dispatch(self, phase: Phase, at_s: float = 0.0) -> tuple[Place, ...]:
        """Placements in order; the trajectories hold these slots from now on. ``at_s``: the time, which only quotas need."""
        if phase is Phase.TOOL and self.leases is not None:
            return self._leased(self.leases, at_s)
        queue = self._phases[phase]
        if not queue.waiting or not queue.free:
            return ()
        places = []
        while queue.free and queue.waiting:
            place = self._next_tool(queue) if phase is Phase.TOOL else (self._next(queue) or self._move(queue))
            if place is None:
                break
            queue.leave(place.key)
            queue.take(place.key, place.worker)
            self._serial += 1
            if phase is Phase.TOOL:
                self._tool_home[place.key] = place.worker
            else:
                place = self._loads.placed(place, self._last_home.pop(place.key, None))
            self._fleet.handle(QuantumStarted(place.key, phase, place.worker))
            places.append(place)
        return tuple(places)

    def _leased(self, leases: ActionLeases, at_s: float) -> tuple[Place, ...]:
        """Placements of actions that the lease table admits."""
        queue, places = self._phases[Phase.TOOL], []
        for lease in leases.admit(at_s):
            key, worker, has = lease.holder, lease.worker, lease.resources
            queue.leave(key)
            queue.take(key, worker)
            self._serial += 1
            self._tool_home[key] = worker
            self._fleet.handle(QuantumStarted(key, Phase.TOOL, worker))
            taken = LeaseTaken(at_s, has.cores, has.memory_bytes, has.gpus)
            places.append(Place(key, Phase.TOOL, worker, lease.reason, lease=taken))
        return tuple(places)

    def revocations(self) -> tuple[Revoke, ...]:
        """The leases that dispatches have revoked since the last call, in order."""
        return () if self.leases is None else self.leases.revocations()

    def _next_tool(self, queue: PhaseQueue) -> Place | None:
        entry = queue.anywhere.first()
        if entry is None:
            return None
        key, free = entry[2], queue.free
        home = self._tool_home.get(key)
        if home in free:
            assert home is not None
            return Place(key, Phase.TOOL, home, "home")
        return Place(key, Phase.TOOL, max(free, key=lambda worker: (free[worker], worker)), "most room")

    def _next(self, queue: PhaseQueue) -> Place | None:
        """The first in order that may have one of the free slots, without a move that it does not prefer."""
        best: Entry | None = None
        worker = reason = ""
        for home in queue.free if len(queue.free) < len(queue.waiting_at) else queue.waiting_at:
            if home in queue.free and home in queue.waiting_at:
                entry = queue.at_home[home].first()
                if entry is not None and (best is None or entry < best):
                    best, worker, reason = entry, home, "home"
        for bucket, order in queue.in_bucket.items():
            entry = order.first()
            if entry is not None and (best is None or entry <= best):  # the same one: it prefers this to its home
                target = self._roomiest(queue, entry[2], self._fleet.buckets.get(bucket, ()))
                if target is not None:
                    best, worker, reason = entry, target, "preferred bucket"
        entry = queue.anywhere.first()
        if entry is not None and (best is None or entry < best):
            target = self._first_home(queue, entry)
            if target is not None:
                best, worker, reason = entry, target, "overdue" if entry[0].level == OVERDUE else "first home"
                silent = self._silent(queue.free)
                if silent is not None:
                    reason += f": by free slots, for {silent} has not told its speed"
        if best is None:
            return None
        if reason == "home":
            worker, reason = self._loads.move(best[2], self._open_to(best[2], queue)) or (worker, reason)
        return Place(best[2], Phase.ROLLOUT, worker, reason)

    def _first_home(self, queue: PhaseQueue, entry: Entry) -> str | None:
        """The best worker for a trajectory that is overdue or has no home; None if its KV would evict that of others."""
        key = entry[2]
        home = self._fleet.home.get(key)
        if home in queue.free:
            return home
        for bucket in self._buckets.get(key, ()):
            target = self._roomiest(queue, key, self._fleet.buckets.get(bucket, ()))
            if target is not None:
                return target
        first = self._roomiest(queue, key, queue.free)
        begins_tp = self._begins_tp.get(key, 0)
        if first is None or home is not None or not begins_tp:
            return first
        planned = self._roomiest(queue, key, self._fleet.of_degree(begins_tp))
        if planned is None or self._silent(queue.free) is not None:
            return first
        cost = self._cost(key)
        return first if cost(key, planned) > PLANNED_FACTOR * cost(key, first) else planned

    def _cost(self, key: str) -> Callable[[str, str], float]:
        """The figure by which declared engines are compared for ``key``: seconds until they finish, or their pace without a
        forecast."""
        return self._loads.finish_s if self._loads.has_forecast(key) else self._loads.pace_s_per_token

    def _roomiest(self, queue: PhaseQueue, key: str, workers: Iterable[str]) -> str | None:
        """The one of ``workers`` with a free slot and KV memory for ``key`` that finishes first; of many, a sample is compared."""
        allowed = self.allowed
        free = [worker for worker in workers if worker in queue.free and (not allowed or allowed(key, worker))]
        step = len(free) // SAMPLED_HOMES
        if step > 1:
            sample = [worker for worker in free[self._serial % step :: step] if self._loads.fits(key, worker)]
            if sample:
                return self._fastest(queue, key, sample)
        return self._fastest(queue, key, [worker for worker in free if self._loads.fits(key, worker)])

    def _open_to(self, key: str, queue: PhaseQueue) -> Mapping[str, int]:
        """Free slots that ``key`` may have."""
        if self.allowed is None:
            return queue.free
        return {worker: count for worker, count in queue.free.items() if self.allowed(key, worker)}

    def _fastest(self, queue: PhaseQueue, key: str, workers: Iterable[str]) -> str | None:
        """The best engine; among equals one with few siblings, whose lengths are correlated and add up.

        Equal: the same seconds to finish, without a forecast the same pace; if one of the engines with a free slot has not
        declared its speed, the same number of free slots.
        """
        best: str | None = None
        least: tuple[float, int, int, str] | None = None
        loads, declared = self._loads, self._silent(queue.free) is None
        cost = self._cost(key)
        for worker in workers:
            free = -queue.free[worker]
            rank = (cost(key, worker) if declared else free, loads.siblings(key, worker), free, worker)
            if least is None or rank < least:
                best, least = worker, rank
        return best

    def _move(self, queue: PhaseQueue) -> Place | None:
        """The first in order that gains from moving to a slot that would stay free."""
        for entry in queue.all_waiting.first_few(SCANNED_FOR_A_MOVE):
            key = entry[2]
            home = self._fleet.home.get(key)
            if home is None:
                continue
            target = self._roomiest(queue, key, queue.free)
            if target is not None and (reason := self._pays(queue, key, home, target)):
                return Place(key, Phase.ROLLOUT, target, f"move: {reason}")
        return None

    def _pays(self, queue: PhaseQueue, key: str, home: str, target: str) -> str:
        """Why moving ``key`` from the queue of ``home`` to ``target`` pays off; empty if it does not.

        The gain of all that wait there (each is served one turn earlier) must exceed the cost of the move. With a forecast, the
        two engines must not finish later either.
        """
        hosts = self._fleet.hosts
        if not (hosts[home].spec.declared and hosts[target].spec.declared):
            idle = not queue.taken.get(target)
            return "an engine that has not told its speed is idle" if idle and not hosts[target].spec.declared else ""
        if self._loads.has_forecast(key):
            here_s, there_s, _ = self._loads.moved_s(key, target)
            if there_s > here_s:
                return ""
        move = self._loads.price(key, target)
        turn_s = self._quantum_s.get(home, 0.0) / max(1, queue.slots.get(home, 1))
        pays = move is not None and move.seconds <= queue.waiting_at.get(home, 0) * turn_s
        return "the queue at home is longer than computing it again" if pays else ""

    def _silent(self, workers: Iterable[str]) -> str | None:
        """The first of ``workers``, by name, whose engine has not declared its speed; None if all have."""
        if not self._fleet.silent:
            return None
        return min((worker for worker in workers if worker in self._fleet.silent), default=None)

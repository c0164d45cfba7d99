"""Assigns free slots of workers to parked trajectories, without a clock, for plugin and simulator.

Orderings set the order (`SetPriority`) and give forecasts (`Prefer`); the dispatcher chooses the
worker (`Place`). The *home* of a trajectory is the engine that owns its KV.

Invariants
----------
1. A worker never runs more quanta of a phase than it has slots; a trajectory waits or runs once.
2. A free slot goes to the first trajectory in order that has no home, or has its home there (unless
   a move pays, `Loads.move`), or prefers the bucket, or is overdue. If there is none, a trajectory
   whose home is full may move there if the move pays (`_pays`). Lengths and costs count only
   between engines that have declared their capacity.
3. No trajectory starves: overdue trajectories go before all others, and running trajectories end
   and so free KV memory. While trajectories wait, a slot stays free only if new KV would evict the
   KV of running trajectories (`Loads.fits`) and no move pays.
4. A trajectory without a home begins in the bucket planned for its length, unless that bucket has
   no free slot or another engine would finish sooner by `PLANNED_FACTOR`. If its KV no longer fits,
   it loses its home and begins again where it fits.
5. Once tools have declared resources, the lease table (`libra.policy.leases`) places actions in the
   same order. The caller carries out its `revocations`.
6. A `dispatch` without placements has no side effects, so a replay needs only the placements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from libra import facts
from libra.policy.engine_loads import Loads
from libra.policy.engine_table import EXACT_NORM, NOISY_NORM, EngineState, EngineTable, Trajectory
from libra.policy.leases.resources import Revoke
from libra.policy.leases.table import ActionLeases
from libra.policy.phase_queue import Entry, PhaseQueue, Place
from libra.policy.trajectory_table import OVERDUE
from libra.types import Phase, ToolStatus

SCANNED_FOR_A_MOVE = 8  # waiting trajectories considered, in order, for a move
SAMPLED_HOMES = 32  # about this many engines are compared, of more than twice as many
PLANNED_FACTOR = 1.25  # it leaves the planned bucket only to finish sooner by this factor
EVERYONE = facts.Priority(-1 << 30, OVERDUE, 0)  # ahead of every trajectory: see `Dispatcher.ahead`
Chosen = tuple[Trajectory, Place]
FORGETTING = 0.05  # weight of the newest quantum in the mean seconds of a quantum


def leaves_slot(rank: Sequence[int], ahead: Sequence[int] | None) -> bool:
    """Whether a trajectory of this rank releases its slot to one of rank ``ahead``."""
    return ahead is not None and tuple(ahead[:2]) < tuple(rank[:2])


class Dispatcher:
    def __init__(self, *, sure: bool = False) -> None:
        self._table = EngineTable(EXACT_NORM if sure else NOISY_NORM)
        self._trajectories = self._table.trajectories
        self._loads = Loads(self._table)
        self._phases = {phase: PhaseQueue() for phase in Phase}
        self._rollout = self._phases[Phase.ROLLOUT]
        self._queues = tuple(self._phases.values())
        self._serial = 0
        self.allowed: Callable[[str, str], bool] | None = None
        """Whether a trajectory (key) may generate at a worker; None allows every worker."""
        self._quantum_s: dict[str, float] = {}
        self.leases: ActionLeases | None = None

    def handle(self, event: facts.Fact) -> None:
        """Update the state from one event, before the ordering's commands go to `apply`."""
        if type(event) is facts.QuantumFinished:
            self._finished(event)
        elif type(event) is facts.TrajectoryParked:
            one = self._table.of(event.key)
            self.stopped(event.key)
            self._leave(one)
            one.phase, one.ranked, one.buckets = event.phase, False, ()
            self._table.handle(event)
        elif isinstance(event, facts.QuantumStarted):
            queue = self._phases[event.phase]
            if event.key not in queue.running and event.worker in queue.slots:  # else it continues
                queue.leave(self._table.of(event.key))
                queue.take(event.key, event.worker)
            self._table.handle(event)
        elif type(event) is facts.TrajectoryEnded:
            self._ended(event)
        elif type(event) is facts.HomeChanged:
            if event.num_bytes:
                self._loads.transfers.add(event.num_bytes, event.took_s)
        elif type(event) is facts.HomeForgotten:
            if (found := self._trajectories.get(event.key)) is not None:
                found.tool_home, found.last_home = "", None
            self._table.handle(event)
        elif type(event) is facts.WorkerCapacity:
            self._rollout.supply(event.worker, event.rollout_slots)
            self._phases[Phase.TOOL].supply(event.worker, event.tool_slots)
            if self.leases is not None:
                self.leases.slots(event.worker, event.tool_slots)
            self._table.handle(event)
        elif type(event) is facts.WorkerWithdrawn:
            self._worker_left(event)
        elif isinstance(event, facts.ToolsDeclared | facts.ToolCapacity | facts.ActionRequested):
            self._lease(event)

    def apply(self, commands: Iterable[facts.Command]) -> None:
        """Apply the orderings' commands to waiting trajectories."""
        trajectories = self._trajectories
        for command in commands:
            if type(command) is facts.SetPriority:  # by far the most
                one = trajectories.get(command.key)
                if one is not None and one.phase is not None and (one.serial or not one.ranked):
                    one.ranked = True
                    self._push(one, command.priority)
            elif type(command) is facts.Prefer:
                one = trajectories.get(command.key)
                if one is None or one.phase is None:
                    continue
                if command.final_tokens:
                    self._table.forecast(one, command.left_tokens, command.final_tokens)
                one.begins_tp = command.begins_tp
                if command.buckets:
                    one.buckets = command.buckets
                    if one.serial:
                        self._push(one, self._phases[one.phase].waiting[one.key])
            elif type(command) is facts.Vacate:
                engine = self._table.engines.get(command.worker)
                members = {} if engine is None else engine.members
                self._without_home([members[key] for key in command.keys if key in members])

    def _without_home(self, members: Iterable[Trajectory]) -> None:
        for one in members:
            assert one.home is not None
            one.last_home = one.home.spec
            self._table.settle(one, None)
            if one.key in self._rollout.waiting:
                self._push(one, self._rollout.waiting[one.key])

    def _lease(self, event: facts.ToolsDeclared | facts.ToolCapacity | facts.ActionRequested) -> None:
        if self.leases is None:
            self.leases = ActionLeases()
            queue = self._phases[Phase.TOOL]
            for worker, slots in queue.slots.items():
                self.leases.slots(worker, slots)
            for key, worker in queue.running.items():
                self.leases.adopt(key, worker)
            for key, priority in queue.waiting.items():
                self.leases.wait(key, priority, self._trajectories[key].tool_home)
        self.leases.handle(event)

    def _leave(self, one: Trajectory) -> None:
        for queue in self._queues:
            queue.leave(one)
        if self.leases is not None:
            self.leases.table.cancel(one.key)

    def stopped(self, key: str) -> None:
        if self.leases is not None:
            self.leases.table.release(key)
        for queue in self._queues:
            if key in queue.running:
                queue.give_back(key)

    def _finished(self, event: facts.QuantumFinished) -> None:
        worker = self._phases[event.phase].running.get(event.key)
        if event.phase is Phase.ROLLOUT and worker is not None:
            mean = self._quantum_s.get(worker, event.latency_s)
            self._quantum_s[worker] = mean + FORGETTING * (event.latency_s - mean)
        if self.leases is not None and event.phase is Phase.TOOL:
            self.leases.ended(event.key)
            if event.status is not ToolStatus.MALFORMED:  # which no tool saw
                self.leases.table.release(event.key, event.latency_s, event.status)
        self.stopped(event.key)
        self._table.handle(event)
        one = self._trajectories.get(event.key)
        home = None if one is None else one.home
        if home is not None and 0 < home.open_tokens < home.context_tokens:  # they go on where their KV fits
            self._without_home(home.pushed_out(self._rollout.running.__contains__))

    def _ended(self, event: facts.TrajectoryEnded) -> None:
        self.stopped(event.key)
        if (one := self._trajectories.get(event.key)) is not None:
            self._leave(one)
        if self.leases is not None:
            self.leases.forget(event.key)
        self._table.handle(event)

    def _worker_left(self, event: facts.WorkerWithdrawn) -> None:
        for phase in self._phases.values():
            phase.lose(event.worker)
        if self.leases is not None:
            self.leases.left(event.worker)
        self._quantum_s.pop(event.worker, None)
        engine = self._table.engines.get(event.worker)
        members = [] if engine is None else [(one, engine.spec) for one in engine.members.values()]
        self._table.handle(event)
        for one, spec in members:
            one.last_home = spec
            if one.waits_at == event.worker:
                self._push(one, self._rollout.waiting[one.key])

    def _push(self, one: Trajectory, priority: facts.Priority) -> None:
        phase = one.phase
        assert phase is not None
        queue, rollout = self._phases[phase], phase is Phase.ROLLOUT
        home = one.home.spec.worker if rollout and one.home is not None else ""
        if one.waits_at != home:
            queue.leave(one)
        self._serial += 1
        entry = queue.push(one, priority, self._serial)
        if not home or priority.level == OVERDUE:
            queue.anywhere.push(entry)
        if home:
            queue.push_at(entry, home)
        elif not rollout and self.leases is not None:
            self.leases.wait(one.key, priority, one.tool_home)

    def num_waiting(self, phase: Phase) -> int:
        return len(self._phases[phase].waiting)

    def waiting(self, phase: Phase) -> Mapping[str, facts.Priority]:
        return self._phases[phase].waiting

    @property
    def num_running(self) -> int:
        return sum(len(queue.running) for queue in self._queues)

    def buckets(self) -> list[dict[str, Any]]:
        return self._loads.buckets(self._rollout)

    def residents(self, worker: str) -> int:
        engine = self._table.engines.get(worker)
        return 0 if engine is None else len(engine.members)

    def ahead(self) -> facts.Priority | None:
        """Rank of the best waiting generation, for `leaves_slot`; `EVERYONE` takes all slots."""
        if self._rollout.overfull or (self._table.exchanging and self._loads.needs_rebalancing()):
            return EVERYONE
        entry = self._rollout.all_waiting.first()
        return None if entry is None else entry[0]

    def running_on(self, worker: str, phase: Phase) -> int:
        return self._phases[phase].taken.get(worker, 0)

    def dispatch(self, phase: Phase, at_s: float = 0.0) -> tuple[Place, ...]:
        """Placements in order; each takes its slot at once. Only quotas need ``at_s``."""
        if phase is Phase.TOOL and self.leases is not None:
            return self._leased(self.leases, at_s)
        queue = self._phases[phase]
        if not queue.waiting or not queue.free:
            return ()
        places = []
        while queue.free and queue.waiting:
            found = self._next_tool(queue) if phase is Phase.TOOL else (self._next(queue) or self._move(queue))
            if found is None:
                break
            one, place = found
            move = self._loads.price(one, place.worker) if phase is Phase.ROLLOUT else None
            if move is not None and move.transfer_s is not None:
                place = msgspec.structs.replace(place, move=self._loads.transfers.chosen(move))
            self._take(queue, one, place)
            places.append(place)
        return tuple(places)

    def _take(self, queue: PhaseQueue, one: Trajectory, place: Place) -> None:
        queue.leave(one)
        queue.take(place.key, place.worker)
        self._serial += 1
        if place.phase is Phase.TOOL:
            one.tool_home = place.worker
        else:
            one.last_home = None
        self._table.handle(facts.QuantumStarted(place.key, place.phase, place.worker))

    def _leased(self, leases: ActionLeases, at_s: float) -> tuple[Place, ...]:
        queue, places = self._phases[Phase.TOOL], []
        for lease in leases.admit(at_s):
            place = Place(lease.holder, Phase.TOOL, lease.worker, lease.reason, lease=lease)
            self._take(queue, self._table.of(lease.holder), place)
            places.append(place)
        return tuple(places)

    def revocations(self) -> tuple[Revoke, ...]:
        return () if self.leases is None else self.leases.revocations()

    def _next_tool(self, queue: PhaseQueue) -> Chosen | None:
        entry = queue.anywhere.first()
        if entry is None:
            return None
        one, free = entry[2], queue.free
        if one.tool_home in free:
            return one, Place(one.key, Phase.TOOL, one.tool_home, "home")
        return one, Place(one.key, Phase.TOOL, max(free, key=lambda worker: (free[worker], worker)), "most room")

    def _next(self, queue: PhaseQueue) -> Chosen | None:
        """First trajectory in order that may take a free slot; its home is not full."""
        best: Entry | None = None
        worker = reason = ""
        for home in queue.free if len(queue.free) < len(queue.waiting_at) else queue.waiting_at:
            if home in queue.free and home in queue.waiting_at:
                entry = queue.at_home[home].first()
                if entry is not None and (best is None or entry < best):
                    best, worker, reason = entry, home, "home"
        for bucket, order in queue.in_bucket.items():
            entry = order.first()
            if entry is not None and (best is None or entry <= best):  # the same one prefers this
                target = self._roomiest(queue, entry[2], self._table.buckets.get(bucket, ()))
                if target is not None:
                    best, worker, reason = entry, target, "preferred bucket"
        entry = queue.anywhere.first()
        if entry is not None and (best is None or entry < best):
            target = self._first_home(queue, entry[2])
            if target is not None:
                best, worker, reason = entry, target, "overdue" if entry[0].level == OVERDUE else "first home"
                silent = self._silent(queue.free)
                if silent is not None:
                    reason += f": by free slots, for {silent} has not declared its speed"
        if best is None:
            return None
        one = best[2]
        if reason == "home":
            worker, reason = self._loads.move(one, self._open_to(one.key, queue)) or (worker, reason)
        return one, Place(one.key, Phase.ROLLOUT, worker, reason)

    def _first_home(self, queue: PhaseQueue, one: Trajectory) -> str | None:
        """Best worker for an overdue trajectory or one without a home; None without KV room."""
        if one.home is not None and one.home.spec.worker in queue.free:
            return one.home.spec.worker
        for bucket in one.buckets:
            target = self._roomiest(queue, one, self._table.buckets.get(bucket, ()))
            if target is not None:
                return target
        first = self._roomiest(queue, one, queue.free)
        if first is None or one.home is not None or not one.begins_tp:
            return first
        planned = self._roomiest(queue, one, self._table.of_degree(one.begins_tp))
        if planned is None or self._silent(queue.free) is not None:
            return first
        cost = self._cost(one)
        return first if cost(one, planned) > PLANNED_FACTOR * cost(one, first) else planned

    def _cost(self, one: Trajectory) -> Callable[[Trajectory, str], float]:
        return self._loads.finish_s if one.has_forecast else self._loads.pace_s_per_token

    def _roomiest(self, queue: PhaseQueue, one: Trajectory, workers: Iterable[str]) -> str | None:
        allowed, fits = self.allowed, self._loads.fits
        free = [worker for worker in workers if worker in queue.free and (not allowed or allowed(one.key, worker))]
        step = len(free) // SAMPLED_HOMES
        if step > 1:
            sample = [worker for worker in free[self._serial % step :: step] if fits(one, worker)]
            if sample:
                return self._fastest(queue, one, sample)
        return self._fastest(queue, one, [worker for worker in free if fits(one, worker)])

    def _open_to(self, key: str, queue: PhaseQueue) -> Mapping[str, int]:
        if self.allowed is None:
            return queue.free
        return {worker: count for worker, count in queue.free.items() if self.allowed(key, worker)}

    def _fastest(self, queue: PhaseQueue, one: Trajectory, workers: Iterable[str]) -> str | None:
        """Worker that finishes first, then fewest siblings; by free slots if speeds are unknown."""
        best: str | None = None
        least: tuple[float, int, int, str] | None = None
        engines, declared, cost = self._table.engines, self._silent(queue.free) is None, self._cost(one)
        for worker in workers:
            free = -queue.free[worker]
            siblings = engines[worker].groups.get(one.group, 0)
            rank = (cost(one, worker) if declared else free, siblings, free, worker)
            if least is None or rank < least:
                best, least = worker, rank
        return best

    def _move(self, queue: PhaseQueue) -> Chosen | None:
        for _, _, one in queue.all_waiting.first_few(SCANNED_FOR_A_MOVE):
            if one.home is None:
                continue
            target = self._roomiest(queue, one, queue.free)
            if target is not None and (reason := self._pays(queue, one, one.home, target)):
                return one, Place(one.key, Phase.ROLLOUT, target, f"move: {reason}")
        return None

    def _pays(self, queue: PhaseQueue, one: Trajectory, home: EngineState, target: str) -> str:
        declared = self._table.engines[target].declared
        if not (home.declared and declared):
            idle = not queue.taken.get(target)
            return "an engine that has not declared its speed is idle" if idle and not declared else ""
        if one.has_forecast:
            here_s, there_s = self._loads.moved_s(one, target)
            if there_s > here_s:
                return ""
        move, worker = self._loads.price(one, target), home.spec.worker
        turn_s = self._quantum_s.get(worker, 0.0) / max(1, queue.slots.get(worker, 1))
        pays = move is not None and move.seconds <= queue.waiting_at.get(worker, 0) * turn_s
        return "the queue at home is longer than computing it again" if pays else ""

    def _silent(self, workers: Iterable[str]) -> str | None:
        if not self._table.silent:
            return None
        return min((worker for worker in workers if worker in self._table.silent), default=None)

"""Workers as the policies see them: supply, limits on slots, and tool workers that come and go.

Invariants
----------
1. A worker is reported as joined once its setup for each run has ended, before anything is placed
   on it, and as left before it joins again.
2. The policy knows an engine's last declaration, or one within `UPDATE_FRAC`. Engines of a bucket
   count as equally fast unless they differ by more than their errors (`as_its_bucket`).
3. A worker supplies at most its limit and at most its engine's slots. A limit belongs to a worker
   and a tensor-parallel degree, until it is replaced or the run ends.
4. A limit below the slots in use aborts nothing: a slot is released when its turn ends
   (`Dispatcher.ahead`).
5. If one limit of a request does not fit, the whole request is refused.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from libra import facts, keys
from libra.policy.engine_capacity import as_its_bucket, joined_of, off_by_frac
from libra.policy.liveness import Liveness
from libra.policy.tool_fleet import ToolFleet, ordered
from libra.scheduler import scheduler_internals
from libra.scheduler.run_state import RunState
from libra.types import EngineCapacity, Phase

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler

    from libra.policy import Dispatcher

logger = logging.getLogger(__name__)

ROLE = "tool-"  # prefix of names of tool workers
NEWEST = 0.1  # weight of the newest action in their mean seconds
UPDATE_FRAC = 0.25  # an engine's seconds are reported again when they differ by this share


@dataclass(slots=True)
class _Declared:
    bucket: str
    capacity: EngineCapacity
    reported: EngineCapacity | None = None


class Workers:
    def __init__(self, scheduler: Scheduler, liveness: Liveness) -> None:
        self._scheduler, self._liveness = scheduler, liveness
        self.known: dict[str, facts.WorkerCapacity] = {}
        self.address: dict[str, str] = {}
        self._declared: dict[str, _Declared] = {}

    def declared(self, fact: facts.EngineDeclared) -> None:
        before = self._declared.get(fact.worker)
        reported = before.reported if before is not None and before.bucket == fact.bucket else None
        capacity = EngineCapacity.from_declaration(facts.fields_of(fact))
        self._declared[fact.worker] = _Declared(fact.bucket, capacity, reported)

    def changes(self) -> Iterator[facts.WorkerCapacity | facts.WorkerWithdrawn]:
        """Changes since the last call, in the order in which to report them."""
        silent, joining = self._liveness.silent(), self._liveness.joining()
        supply = {
            phase: {a: n for a, n in scheduler_internals.supply(self._scheduler, phase).items() if a not in joining}
            for phase in Phase
        }
        supply[Phase.ROLLOUT] = {a: 0 if a in silent else n for a, n in supply[Phase.ROLLOUT].items()}
        addresses = {**supply[Phase.ROLLOUT], **supply[Phase.TOOL]}
        present = {scheduler_internals.worker_name(self._scheduler, address): address for address in addresses}
        for name in [name for name, address in self.address.items() if present.get(name) != address]:
            yield self._gone(name)
        for name, address in present.items():
            slots = supply[Phase.ROLLOUT].get(address, 0), supply[Phase.TOOL].get(address, 0)
            known, declared = self.known.get(name), self._declared.get(name)
            same_slots = known is not None and (known.rollout_slots, known.tool_slots) == slots
            if same_slots and (declared is None or not self._differs(declared)):
                continue
            if declared is None:
                joined = facts.WorkerCapacity(name, scheduler_internals.bucket(self._scheduler, address), *slots)
            else:
                seconds = declared.reported = self._as_its_bucket(declared)
                joined = joined_of(name, declared.bucket, seconds, rollout_slots=slots[0], tool_slots=slots[1])
            self.known[name], self.address[name] = joined, address
            yield joined

    def left(self, address: str) -> Iterator[facts.WorkerWithdrawn]:
        for name in [name for name, at in self.address.items() if at == address]:
            yield self._gone(name)

    def _gone(self, name: str) -> facts.WorkerWithdrawn:
        del self.known[name], self.address[name]
        self._declared.pop(name, None)
        return facts.WorkerWithdrawn(name)

    def _differs(self, declared: _Declared) -> bool:
        return declared.reported is None or off_by_frac(self._as_its_bucket(declared), declared.reported) > UPDATE_FRAC

    def _as_its_bucket(self, declared: _Declared) -> EngineCapacity:
        alike = [other.capacity.steps for other in self._declared.values() if other.bucket == declared.bucket]
        return as_its_bucket(declared.capacity, [steps for steps in alike if steps is not None])


@dataclass(slots=True)
class _Limits:
    full: dict[str, tuple[int, int]] = field(default_factory=dict)  # degree and slots
    started: dict[str, facts.EngineKindFields] = field(default_factory=dict)  # at its start
    limits: dict[tuple[str, int], int] = field(default_factory=dict)
    declared: dict[tuple[str, int], dict[str, Any]] = field(default_factory=dict)


class Concurrency:
    """Limits of all runs on a scheduler; ``kick`` is called when slots may have become free."""

    def __init__(self, scheduler: Scheduler, kick: Callable[[], None]) -> None:
        self._scheduler, self._kick = scheduler, kick
        self._runs: dict[str, _Limits] = {}

    def ended(self, run: str) -> None:
        state = self._runs.pop(run, _Limits())
        for address, ws in list(self._scheduler.workers.items()):
            tp, slots = state.full.get(str(ws.name), (0, 0))
            if (str(ws.name), tp) in state.limits and ws.resources.get(keys.ROLLOUT):
                scheduler_internals.set_supply(self._scheduler, address, keys.ROLLOUT, slots)

    def joined(self, run: str, worker: str, kind: facts.EngineKindFields) -> None:
        known = self._runs.setdefault(run, _Limits())
        known.started[worker] = kind
        known.full[worker] = (kind.tp, kind.slots)

    def apply(self, run: str, address: str) -> None:
        state, ws = self._runs.get(run), self._scheduler.workers.get(address)
        if state is None or ws is None:
            return
        tp, slots = state.full.get(str(ws.name), (0, 0))
        limit = state.limits.get((str(ws.name), tp), slots)
        if ws.resources.get(keys.ROLLOUT, 0) > limit > 0:
            scheduler_internals.set_supply(self._scheduler, address, keys.ROLLOUT, limit)

    def supplied(self, run: str, worker: str, tp: int, slots: int) -> int:
        """Slots that a worker may supply when its engine has this degree and these slots."""
        known = self._runs.setdefault(run, _Limits())
        known.full[worker] = (tp, slots)
        return min(slots, known.limits.get((worker, tp), slots))

    def declared(self, run: str, fact: facts.EngineDeclared) -> None:
        """Keep an engine's declared capacity by degree, also after the engine has ended."""
        known = self._runs.setdefault(run, _Limits())
        fields = facts.fields_of(fact)
        del fields["worker"]
        known.declared[fact.worker, fact.tp] = fields

    def rows(self, state: RunState) -> list[dict[str, Any]]:
        """A row for each worker that has or had an engine; ``limits`` are by degree."""
        known, found = self._runs.get(state.run, _Limits()), []
        for worker, (tp, slots) in sorted(known.full.items()):
            if (started := known.started.get(worker)) is None:
                continue
            address = state.workers.engines.get(worker, "")
            ws = self._scheduler.workers.get(address)
            supplies = int(ws.resources.get(keys.ROLLOUT, 0)) if ws is not None else 0
            limits = {str(of): most for (name, of), most in known.limits.items() if name == worker}
            declared = {str(of): fields for (name, of), fields in known.declared.items() if name == worker}
            found.append({
                "worker": worker, "address": address, "base_tp": started.tp,
                "base_slots": started.slots, "engine": started.engine, "bucket": started.bucket, "tp": tp, "slots": slots,
                "supplies": supplies, "limits": limits, "declared": declared,
            })  # fmt: skip
        return found

    def set(self, state: RunState, wanted: Mapping[str, Mapping[str, int]], reason: str) -> dict[str, Any]:
        """Limit engines by worker to ``slots``, at degree ``tp`` or the present; {} or an error."""
        others = [run for run, other in self._runs.items() if run != state.run and other.limits]
        if others:
            return {"error": f"run {others[0]!r} limits slots of workers here, and only one run at a time can"}
        known = self._runs.setdefault(state.run, _Limits())
        limits: dict[tuple[str, int], int] = {}
        for worker, asked in wanted.items():
            if worker not in known.full:
                there = ", ".join(sorted(known.full)) or "none"
                return {"error": f"{worker} has no engine of run {state.run}; those that have: {there}"}
            tp, full = known.full[worker]
            slots, of = int(asked["slots"]), int(asked.get("tp") or tp)
            if slots < 1 or (of == tp and slots > full):
                return {
                    "error": f"{worker}: {slots} slots, its engine (TP {tp}) was started with {full}; allowed are 1 to {full}, "
                    f"and more with rollout.slots={max(slots, 1)} or cluster.engines from the start"
                }
            limits[worker, of] = slots
        known.limits |= limits
        for (worker, tp), slots in limits.items():
            self._carry_out(state, known, worker, tp, slots, reason)
        self._kick()
        return {}

    def _carry_out(self, state: RunState, known: _Limits, worker: str, tp: int, slots: int, reason: str) -> None:
        has, full = known.full[worker]
        state.log.emit(facts.SlotsSet(worker, tp, slots, full if tp == has else None, reason))
        address = state.workers.engines.get(worker)
        ws = self._scheduler.workers.get(address) if address is not None else None
        if tp == has and ws is not None and ws.resources.get(keys.ROLLOUT):  # else it has another role
            scheduler_internals.set_supply(self._scheduler, ws.address, keys.ROLLOUT, slots)


class ToolWorkers:
    """The tool workers of all runs on a scheduler."""

    def __init__(
        self, scheduler: Scheduler, dispatcher: Dispatcher, workers: Workers, runs: dict[str, RunState]
    ) -> None:
        self._scheduler, self._dispatcher, self._workers, self._runs = scheduler, dispatcher, workers, runs
        self._fleet: ToolFleet | None = None
        self._action_s = 1.0

    def acted(self, seconds: float) -> None:
        self._action_s += NEWEST * (seconds - self._action_s)

    def look(self, least: int, most: int) -> facts.ToolWorkersOrdered | None:
        fleet = self._fleet
        if fleet is None or (fleet.least, fleet.most) != (least, most):
            fleet = self._fleet = ToolFleet(least, most)
        at_s = round(time.monotonic(), 6)
        present = {name: address for name, address in self._workers.address.items() if name.startswith(ROLE)}
        units, waiting, waiting_s = self._load(present)
        idle = frozenset(name for name, address in present.items() if self._may_go(name, address, least))
        load = {"units": units, "waiting": waiting}
        seen = fleet.facts(at_s, present=frozenset(present), idle=idle, waiting_s=waiting_s, **load)
        order = ordered(seen)
        if order is None:
            return None
        fleet.follow(order, at_s)
        logger.info("%s: %d tool workers", order.reason, order.ordered)
        for state in self._runs.values():
            state.log.emit(order)
        return order

    def _load(self, present: Iterable[str]) -> tuple[int, int, float]:
        leases = self._dispatcher.leases
        if leases is None:
            slots = sum(self._workers.known[name].tool_slots for name in present)
            waiting = self._dispatcher.num_waiting(Phase.TOOL)
            return slots, waiting, waiting * self._action_s
        capacity = leases.table.capacity()
        cores = sum(capacity[name].cores for name in present if name in capacity)
        return cores, *leases.table.waiting_work()

    def _may_go(self, name: str, address: str, least: int) -> bool:
        number = name.removeprefix(ROLE)
        if not number.isdigit() or int(number) < least:
            return False
        ws = self._scheduler.workers.get(address)
        return ws is not None and not ws.processing and not self._dispatcher.running_on(name, Phase.TOOL)

"""Limits on the slots that each engine of a run may use; they can be set during the run, and outlive role changes.

A limit belongs to a worker and a tensor-parallel degree: an engine that a rebucket forms from several workers has its own
limit, which may be set before that engine exists. Only the scheduler's supply changes; nothing on the worker is restarted.

Invariants
----------
1. A worker supplies at most its limit, and at most the slots of its engine.
2. A limit below the slots in use aborts nothing: a slot is released when its turn ends (`Dispatcher.overfull`).
3. A limit holds until it is replaced or the run ends, also for a worker that returns or trains in the meantime.
4. A request that does not fit is refused as a whole; the error names the worker, the request and what is allowed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from libra import keys
from libra.facts import EngineDeclared, EngineKindFields, SlotsSet, fields_of
from libra.scheduler import dask_internals
from libra.scheduler.run_state import RunState

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler


@dataclass(slots=True)
class _Run:
    full: dict[str, tuple[int, int]] = field(default_factory=dict)  # degree and slots of each worker's engine
    started: dict[str, EngineKindFields] = field(default_factory=dict)  # each worker's engine at its start
    limits: dict[tuple[str, int], int] = field(default_factory=dict)
    declared: dict[tuple[str, int], dict[str, Any]] = field(default_factory=dict)


class Concurrency:
    """Limits of all runs on a scheduler; ``kick`` is called when slots may have come free."""

    def __init__(self, scheduler: Scheduler, kick: Callable[[], None]) -> None:
        self._scheduler, self._kick = scheduler, kick
        self._runs: dict[str, _Run] = {}

    def ended(self, run: str) -> None:
        """The run has ended: its workers supply all slots of their engines."""
        state = self._runs.pop(run, None)
        if state is None:
            return
        for address, ws in list(self._scheduler.workers.items()):
            tp, slots = state.full.get(str(ws.name), (0, 0))
            if (str(ws.name), tp) in state.limits and ws.resources.get(keys.ROLLOUT):
                dask_internals.set_supply(self._scheduler, address, keys.ROLLOUT, slots)

    def joined(self, run: str, worker: str, kind: EngineKindFields) -> None:
        """A worker has joined, for the first time or again; ``kind`` has engine, bucket, tp and slots of its engine."""
        known = self._runs.setdefault(run, _Run())
        known.started[worker] = kind
        known.full[worker] = (kind.tp, kind.slots)

    def apply(self, run: str, address: str) -> None:
        """A worker begins to supply slots: at most its limit, if it has one."""
        state, ws = self._runs.get(run), self._scheduler.workers.get(address)
        if state is None or ws is None:
            return
        tp, slots = state.full.get(str(ws.name), (0, 0))
        limit = state.limits.get((str(ws.name), tp), slots)
        if ws.resources.get(keys.ROLLOUT, 0) > limit > 0:
            dask_internals.set_supply(self._scheduler, address, keys.ROLLOUT, limit)

    def supplied(self, run: str, worker: str, tp: int, slots: int) -> int:
        """Slots that a worker may supply, whose engine has this degree and number of slots from now on."""
        known = self._runs.setdefault(run, _Run())
        known.full[worker] = (tp, slots)
        return min(slots, known.limits.get((worker, tp), slots))

    def declared(self, run: str, fact: EngineDeclared) -> None:
        """An engine has declared its capacity; kept by degree, also after the engine ended."""
        known = self._runs.setdefault(run, _Run())
        known.declared[fact.worker, fact.tp] = {
            name: each for name, each in fields_of(fact).items() if name != "worker"
        }

    def rows(self, state: RunState) -> list[dict[str, Any]]:
        """A row for each worker that has or had an engine.

        ``worker``, ``address``; ``engine``, ``bucket``, ``base_tp`` and ``base_slots`` at its start; ``tp`` and ``slots`` of its
        last engine; slots that it ``supplies`` now; its ``limits`` and what it ``declared``, both by degree.
        """
        known, found = self._runs.get(state.run, _Run()), []
        for worker, (tp, slots) in sorted(known.full.items()):
            ws = self._scheduler.workers.get(state.workers.engines.get(worker, ""))
            supplies = int(ws.resources.get(keys.ROLLOUT, 0)) if ws is not None else 0
            started = known.started.get(worker)
            if started is None:
                continue
            base = {"base_tp": started.tp, "base_slots": started.slots}
            found.append(
                {
                    "worker": worker,
                    "address": state.workers.engines.get(worker, ""),
                    **base,
                    "engine": started.engine,
                    "bucket": started.bucket,
                    "tp": tp,
                    "slots": slots,
                    "supplies": supplies,
                    "limits": {str(of): most for (name, of), most in known.limits.items() if name == worker},
                    "declared": {str(of): fields for (name, of), fields in known.declared.items() if name == worker},
                }
            )
        return found

    def set(self, state: RunState, wanted: Mapping[str, Mapping[str, int]], reason: str) -> dict[str, Any]:
        """Limit engines, by worker: ``slots``, and ``tp`` for another engine than the present one.

        Answers ``{}``, or ``{"error": ...}`` if nothing was changed.
        """
        others = [run for run, other in self._runs.items() if run != state.run and other.limits]
        if others:
            return {"error": f"run {others[0]!r} limits slots of workers here, and only one run at a time can"}
        known = self._runs.setdefault(state.run, _Run())
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

    def _carry_out(self, state: RunState, known: _Run, worker: str, tp: int, slots: int, reason: str) -> None:
        has, full = known.full[worker]
        state.log.emit(SlotsSet(worker, tp, slots, full if tp == has else None, reason))
        address = state.workers.engines.get(worker)
        ws = self._scheduler.workers.get(address) if address is not None else None
        if tp == has and ws is not None and ws.resources.get(keys.ROLLOUT):  # 0: it has another role, or is changing
            dask_internals.set_supply(self._scheduler, ws.address, keys.ROLLOUT, slots)

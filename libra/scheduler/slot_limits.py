"""How many of its slots each engine of a run may use: a limit that is set while the run goes on, and outlives role changes.

A limit is of a worker and a tensor-parallel degree: an engine that a rebucket makes of several workers has one of its own, which
may be set before that engine is there. The scheduler's supply is what changes; the worker keeps what it was started with, and
nothing on it is restarted or woken.

Invariants
----------
1. A worker supplies at most its limit, and at most the slots of its engine.
2. Fewer slots than are taken end nothing: who runs goes on until its turn ends, then gives its slot up (`Dispatcher.overfull`).
3. A limit holds until it is set anew, or the run ends: also for a worker that comes back, and for one that trains meanwhile.
4. What does not fit is refused whole, with the worker, what was asked and what is allowed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from libra import keys
from libra.events import EngineDeclared
from libra.scheduler import dask_internals

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler

    from libra.scheduler.run_state import RunState


_DECLARED = tuple(f.name for f in fields(EngineDeclared) if f.name not in ("run", "t_s", "worker"))


@dataclass(slots=True)
class _Run:
    full: dict[str, tuple[int, int]] = field(default_factory=dict)  # degree and slots of each worker's engine
    began: dict[str, dict[str, Any]] = field(default_factory=dict)  # what each worker was started with
    limits: dict[tuple[str, int], int] = field(default_factory=dict)
    declared: dict[tuple[str, int], dict[str, Any]] = field(default_factory=dict)


class Concurrency:
    """Limits of all runs on a scheduler; ``kick`` is called where slots may have come free."""

    def __init__(self, scheduler: Scheduler, kick: Callable[[], None]) -> None:
        self._scheduler, self._kick = scheduler, kick
        self._runs: dict[str, _Run] = {}

    def ended(self, run: str) -> None:
        """The run is over: its workers supply what their engines have."""
        state = self._runs.pop(run, None)
        if state is None:
            return
        for address, ws in list(self._scheduler.workers.items()):
            tp, slots = state.full.get(str(ws.name), (0, 0))
            if (str(ws.name), tp) in state.limits and ws.resources.get(keys.ROLLOUT):
                dask_internals.set_supply(self._scheduler, address, keys.ROLLOUT, slots)

    def joined(self, run: str, worker: str, kind: Mapping[str, Any]) -> None:
        """A worker is there, for the first time or again, whose engine is of this ``kind``: engine, bucket, tp and slots."""
        known = self._runs.setdefault(run, _Run())
        known.began[worker] = dict(kind)
        known.full[worker] = (int(kind["tp"]), int(kind["slots"]))

    def apply(self, run: str, address: str) -> None:
        """A worker begins to supply slots: no more than its limit, where it has one."""
        state, ws = self._runs.get(run), self._scheduler.workers.get(address)
        if state is None or ws is None:
            return
        tp, slots = state.full.get(str(ws.name), (0, 0))
        limit = state.limits.get((str(ws.name), tp), slots)
        if ws.resources.get(keys.ROLLOUT, 0) > limit > 0:
            dask_internals.set_supply(self._scheduler, address, keys.ROLLOUT, limit)

    def supplied(self, run: str, worker: str, tp: int, slots: int) -> int:
        """Slots that a worker may supply whose engine has this degree and so many slots from now on."""
        known = self._runs.setdefault(run, _Run())
        known.full[worker] = (tp, slots)
        return min(slots, known.limits.get((worker, tp), slots))

    def declared(self, run: str, msg: Mapping[str, Any]) -> None:
        """An engine has said what it is: the fields of `libra.events.EngineDeclared`; kept by degree, also when it is gone."""
        self._runs.setdefault(run, _Run()).declared[msg["name"], msg["tp"]] = {name: msg[name] for name in _DECLARED}

    def rows(self, state: RunState) -> list[dict[str, Any]]:
        """Each worker with an engine, or that had one.

        ``worker``, ``address``; ``engine``, ``bucket``, ``base_tp`` and ``base_slots`` as it was started; ``tp`` and ``slots`` of
        its last engine; slots that it ``supplies`` now; its ``limits``, and what was ``declared``, both by degree.
        """
        known, found = self._runs.get(state.run, _Run()), []
        for worker, (tp, slots) in sorted(known.full.items()):
            ws = self._scheduler.workers.get(state.engines.get(worker, ""))
            supplies = int(ws.resources.get(keys.ROLLOUT, 0)) if ws is not None else 0
            began = known.began.get(worker)
            if began is None:
                continue
            base = {"base_tp": began["tp"], "base_slots": began["slots"]}
            found.append(
                {
                    "worker": worker,
                    "address": state.engines.get(worker, ""),
                    **base,
                    "engine": began["engine"],
                    "bucket": began["bucket"],
                    "tp": tp,
                    "slots": slots,
                    "supplies": supplies,
                    "limits": {str(of): most for (name, of), most in known.limits.items() if name == worker},
                    "declared": {str(of): said for (name, of), said in known.declared.items() if name == worker},
                }
            )
        return found

    def set(self, state: RunState, wanted: Mapping[str, Mapping[str, int]], reason: str) -> dict[str, Any]:
        """Limit engines, by worker: ``slots``, and ``tp`` where another engine than the present one is meant.

        Answers ``{}``, or ``{"error": ...}`` where nothing was changed.
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
        state.emit("slots_set", worker=worker, tp=tp, slots=slots, of_slots=full if tp == has else None, reason=reason)
        address = state.engines.get(worker)
        ws = self._scheduler.workers.get(address) if address is not None else None
        if tp == has and ws is not None and ws.resources.get(keys.ROLLOUT):  # 0: it does something else, or changes
            dask_internals.set_supply(self._scheduler, ws.address, keys.ROLLOUT, slots)

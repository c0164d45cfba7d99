"""Reports a resource that a run needs and no worker supplies: since when, the last suppliers, the waiting tasks, and what
to type.

Invariants
----------
1. A worker counts for a run once its setup for that run has ended, as long as Dask gives it tasks; an engine, unless it failed
   the version check.
2. A resource that too few workers supply is reported after ``TELL_AFTER_S``, or after ``START_S`` while its first workers are
   being set up; again every ``REMIND_S``, and when the cause has
   changed (a lost worker is back, and is being set up); its return is reported once. The driver reads these notices less than 10 s
   later.
3. A run whose engines have all failed the version check twice, and that expects no other, ends with an error.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from libra import keys
from libra.cluster.readiness import NEEDED
from libra.errors import EngineError, shell_path
from libra.scheduler import dask_internals
from libra.scheduler.lost_workers import LostWorkers
from libra.scheduler.run_state import RunState

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler, WorkerState

    from libra.scheduler.unready_workers import NotReady
    from libra.types import Phase

logger = logging.getLogger(__name__)

TELL_AFTER_S = 6.0
"""A worker that its nanny starts again without a model to load is back sooner."""
START_S = 300.0
"""The first setup of a run loads its model, and with vLLM takes minutes also where all is well."""
REMIND_S = 300.0
STUCK_S = 120.0
"""A setup that takes longer may hang: only then the notice says how to start the worker again."""
WORK = {
    keys.ROLLOUT: "generates",
    keys.TOOL: "runs tool calls",
    keys.GRADE: "grades",
    keys.TRAIN: "trains",
    keys.COMMIT: "writes the store",
    keys.TEACHER: "holds the teacher",
}
"""Resources that a run needs, and the work of their workers."""


@dataclass(slots=True)
class _Role:
    """``missing_s``, ``told_s``: monotonic seconds, None if not missing or not reported. ``had``: names of its last
    suppliers. ``cause``: who was named, by name or address."""

    missing_s: float | None = None
    told_s: float | None = None
    had: tuple[str, ...] = ()
    cause: tuple[str, ...] = ()


class MissingRoles:
    """The missing resources of every run on a scheduler; call `look` twice a second."""

    def __init__(
        self, scheduler: Scheduler, not_ready: NotReady, lost: LostWorkers, phase_of: Callable[[str], Phase]
    ) -> None:
        self._scheduler, self._not_ready, self._lost, self._phase_of = scheduler, not_ready, lost, phase_of
        self._roles: dict[str, dict[str, _Role]] = {}

    def ended(self, run: str) -> None:
        """Remove a run."""
        self._roles.pop(run, None)

    def lack(self, run: str) -> str:
        """The work of this run that too few workers do and that was reported, e.g. "nobody generates"; "" if there is none."""
        told = [resource for resource, role in self._roles.get(run, {}).items() if role.told_s is not None]
        return f"nobody {WORK[told[0]]}" if told else ""

    def look(self, state: RunState, now_s: float | None = None) -> None:
        """Check the suppliers of a run, and report changes; ``now_s``: monotonic seconds."""
        now_s = time.monotonic() if now_s is None else now_s
        roles = self._roles.setdefault(state.run, {resource: _Role() for resource in WORK})
        due, back, is_first = [], [], True
        for resource, role in roles.items():
            names = self._suppliers(state, resource)
            if len(names) >= self._wanted(state, resource):
                if role.told_s is not None:
                    back.append(resource)
                    is_first = is_first and not role.had
                role.missing_s, role.told_s, role.had = role.missing_s if resource in back else None, None, names
                continue
            role.missing_s = now_s if role.missing_s is None else role.missing_s
            if self._is_due(state, resource, role, now_s):
                role.told_s, role.cause = now_s, self._cause(state, resource, role)
                due.append(resource)
        if back:
            self._tell_back(state, {resource: roles[resource] for resource in back}, now_s, is_first)
        if due:
            state.notices.warn(logger, self._text(state, {resource: roles[resource] for resource in due}, now_s))
        self._end_unservable(state)

    def _end_unservable(self, state: RunState) -> None:
        """End a run by an error of one waiting trajectory if every engine that it has or expects is out."""
        workers = self._scheduler.workers.values()
        engines = {ws.address for ws in workers if keys.ROLLOUT in self._would_supply(ws)}
        had = self._roles[state.run][keys.ROLLOUT].had
        if not engines or not state.workers.out.keys() >= engines or set(had) & set(self._lost.gone()):
            return
        for key, ts in self._scheduler.tasks.items():
            if isinstance(key, str) and ts.state == "no-worker" and dask_internals.is_parked(ts):
                parsed = keys.parse(key)
                if parsed is not None and (parsed.node, parsed.run) == ("trajectory", state.run):
                    error = EngineError(
                        f"run {state.run}: no engine can serve {next(iter(state.workers.out.values()))}, and so it was after a "
                        "restart from that version's file. The engine does not compute what the trainer does with this model: "
                        "try the other rollout.engine, or report the model's config.json; then libra resume "
                        f"{shell_path(state.directory)}"
                    )
                    dask_internals.fail(self._scheduler, key, error, "libra-unservable")
                    return

    def _is_due(self, state: RunState, resource: str, role: _Role, now_s: float) -> bool:
        if role.told_s is None:
            after_s = START_S if not role.had and self._are_coming(state, resource) else TELL_AFTER_S
            return role.missing_s is not None and now_s - role.missing_s >= after_s
        for_s = now_s - role.told_s
        return for_s >= REMIND_S or (for_s >= TELL_AFTER_S and self._cause(state, resource, role) != role.cause)

    def _are_coming(self, state: RunState, resource: str) -> bool:
        """Whether workers that would supply it are being set up, and none of them has failed."""
        failed = self._restarts(state).keys() | state.workers.out.keys()
        coming = {ws.address for ws in self._scheduler.workers.values() if resource in self._would_supply(ws)}
        return bool(coming - state.workers.ready) and not coming & failed

    def _cause(self, state: RunState, resource: str, role: _Role) -> tuple[str, ...]:
        """Who has left, by name; whose engine is out and who is being set up, by address."""
        gone = set(role.had) & set(self._lost.gone())
        coming = (ws.address for ws in self._scheduler.workers.values() if resource in self._would_supply(ws))
        out = state.workers.out if resource == keys.ROLLOUT else ()
        return (
            *sorted(gone),
            *sorted(out),
            *sorted(address for address in coming if address not in state.workers.ready),
        )

    def _wanted(self, state: RunState, resource: str) -> int:
        if resource == keys.TEACHER:
            return int(state.settings.distil.teacher is not None)
        return state.settings.cluster.train_workers if resource == keys.TRAIN else 1

    def _suppliers(self, state: RunState, resource: str) -> tuple[str, ...]:
        workers = state.workers
        out = workers.quarantined if resource == keys.ROLLOUT else ()
        there = [a for a in dask_internals.supply(self._scheduler, resource) if a in workers.ready and a not in out]
        return tuple(sorted(dask_internals.worker_name(self._scheduler, address) for address in there))

    # ---------------------------------------------------------------- words

    def _tell_back(self, state: RunState, roles: Mapping[str, _Role], now_s: float, is_first: bool) -> None:
        names = ", ".join(dict.fromkeys(name for role in roles.values() for name in role.had))
        missing_s = min(now_s if role.missing_s is None else role.missing_s for role in roles.values())
        for role in roles.values():
            role.missing_s = None
        again = "" if is_first else " again"
        state.notices.warn(
            logger, f"run {state.run}: {_listed(roles)} is there{again} after {now_s - missing_s:.0f} s: {names}"
        )

    def _text(self, state: RunState, roles: Mapping[str, _Role], now_s: float) -> str:
        missing_s = min(now_s if role.missing_s is None else role.missing_s for role in roles.values())
        workers = sorted(self._scheduler.workers.values(), key=lambda ws: str(ws.name))
        candidates = [ws for ws in workers if self._would_supply(ws) & roles.keys()]
        coming = [ws for ws in candidates if ws.address not in state.workers.ready]
        had = {name for role in roles.values() for name in role.had}
        gone = sorted(had & set(self._lost.gone()))
        few = any(self._suppliers(state, resource) for resource in roles)
        what = f"{'too few' if few else 'nobody'} {_listed(roles, WORK)}"
        if not had:  # it is starting
            what = f"{_listed(roles)} not there yet"
        return (
            f"run {state.run}: for {now_s - missing_s:.0f} s {what}: "
            f"{self._who(state, coming, gone, candidates)}; {self._waiting(state, roles)}\n"
            f"  {self._advice(state, roles, candidates, gone, now_s - missing_s)}"
        )

    def _restarts(self, state: RunState) -> dict[str, float | None]:
        """Seconds until a worker whose setup failed is restarted, by address; None: it is not restarted by itself."""
        return {row["address"]: row["again_in_s"] for row in self._not_ready.rows(state.run) if row["detail"]}

    def _would_supply(self, ws: WorkerState) -> set[str]:
        held = self._not_ready.held_of(ws.address)
        return {name for name, units in {**ws.resources, **held}.items() if units}

    def _who(self, state: RunState, coming: list[WorkerState], gone: list[str], candidates: list[WorkerState]) -> str:
        failed = {row["address"]: row["detail"] for row in self._not_ready.rows(state.run) if row["detail"]}
        parts = [f"worker {name} has left the cluster" for name in gone]
        for ws in coming:
            how = f"failed its setup ({failed[ws.address]})" if ws.address in failed else "is being set up"
            parts.append(f"worker {ws.name} (process {ws.pid} on {ws.host}) {how}")
        for ws in candidates:
            if ws.address in state.workers.quarantined:
                parts.append(f"the engine of worker {ws.name} failed the version check")
            elif ws not in coming and ws not in self._scheduler.running:
                parts.append(f"worker {ws.name} is {ws.status.name}")
        return ", ".join(parts) or "no worker of this cluster has it"

    def _waiting(self, state: RunState, roles: Mapping[str, _Role]) -> str:
        """The tasks that wait in the scheduler for one of these resources."""
        ending, waiting = f"-e{state.epoch}-{state.run}", Counter[str]()
        for key, ts in self._scheduler.tasks.items():
            if ts.state == "no-worker" and isinstance(key, str) and key.endswith(ending):
                parsed, restrictions = keys.parse(key), ts.resource_restrictions or {}
                if parsed is None:
                    continue
                needs = set(restrictions)
                if keys.GANG in restrictions:
                    needs = {keys.TRAIN}
                elif dask_internals.is_parked(ts):
                    needs = {str(self._phase_of(key))} if parsed.node == "trajectory" else set()
                if needs & roles.keys():
                    waiting[parsed.node] += 1
        counts = ", ".join(f"{node} {count}" for node, count in sorted(waiting.items()))
        return f"{waiting.total()} of its tasks wait for that ({counts})" if waiting else "nothing waits for that yet"

    def _advice(
        self,
        state: RunState,
        roles: Mapping[str, _Role],
        candidates: list[WorkerState],
        gone: list[str],
        missing_s: float,
    ) -> str:
        parts, restarts, out = list[str](), self._restarts(state), state.workers.out.keys()
        coming = [ws for ws in candidates if ws.address not in state.workers.ready | out | restarts.keys()]
        dead = [ws for ws in candidates if ws.address in out or restarts.get(ws.address, 0.0) is None]
        soon_s = [again_s for ws in candidates if (again_s := restarts.get(ws.address)) is not None]
        if dead:
            again = ", ".join(f"kill -9 {ws.pid}{'' if ws.nanny else ' and start it again'}" for ws in dead)
            parts.append(f"nothing starts it again by itself: mend the cause (its log says more), then type {again}")
        elif soon_s:
            parts.append(f"it is started again in {min(soon_s):.0f} s")
        elif any(ws.address in state.workers.quarantined for ws in candidates):
            parts.append("its engine is started again from that version's file, and checked")
        elif coming and not gone:
            stuck = missing_s >= STUCK_S
            again = ", ".join(f"kill -9 {ws.pid}" for ws in coming if ws.nanny and stuck)
            parts.append(
                "it begins to work when its setup has ended" + (f"; to start it again, type {again}" if again else "")
            )
        elif state.registration.local and gone:
            late = missing_s >= STUCK_S
            parts.append(
                f"it has not come back; see {shell_path(state.directory / 'logs')}"
                if late
                else "it is started again by itself"
            )
        elif not state.registration.local:
            options = dict.fromkeys(NEEDED[resource][1] for resource in roles)
            parts.append("type " + ", ".join(f"dask worker {self._scheduler.address} {each}" for each in options))
            parts.append(f"libra doctor --scheduler {self._scheduler.address} shows what is there")
        return "; ".join([*parts, f"to stop and go on later, Ctrl-C and libra resume {shell_path(state.directory)}"])


def _listed(resources: Iterable[str], work: Mapping[str, str] | None = None) -> str:
    """``TOOL, GRADE``; with ``work``, preceded by the work of its workers."""
    names = ", ".join(resources)
    return names if work is None else f"{', '.join(work[name] for name in resources)} ({names})"

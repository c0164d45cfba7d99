"""RolePlugin: workers that change roles while a run goes on; beside `LibraPlugin`, which keeps the trajectories.

`libra.policy.role_changes.Roles` decides, this carries out: it withdraws and restores what workers supply, tells them their stages
(`libra.worker.role_member`), and writes down what became of it. The calls of whoever wants roles changed::

    libra_set_roles(run, epoch, assignments={"rollout-0": {"role": "train"}})  ->  {"generation": 3} or {"error": "..."}
    libra_cancel_roles(run, epoch, generation)                                 ->  {"generation": 4} of the way back, or an error
    libra_roles(run, epoch)                    ->  [{worker, role, tp, stage, generation, for_s, seconds, reason, ...}, ...]
    libra_wait_roles(run, epoch, generation)                                   ->  {"changed": bool}, once the change has ended

Invariants
----------
1. A worker's slots are zeroed before it is told to drain, never deleted, and given back in the role that it has taken up.
2. A worker that comes back supplies nothing before its role is settled, whatever it was started with.
3. At least one worker keeps generating: a request that would leave none is refused.
4. What workers say of another epoch of the run is not listened to; `Roles` fences changes by their generation.
5. When the run ends every worker supplies what it was started with.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from distributed.diagnostics.plugin import SchedulerPlugin

from libra import keys
from libra.policy.role_changes import Roles
from libra.policy.role_messages import (
    Assignment,
    CancelRequested,
    ChangeRequested,
    GiveUp,
    MemberAnnounced,
    MemberFailed,
    MemberLost,
    Perform,
    Refuse,
    ReportEnded,
    ReportStarted,
    ReportUndone,
    RestartMember,
    Role,
    RoleCommand,
    RoleEvent,
    Stage,
    StageDone,
    Supply,
    Withdraw,
)
from libra.scheduler import dask_internals

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler

logger = logging.getLogger(__name__)

_TELLS = frozenset({"role_member", "role_stage", "role_failed", "hybrid_pool", "not_ready"})
_STAGES = frozenset(str(stage) for stage in Stage)


@dataclass(slots=True)
class _Run:
    run: str
    epoch: int
    roles: Roles = field(default_factory=Roles)
    address: dict[str, str] = field(default_factory=dict)  # of members that are there, by name
    slots: dict[str, int] = field(default_factory=dict)  # that each was started with
    shares: dict[str, dict[str, str]] = field(default_factory=dict)  # what each has of its machine, as its host says it
    says_tp: dict[str, int] = field(default_factory=dict)  # TP that each was started with; 0: it does not say
    pool: tuple[int, str, int] | None = None  # gang, host and port of the core's pool
    pool_of: str = ""  # address of the worker that opened it
    begun_s: dict[int, float] = field(default_factory=dict)  # monotonic, by generation of a change that goes on
    stage_s: dict[tuple[int, str], dict[str, float]] = field(default_factory=dict)
    took_s: dict[str, float] = field(default_factory=dict)  # the last change of each worker that took it somewhere else
    since: dict[str, tuple[str, int, float]] = field(default_factory=dict)  # stage, generation, monotonic; by worker
    reason: dict[str, str] = field(default_factory=dict)  # why each began its last change, or can do nothing more
    failed: dict[str, str] = field(default_factory=dict)  # address of those that are there and can do nothing
    undone: set[int] = field(default_factory=set)
    news: asyncio.Event = field(default_factory=asyncio.Event)  # set, and another one put here, when a change has ended


class RolePlugin(SchedulerPlugin):
    """One per scheduler, for the one run at a time whose workers can change roles."""

    name = "libra-roles"
    idempotent = True

    def __init__(self) -> None:
        self._runs: dict[str, _Run] = {}

    async def start(self, scheduler: Scheduler) -> None:
        """Add the calls of the driver and of workers."""
        self._scheduler = scheduler
        dask_internals.add_handlers(
            scheduler,
            {
                "libra_register_roles": self.register_roles,
                "libra_end_roles": self.end_roles,
                "libra_set_roles": self.set_roles,
                "libra_cancel_roles": self.cancel_roles,
                "libra_roles": self.roles,
                "libra_wait_roles": self.wait_roles,
                "libra_role_known": self.role_known,
            },
        )

    # ---------------------------------------------------------------- calls

    def register_roles(self, run: str, epoch: int) -> dict[str, Any]:
        """From now on workers of a run may change roles; what an older epoch knew is forgotten.

        What a worker supplies is one thing for all runs, so only one at a time decides about it.
        """
        if others := [other for other in self._runs if other != run]:
            return {"error": f"run {others[0]!r} changes roles of workers here, and only one run at a time can"}
        self.end_roles(run)
        self._runs[run] = _Run(run, epoch)
        return {}

    def end_roles(self, run: str) -> None:
        """Forget a run; its workers supply what they were started with."""
        state = self._runs.pop(run, None)
        if state is not None:
            state.news.set()
            for name in state.address:
                self._supply(state, name, state.slots[name], state.says_tp[name])

    def set_roles(self, run: str, epoch: int, assignments: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """Begin one change of the workers named, all of which end in these assignments, or in what they have now.

        ``role`` is "rollout", "train" or "lent"; ``tp`` is by default the worker's own.
        """
        state = self._of(run, epoch)
        if state is None:
            return _unknown(run, epoch)
        try:
            targets = {name: self._assignment(state, name, has) for name, has in assignments.items()}
        except ValueError as error:
            return {"error": str(error)}
        if reason := self._nobody_left(state, targets):
            return {"error": reason}
        return self._answer(state, ChangeRequested(targets))

    def cancel_roles(self, run: str, epoch: int, generation: int) -> dict[str, Any]:
        """Have a change undone that has not ended."""
        state = self._of(run, epoch)
        return _unknown(run, epoch) if state is None else self._answer(state, CancelRequested(generation))

    def roles(self, run: str, epoch: int) -> list[dict[str, Any]]:
        """Every worker that can change roles, with the role it has or is on its way to; empty where the run is not here.

        Beside what `libra.policy.role_changes.Roles.rows` has: ``for_s`` are seconds in the present stage; ``seconds`` is what
        its last
        change took until the slowest of its members was in its new role, None before one; ``reason`` is why its last change
        began. Stage ``failed`` is a worker that is in the cluster and can do nothing, ``reason`` then says what went wrong.
        """
        state = self._of(run, epoch)
        return [] if state is None else [self._row(state, row) for row in state.roles.rows()]

    @staticmethod
    def _row(state: _Run, row: dict[str, Any]) -> dict[str, Any]:
        name = row["worker"]
        for_s = round(time.monotonic() - state.since[name][2], 3) if name in state.since else None
        if row["stage"] == "lost" and name in state.failed:
            row["stage"] = "failed"
        return row | {"for_s": for_s, "seconds": state.took_s.get(name), "reason": state.reason.get(name, "")}

    async def wait_roles(self, run: str, epoch: int, generation: int) -> dict[str, Any]:
        """Answer when a change has ended, or is undone; ``changed`` is whether its members are where it was to take them."""
        while (state := self._of(run, epoch)) is not None and any(
            generation in (change.generation, change.undoes) for change in state.roles.changes.values()
        ):
            await state.news.wait()
        if state is None or not 0 < generation <= state.roles.generation:
            return _unknown(run, epoch) if state is None else {"error": f"there is no change {generation}"}
        return {"changed": generation not in state.undone}

    def role_known(self, run: str, epoch: int, worker: str) -> bool:
        """Whether a worker of this name was here before, so that it takes nothing up until it is told."""
        state = self._of(run, epoch)
        return state is not None and worker in state.roles.members

    def _of(self, run: str, epoch: int) -> _Run | None:
        state = self._runs.get(run)
        return state if state is not None and state.epoch == epoch else None

    @staticmethod
    def _assignment(state: _Run, name: str, has: Mapping[str, Any]) -> Assignment:
        if unknown := has.keys() - {"role", "tp"}:
            raise ValueError(f"{name}: {', '.join(sorted(unknown))} is not part of an assignment; role and tp are")
        if has.get("role") not in tuple(Role):
            raise ValueError(f"{name}: role {has.get('role')!r}; allowed are {', '.join(Role)}")
        member = state.roles.members.get(name)
        return Assignment(Role(has["role"]), int(has.get("tp") or (member.base.tp if member is not None else 1)))

    def _nobody_left(self, state: _Run, targets: Mapping[str, Assignment]) -> str:
        """Why nobody would generate any more; empty where somebody would."""
        wanted = {name: change.moves[name][1] for change in state.roles.changes.values() for name in change.moves}
        wanted = {name: member.settled for name, member in state.roles.members.items()} | wanted | dict(targets)
        others = dask_internals.supply(self._scheduler, keys.ROLLOUT).keys() - state.address.values()
        if others or any(has.role is Role.ROLLOUT for has in wanted.values()):
            return ""
        return "no worker would be left to generate; leave one of them in role rollout"

    def _answer(self, state: _Run, event: RoleEvent) -> dict[str, Any]:
        commands = self._handle(state, event)
        for command in commands:
            if isinstance(command, Refuse):
                return {"error": command.reason}
        return {"generation": next(c.generation for c in commands if isinstance(c, ReportStarted))}

    # ---------------------------------------------------------------- scheduler hooks

    def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        """One that comes back supplies what its command line says; its role comes by name, once its host is there."""
        name = dask_internals.worker_name(scheduler, worker)
        for state in self._runs.values():
            if name in state.roles.members:
                dask_internals.set_supply(scheduler, worker, keys.ROLLOUT, 0)

    def remove_worker(self, scheduler: Scheduler, worker: str, **kwargs: Any) -> None:
        """A member is lost, or the core's pool."""
        for state in self._runs.values():
            if worker == state.pool_of:
                state.pool = None
            state.failed = {name: address for name, address in state.failed.items() if address != worker}
            for name in [name for name, address in state.address.items() if address == worker]:
                del state.address[name]
                self._handle(state, MemberLost(name))

    def log_event(self, topic: str, msg: Any) -> None:
        """A worker says who it is, where it is with its stage, or where the core's pool is."""
        if topic != "libra" or not isinstance(msg, dict) or msg.get("kind") not in _TELLS:
            return
        state = self._of(msg["run"], msg["epoch"])
        if state is None:
            return
        match msg["kind"]:
            case "role_member":
                self._announced(state, msg)
            case "hybrid_pool":
                state.pool, state.pool_of = (msg["gang"], msg["host"], msg["port"]), msg["worker"]
                for address in state.address.values():
                    self._tell(state, address, pool=state.pool)
            case "not_ready" if msg["name"] in state.roles.members:
                self._is_out(state, msg["name"], msg["address"], msg["detail"])
            case "role_failed":
                self._handle(state, MemberFailed(msg["name"], msg["generation"], msg["detail"]))
            case "role_stage":
                fields = {name: msg[name] for name in ("generation", "stage", "seconds")}
                self._emit(state, "role_stage", worker=msg["name"], **fields)
                if msg["stage"] in _STAGES:
                    stages = state.stage_s.setdefault((msg["generation"], msg["name"]), {})
                    stages[msg["stage"]] = msg["seconds"]
                    self._handle(state, StageDone(msg["name"], msg["generation"], Stage(msg["stage"])))

    def _announced(self, state: _Run, msg: Mapping[str, Any]) -> None:
        name, address = msg["name"], msg["address"]
        if (ws := self._scheduler.workers.get(address)) is None:
            return
        state.address[name], state.slots[name] = address, msg["slots"]
        state.failed.pop(name, None)
        state.shares[name] = msg["share"]
        state.says_tp.setdefault(name, int(ws.resources.get(keys.TP, 0)))
        if state.pool is not None:
            self._tell(state, address, pool=state.pool)
        base = Assignment(Role.ROLLOUT, msg["tp"])
        self._handle(state, MemberAnnounced(name, base, urlsplit(address).hostname or address))

    @staticmethod
    def _is_out(state: _Run, name: str, address: str, detail: str) -> None:
        """A worker is there and can do nothing until it is started anew."""
        state.failed[name], state.reason[name] = address, detail

    # ---------------------------------------------------------------- commands

    def _handle(self, state: _Run, event: RoleEvent) -> tuple[RoleCommand, ...]:
        commands = state.roles.handle(event)
        for command in commands:
            self._obey(state, command)
        for row in state.roles.rows():
            name, at = row["worker"], (row["stage"], row["generation"])
            if name not in state.since or state.since[name][:2] != at:
                state.since[name] = (*at, time.monotonic())
        return commands

    def _obey(self, state: _Run, command: RoleCommand) -> None:
        match command:
            case Withdraw(worker=worker):
                self._supply(state, worker, 0, None)
            case Perform(worker=worker, assignment=has):
                self._tell(
                    state,
                    state.address[worker],
                    generation=command.generation,
                    stage=str(command.stage),
                    role=str(has.role),
                    tp=has.tp,
                    slots=sum(state.slots[name] for name in command.slots_of),
                    shares=[state.shares[name] for name in sorted(command.slots_of, key=lambda name: name != worker)],
                )
            case Supply(worker=worker, assignment=has, slots_of=names) if has.role is Role.ROLLOUT:
                own = has.tp == state.roles.members[worker].base.tp
                tp = state.says_tp[worker] if own else has.tp
                self._supply(state, worker, self._allowed(state, worker, has.tp, names), tp)
            case RestartMember(worker=worker, reason=reason):
                logger.warning("run %s: %s is restarted: %s", state.run, worker, reason)
                self._emit(state, "role_member_failed", worker=worker, detail=reason, restarts=True)
                self._scheduler.loop.add_callback(
                    dask_internals.restart_worker, self._scheduler, state.address[worker], f"libra-roles-{worker}"
                )
            case GiveUp(worker=worker, reason=reason):
                logger.error("run %s: %s is given nothing more until it is started anew: %s", state.run, worker, reason)
                self._is_out(state, worker, state.address.get(worker, ""), reason)
                self._emit(state, "role_member_failed", worker=worker, detail=reason, restarts=False)
            case ReportStarted() | ReportUndone() | ReportEnded():
                self._write_down(state, command)

    def _allowed(self, state: _Run, worker: str, tp: int, names: Sequence[str]) -> int:
        """Slots that an engine of these workers may use (`libra.scheduler.slot_limits`)."""
        slots, libra = sum(state.slots[name] for name in names), self._libra
        return slots if libra is None else int(libra.concurrency.supplied(state.run, worker, tp, slots))

    def _supply(self, state: _Run, name: str, slots: int, tp: int | None) -> None:
        """Have a worker supply so many slots; ``tp`` None leaves what it says of its engine."""
        address = state.address.get(name)
        if address is None or address not in self._scheduler.workers:
            return
        if tp is not None and (tp or keys.TP in self._scheduler.workers[address].resources):
            dask_internals.set_supply(self._scheduler, address, keys.TP, tp)
        dask_internals.set_supply(self._scheduler, address, keys.ROLLOUT, slots)
        if (libra := self._libra) is not None:
            libra.trajectories.kick()

    def _tell(self, state: _Run, address: str, *, pool: Any = None, stage: str | None = None, **fields: Any) -> None:
        message = {"op": "libra-role", "run": state.run, "epoch": state.epoch, "pool": pool, "stage": stage, **fields}
        dask_internals.tell_worker(self._scheduler, address, message)

    # ---------------------------------------------------------------- what became of it

    @property
    def _libra(self) -> Any:
        return self._scheduler.plugins.get("libra")

    def _emit(self, state: _Run, event: str, **fields: Any) -> None:
        run = self._libra.runs.get(state.run) if self._libra is not None else None
        if run is not None:
            run.emit(event, **fields)

    def _write_down(self, state: _Run, command: ReportStarted | ReportUndone | ReportEnded) -> None:
        generation = command.generation
        match command:
            case ReportStarted(moves=moves, reason=reason, undoes=undoes):
                state.begun_s[generation] = time.monotonic()
                state.reason |= dict.fromkeys(moves, reason)
                wanted = {name: {"role": str(to.role), "tp": to.tp} for name, (_, to) in moves.items()}
                logger.info("%s: roles change (%d) to %s", reason, generation, wanted)
                started: dict[str, Any] = {"assignments": wanted, "reason": reason, "undoes": undoes}
                self._emit(state, "role_change_started", generation=generation, **started)
            case ReportUndone(cancelled=True):
                state.undone.add(generation)
                self._forget(state, generation)
                self._emit(state, "role_change_cancelled", generation=generation)
            case ReportUndone(detail=detail):
                state.undone.add(generation)
                self._forget(state, generation)
                logger.warning("role change %d is undone: %s", generation, detail)
                self._emit(state, "role_change_failed", generation=generation, detail=detail)
            case ReportEnded(moves=moves):
                seconds = round(time.monotonic() - state.begun_s[generation], 6)
                for name, (before, to) in moves.items():
                    took = {"stage_s": state.stage_s.get((generation, name), {}), "seconds": seconds}
                    who = {"worker": name, "generation": generation}
                    if before == to:
                        self._emit(state, "role_restored", **who, role=str(to.role), tp=to.tp, **took)
                    else:
                        state.took_s[name] = seconds
                        roles = {"from_role": str(before.role), "to_role": str(to.role)}
                        self._emit(state, "role_changed", **who, **roles, from_tp=before.tp, to_tp=to.tp, **took)
                self._forget(state, generation)

    @staticmethod
    def _forget(state: _Run, generation: int) -> None:
        state.news.set()
        state.news = asyncio.Event()
        state.begun_s.pop(generation, None)
        state.stage_s = {at: stages for at, stages in state.stage_s.items() if at[0] != generation}


def _unknown(run: str, epoch: int) -> dict[str, Any]:
    return {"error": f"no workers of run {run!r}, epoch {epoch}, can change roles here (cluster.hybrid_workers)"}

"""Workers that change roles during a run.

`libra.policy.role_changes.Roles` decides. This module withdraws and restores slots, sends workers
their stages (`libra.worker.role_member`), and logs the outcome. Calls for clients::

    libra_set_roles(run, epoch, assignments={"rollout-0": {"role": "train"}})  ->  {"generation": 3}
    libra_cancel_roles(run, epoch, generation)  ->  {"generation": 4} of the change back
    libra_roles(run, epoch)  ->  [{worker, role, tp, stage, generation, ...}, ...]
    libra_wait_roles(run, epoch, generation)  ->  {"changed": bool}, once the change has ended

Invariants
----------
1. Before a worker drains its slots are set to zero, not deleted; a serving role sets them again.
2. A reconnecting worker supplies nothing until its role is assigned.
3. At least one worker keeps generating: a request that would leave none is refused.
4. Reports of another epoch of the run are ignored; `Roles` rejects reports of another generation.
5. When the run ends, every worker supplies what it was started with.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from libra import facts, keys
from libra.facts import Fact
from libra.policy import role_changes as messages
from libra.policy.role_changes import Assignment, Role, RoleCommand, Roles, Stage
from libra.scheduler import scheduler_internals
from libra.scheduler.run_state import Handler, RunState
from libra.scheduler.trajectory_tasks import Trajectories
from libra.scheduler.worker_supply import Concurrency

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler

logger = logging.getLogger(__name__)

_STAGES = frozenset(str(stage) for stage in Stage)


@dataclass(slots=True)
class _Member:
    started_tp: int  # TP resource at its start; 0: none
    slots: int = 0  # ROLLOUT slots at its start
    share: dict[str, str] = field(default_factory=dict)  # of its machine, as its host reports it
    took_s: float | None = None  # of its last change to another assignment
    since: tuple[str, int, float] | None = None  # stage, generation, monotonic seconds
    reason: str = ""  # of its last change, or its final failure


@dataclass(slots=True)
class _Run:
    run: str
    epoch: int
    roles: Roles = field(default_factory=Roles)
    members: dict[str, _Member] = field(default_factory=dict)
    address: dict[str, str] = field(default_factory=dict)  # of present members
    failed: dict[str, str] = field(default_factory=dict)  # addresses of workers without work
    pool: tuple[int, str, int] | None = None  # gang, host and port of the core's pool
    pool_of: str = ""  # address of the worker that opened it
    begun_s: dict[int, float] = field(default_factory=dict)  # by generation of a change
    stage_s: dict[tuple[int, str], dict[str, float]] = field(default_factory=dict)
    undone: set[int] = field(default_factory=set)
    news: asyncio.Event = field(default_factory=asyncio.Event)  # replaced when a change ends


class WorkerRoles:
    def __init__(
        self, scheduler: Scheduler, registered: Mapping[str, RunState], trajectories: Trajectories, limits: Concurrency
    ) -> None:
        self._scheduler, self._registered = scheduler, registered
        self._trajectories, self._concurrency = trajectories, limits
        self._run: _Run | None = None
        called = (
            self.register_roles, self.set_roles, self.cancel_roles, self.roles, self.wait_roles, self.role_known,
        )  # fmt: skip
        scheduler_internals.add_handlers(scheduler, {f"libra_{method.__name__}": method for method in called})

    def register_roles(self, run: str, epoch: int) -> dict[str, Any]:
        """Let a run's workers change roles from now on; only one run at a time may."""
        if self._run is not None and self._run.run != run:
            return {"error": f"run {self._run.run!r} changes roles of workers here, and only one run at a time can"}
        self.end_roles(run)
        self._run = _Run(run, epoch)
        return {}

    def end_roles(self, run: str) -> None:
        state = self._run
        if state is not None and state.run == run:
            self._run = None
            state.news.set()
            for name in state.address:
                self._supply(state, name, state.members[name].slots, state.members[name].started_tp)

    def as_started(self, run: str | None) -> dict[str, dict[str, int]]:
        """Resources that the workers of a run will supply when it ends, by address."""
        if (state := self._run) is None or state.run != run:
            return {}
        had = {address: state.members[name] for name, address in state.address.items()}
        return {
            at: {keys.ROLLOUT: m.slots} | ({keys.TP: m.started_tp} if m.started_tp else {}) for at, m in had.items()
        }

    def set_roles(
        self, run: str, epoch: int, assignments: Mapping[str, Mapping[str, Any]], reason: str = "asked for"
    ) -> dict[str, Any]:
        """Begin a change to ``role`` (rollout, train, lent) and ``tp`` (default: the worker's)."""
        if (state := self._of(run, epoch)) is None:
            return _unknown(run, epoch)
        try:
            targets = {name: self._assignment(state, name, has) for name, has in assignments.items()}
        except ValueError as error:
            return {"error": str(error)}
        if refusal := self._none_left(state, targets):
            return {"error": refusal}
        return self._answer(state, state.roles.request(targets, reason))

    def cancel_roles(self, run: str, epoch: int, generation: int) -> dict[str, Any]:
        state = self._of(run, epoch)
        return _unknown(run, epoch) if state is None else self._answer(state, state.roles.cancel(generation))

    def roles(self, run: str, epoch: int) -> list[dict[str, Any]]:
        """Rows of `Roles.rows` with ``for_s``, ``seconds`` and ``reason`` of the last change."""
        state = self._of(run, epoch)
        return [] if state is None else [self._row(state, row) for row in state.roles.rows()]

    @staticmethod
    def _row(state: _Run, row: dict[str, Any]) -> dict[str, Any]:
        name = row["worker"]
        member = state.members[name]
        for_s = round(time.monotonic() - member.since[2], 3) if member.since is not None else None
        if row["stage"] == "lost" and name in state.failed:
            row["stage"] = "failed"
        return row | {"for_s": for_s, "seconds": member.took_s, "reason": member.reason}

    async def wait_roles(self, run: str, epoch: int, generation: int) -> dict[str, Any]:
        """Return when a change has ended; ``changed`` is false if it was undone."""
        while (state := self._of(run, epoch)) is not None and any(
            generation in (change.generation, change.undoes) for change in state.roles.changes.values()
        ):
            await state.news.wait()
        if state is None or not 0 < generation <= state.roles.generation:
            return _unknown(run, epoch) if state is None else {"error": f"there is no change {generation}"}
        return {"changed": generation not in state.undone}

    def role_known(self, run: str, epoch: int, worker: str) -> bool:
        """Whether a worker of this name was here before; if so it does not start a role itself."""
        state = self._of(run, epoch)
        return state is not None and worker in state.roles.members

    def _of(self, run: str, epoch: int) -> _Run | None:
        state = self._run
        return state if state is not None and (state.run, state.epoch) == (run, epoch) else None

    @staticmethod
    def _assignment(state: _Run, name: str, has: Mapping[str, Any]) -> Assignment:
        if unknown := has.keys() - {"role", "tp"}:
            raise ValueError(f"{name}: {', '.join(sorted(unknown))} is not part of an assignment; role and tp are")
        if has.get("role") not in tuple(Role):
            raise ValueError(f"{name}: role {has.get('role')!r}; allowed are {', '.join(Role)}")
        member = state.roles.members.get(name)
        return Assignment(Role(has["role"]), int(has.get("tp") or (member.base.tp if member is not None else 1)))

    def _none_left(self, state: _Run, targets: Mapping[str, Assignment]) -> str:
        wanted = {name: change.moves[name][1] for change in state.roles.changes.values() for name in change.moves}
        wanted = {name: member.settled for name, member in state.roles.members.items()} | wanted | dict(targets)
        others = scheduler_internals.supply(self._scheduler, keys.ROLLOUT).keys() - state.address.values()
        if others or any(has.role is Role.ROLLOUT for has in wanted.values()):
            return ""
        return "no worker would be left to generate; leave one of them in role rollout"

    def _answer(self, state: _Run, commands: list[RoleCommand]) -> dict[str, Any]:
        self._carry_out_all(state, commands)
        if isinstance(commands[0], messages.Refuse):
            return {"error": commands[0].reason}
        return {"generation": next(c.generation for c in commands if isinstance(c, facts.RoleChangeStarted))}

    def add_worker(self, worker: str) -> None:
        """A returning worker supplies no slots until its role is known."""
        name = scheduler_internals.worker_name(self._scheduler, worker)
        if self._run is not None and name in self._run.roles.members:
            scheduler_internals.set_supply(self._scheduler, worker, keys.ROLLOUT, 0)

    def remove_worker(self, worker: str) -> None:
        if (state := self._run) is None:
            return
        if worker == state.pool_of:
            state.pool = None
        state.failed = {name: address for name, address in state.failed.items() if address != worker}
        for name in [name for name, address in state.address.items() if address == worker]:
            del state.address[name]
            self._carry_out_all(state, state.roles.lose(name))

    def handlers(self) -> dict[type[Fact], Handler]:
        return {
            facts.RoleMemberJoined: self._announced,
            facts.HybridPoolOpened: self._pool_opened,
            facts.RoleStageFailed: self._stage_told,
            facts.RoleStage: self._stage_told,
        }

    def setup_failed(self, run: RunState, fact: facts.SetupFailed, address: str) -> None:
        state = self._of(run.run, run.epoch)
        if state is not None and fact.worker in state.roles.members:
            state.failed[fact.worker], state.members[fact.worker].reason = address, fact.detail

    def _pool_opened(self, run: RunState, fact: facts.HybridPoolOpened, address: str) -> None:
        if (state := self._of(run.run, run.epoch)) is not None:
            state.pool, state.pool_of = (fact.gang, fact.host, fact.port), address
            for member in state.address.values():
                self._send(state, member, pool=state.pool)

    def _stage_told(self, run: RunState, fact: facts.RoleStage | facts.RoleStageFailed, _: str) -> None:
        if (state := self._of(run.run, run.epoch)) is None:
            return
        if isinstance(fact, facts.RoleStage):
            run.log.emit(fact)
            if fact.stage not in _STAGES:
                return
            state.stage_s.setdefault((fact.generation, fact.worker), {})[fact.stage] = fact.seconds
        self._carry_out_all(state, state.roles.handle(fact))

    def _announced(self, run: RunState, fact: facts.RoleMemberJoined, address: str) -> None:
        name, state = fact.worker, self._of(run.run, run.epoch)
        if state is None or (ws := self._scheduler.workers.get(address)) is None:
            return
        member = state.members.setdefault(name, _Member(int(ws.resources.get(keys.TP, 0))))
        member.slots, member.share = fact.slots, fact.share
        state.address[name] = address
        state.failed.pop(name, None)
        if state.pool is not None:
            self._send(state, address, pool=state.pool)
        base = Assignment(Role.ROLLOUT, fact.tp)
        if run.tail.settings is not None:
            self._tell(state, facts.RoleMemberKnown(name, fact.tp))
        self._carry_out_all(state, state.roles.announce(name, base, urlsplit(address).hostname or address))

    def _carry_out_all(self, state: _Run, commands: list[RoleCommand]) -> None:
        for command in commands:
            self._carry_out(state, command)
        for row in state.roles.rows():
            name, at = row["worker"], (row["stage"], row["generation"])
            member = state.members[name]
            if member.since is None or member.since[:2] != at:
                member.since = (*at, time.monotonic())

    def _carry_out(self, state: _Run, command: RoleCommand) -> None:
        match command:
            case messages.Withdraw(worker=worker):
                self._supply(state, worker, 0, None)
            case messages.Perform(worker=worker, assignment=has):
                members = [state.members[name] for name in sorted(command.slots_of, key=lambda name: name != worker)]
                self._send(
                    state, state.address[worker], generation=command.generation, stage=str(command.stage),
                    role=str(has.role), tp=has.tp, slots=sum(member.slots for member in members),
                    shares=[member.share for member in members],
                )  # fmt: skip
            case messages.Supply(worker=worker, assignment=has, slots_of=names) if has.role is Role.ROLLOUT:
                own = has.tp == state.roles.members[worker].base.tp
                tp = state.members[worker].started_tp if own else has.tp
                slots = sum(state.members[name].slots for name in names)
                self._supply(state, worker, self._concurrency.supplied(state.run, worker, has.tp, slots), tp)
            case facts.RoleMemberFailed(worker=worker, detail=detail, restarts=True):
                logger.warning("run %s: %s is restarted: %s", state.run, worker, detail)
                self._tell(state, command)
                self._scheduler.loop.add_callback(
                    scheduler_internals.restart_worker, self._scheduler, state.address[worker], f"libra-roles-{worker}"
                )
            case facts.RoleMemberFailed(worker=worker, detail=detail):
                logger.error("run %s: %s gets no work until it is restarted: %s", state.run, worker, detail)
                state.failed[worker], state.members[worker].reason = state.address.get(worker, ""), detail
                self._tell(state, command)
            case facts.RoleChangeStarted(generation=generation, reason=reason):
                state.begun_s[generation] = time.monotonic()
                for name in command.assignments:
                    state.members[name].reason = reason
                logger.info("%s: roles change (%d) to %s", reason, generation, command.assignments)
                self._tell(state, command)
            case facts.RoleChangeCancelled(generation=generation):
                self._undone(state, generation, command)
            case facts.RoleChangeFailed(generation=generation, detail=detail):
                logger.warning("role change %d is undone: %s", generation, detail)
                self._undone(state, generation, command)
            case messages.Ended():
                self._ended(state, command)

    def _supply(self, state: _Run, name: str, slots: int, tp: int | None) -> None:
        address = state.address.get(name)
        if address is None or address not in self._scheduler.workers:
            return
        if tp is not None and (tp or keys.TP in self._scheduler.workers[address].resources):
            scheduler_internals.set_supply(self._scheduler, address, keys.TP, tp)
        scheduler_internals.set_supply(self._scheduler, address, keys.ROLLOUT, slots)
        self._trajectories.workers_changed()

    def _send(self, state: _Run, address: str, *, pool: Any = None, stage: str | None = None, **fields: Any) -> None:
        message = {"op": "libra-role", "run": state.run, "epoch": state.epoch, "pool": pool, "stage": stage, **fields}
        scheduler_internals.tell_worker(self._scheduler, address, message)

    def _undone(self, state: _Run, generation: int, fact: Fact) -> None:
        state.undone.add(generation)
        self._forget(state, generation)
        self._tell(state, fact)

    def _ended(self, state: _Run, command: messages.Ended) -> None:
        generation = command.generation
        seconds = round(time.monotonic() - state.begun_s[generation], 6)
        for name, (before, to) in command.moves.items():
            stage_s = state.stage_s.get((generation, name), {})
            if before == to:
                self._tell(state, facts.RoleRestored(name, generation, str(to.role), to.tp, stage_s, seconds))
            else:
                state.members[name].took_s = seconds
                roles = str(before.role), str(to.role), before.tp, to.tp
                self._tell(state, facts.RoleChanged(name, generation, *roles, stage_s, seconds))
        self._forget(state, generation)

    def _tell(self, state: _Run, fact: Fact) -> None:
        if (run := self._registered.get(state.run)) is not None:
            self._trajectories.applier.tell(run, fact)

    @staticmethod
    def _forget(state: _Run, generation: int) -> None:
        state.news.set()
        state.news = asyncio.Event()
        state.begun_s.pop(generation, None)
        state.stage_s = {at: stages for at, stages in state.stage_s.items() if at[0] != generation}


def _unknown(run: str, epoch: int) -> dict[str, Any]:
    return {"error": f"no workers of run {run!r}, epoch {epoch}, can change roles here (cluster.hybrid_workers)"}

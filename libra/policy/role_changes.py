"""Role changes: a state machine that moves workers between roles so that no GPU has two owners.

::

    draining -> sleeping -> taking_up -> resupplied   once all members have finished a stage
    any stage --cancelled, failed, a member lost--> sleeping or taking_up, in a new change back

A *change* moves one worker, or several. In a *rebucket* workers of one node *lend* their GPUs to
the engine of one of them, the leader, or take them back.
`libra.scheduler.worker_roles` carries out the commands.

Invariants
----------
1. A worker is supplied in at most one role: withdrawn before it drains, supplied after its change.
2. Every change has a larger generation than all before; reports of another generation are ignored.
3. A change ends with all members in their new assignment or all in their old one. Another change,
   which cannot be cancelled, undoes a change; a worker that fails in the undoing change is
   restarted, and gets no more work if it fails again.
4. No worker starts its new role while another member may still hold its old resources. A lost
   worker holds none, and a worker that returns has started nothing.
5. A lost worker keeps its assignment by name. While an engine has GPUs of other workers, all of
   these workers change together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

from libra import facts


class Role(StrEnum):
    """Use of a worker's GPUs; ``lent``: by the engine of another worker of its node."""

    ROLLOUT = "rollout"
    TRAIN = "train"
    LENT = "lent"


class Stage(StrEnum):
    """Stage of a change; `RESUPPLIED` is the last."""

    DRAINING = "draining"
    SLEEPING = "sleeping"
    TAKING_UP = "taking_up"
    RESUPPLIED = "resupplied"


class Assignment(NamedTuple):
    """A role; for an engine its tensor-parallel degree, else the worker's own number of GPUs."""

    role: Role
    tp: int = 1

    def __str__(self) -> str:
        return f"{self.role} tp={self.tp}"


Moves = Mapping[str, tuple[Assignment, Assignment]]


class Refuse(NamedTuple):
    reason: str


class Withdraw(NamedTuple):
    worker: str
    generation: int


class Perform(NamedTuple):
    """Carry out one stage of a worker's change; its engine then has the slots of ``slots_of``."""

    worker: str
    generation: int
    stage: Stage
    assignment: Assignment
    slots_of: tuple[str, ...] = ()


class Supply(NamedTuple):
    """The worker is in its role and takes tasks; its engine has the slots of ``slots_of``."""

    worker: str
    generation: int
    assignment: Assignment
    slots_of: tuple[str, ...] = ()


class Ended(NamedTuple):
    generation: int
    moves: Moves


RoleCommand = (
    Refuse | Withdraw | Perform | Supply | Ended
    | facts.RoleMemberFailed | facts.RoleChangeStarted | facts.RoleChangeCancelled | facts.RoleChangeFailed
)  # fmt: skip
_NEXT = {Stage.DRAINING: Stage.SLEEPING, Stage.SLEEPING: Stage.TAKING_UP, Stage.TAKING_UP: Stage.RESUPPLIED}


@dataclass(slots=True)
class Member:
    base: Assignment  # what it was started for
    node: str  # its machine
    settled: Assignment  # to which it returns until a change has ended
    bond: frozenset[str] = frozenset()  # workers that share one engine's GPUs
    present: bool = True
    generation: int = 0  # of its last change
    failures: int = 0  # in a row to return to its old role


@dataclass(slots=True)
class Change:
    """A change that has not ended; a ``final`` change is not undone and may lose members."""

    generation: int
    moves: dict[str, tuple[Assignment, Assignment]]
    stage: Stage
    bonds: dict[str, frozenset[str]]  # of every member, once it has ended
    final: bool = False
    undoes: int | None = None
    done: set[str] = field(default_factory=set)
    broken: set[str] = field(default_factory=set)  # failed, until it joins again


class Roles:
    def __init__(self) -> None:
        self.members: dict[str, Member] = {}
        self.changes: dict[int, Change] = {}
        self.generation = 0

    def handle(self, event: facts.RoleStage | facts.RoleStageFailed) -> list[RoleCommand]:
        if isinstance(event, facts.RoleStage):
            return self._stage_done(event.worker, event.generation, event.stage)
        return self._failed(event.worker, event.generation, event.detail)

    def change_of(self, worker: str) -> Change | None:
        return next((change for change in self.changes.values() if worker in change.moves), None)

    def rows(self) -> list[dict[str, Any]]:
        """A row of JSON values for each worker."""
        found = []
        for name, member in sorted(self.members.items()):
            change = self.change_of(name)
            has = member.settled if change is None else change.moves[name][1]
            stage = str(Stage.RESUPPLIED if change is None else change.stage) if member.present else "lost"
            number = member.generation if change is None else change.generation
            row = {"worker": name, "role": str(has.role), "tp": has.tp, "stage": stage, "generation": number}
            bond = member.bond if change is None else change.bonds[name]
            row["shares_with"] = sorted(bond - {name})
            found.append(row | {"from_role": str(member.settled.role), "from_tp": member.settled.tp})
        return found

    def request(self, targets: Mapping[str, Assignment], reason: str = "asked for") -> list[RoleCommand]:
        """Begin a change to these assignments by worker name; other workers keep theirs."""
        if unknown := [name for name in targets if name not in self.members]:
            known = ", ".join(sorted(self.members)) or "none"
            return [Refuse(f"worker {unknown[0]!r} cannot change roles here; workers that can: {known}")]
        wanted = {name: target for name, target in targets.items() if self.members[name].settled != target}
        busy = next((change for change in map(self.change_of, targets) if change is not None), None)
        if busy is not None:
            why = f"change {busy.generation} is {busy.stage}; wait until it has ended, or cancel it"
            return [Refuse(f"{', '.join(busy.moves)}: {why}")]
        to_base = all(target == self.members[name].base for name, target in wanted.items())
        if (refusal := self._refusal(targets, wanted, to_base)) is not None:
            return [Refuse(refusal)]
        lends = any(target.role is Role.LENT for target in wanted.values())
        bond = frozenset(wanted) if lends else frozenset[str]()
        absent = any(not self.members[name].present for name in wanted)
        return self._begin(wanted, reason, bonds=dict.fromkeys(wanted, bond), final=absent)

    def _refusal(
        self, targets: Mapping[str, Assignment], wanted: Mapping[str, Assignment], to_base: bool
    ) -> str | None:
        if not wanted:
            return f"{', '.join(targets) or 'no worker'}: nothing changes"
        members = {name: self.members[name] for name in wanted}
        for name, member in members.items():
            if left := sorted(member.bond - wanted.keys()):
                return f"{name} shares one engine's GPUs with {', '.join(left)}; name all of them in one change"
        absent = [name for name, member in members.items() if not member.present]
        if absent and not (to_base and len(absent) < len(members)):
            return f"{', '.join(absent)}: not in the cluster now; wait until it is back"
        lent = [name for name, target in wanted.items() if target.role is Role.LENT]
        leaders = [name for name in wanted if name not in lent]
        if lent and (len(leaders) != 1 or wanted[leaders[0]].role is not Role.ROLLOUT):
            return f"{', '.join(lent)} lent: one other worker of the same change must take the GPUs as rollout, got {leaders}"
        if lent and len(nodes := {member.node for member in members.values()}) > 1:
            return f"{', '.join(wanted)}: GPUs are lent within one node, these are on {', '.join(sorted(nodes))}"
        for name, target in wanted.items():
            own = members[name].base.tp
            allowed = sum(member.base.tp for member in members.values()) if lent and name not in lent else own
            if target.tp != allowed:
                return f"{name}: {target} is not possible, tp={allowed} is: it has {own} GPUs of its own" + (
                    f", and {', '.join(lent)} lent" if lent and name not in lent else ""
                )
        return None

    def cancel(self, generation: int) -> list[RoleCommand]:
        change = self.changes.get(generation)
        if change is None:
            going = ", ".join(map(str, self.changes)) or "none"
            return [Refuse(f"change {generation} is not in progress; in progress: {going}")]
        if change.final:
            return [Refuse(f"change {generation} returns workers to their old assignments, and cannot be cancelled")]
        return self._undo(change, "cancelled", cancelled=True)

    def announce(self, worker: str, base: Assignment, node: str = "") -> list[RoleCommand]:
        """A worker that can change roles has joined, started for ``base``."""
        member = self.members.get(worker)
        if member is None:
            self.members[worker] = Member(base, node, base, generation=self.generation)
            return []
        # Its old process has ended, in whichever order reports come.
        commands = self.lose(worker) if member.present else []
        member.present, member.base, member.node = True, base, node
        change = self.change_of(worker)
        if change is None:
            targets, bonds, at = {worker: member.settled}, {worker: member.bond}, Stage.TAKING_UP
            return [*commands, *self._begin(targets, f"{worker} came back", bonds=bonds, at=at, final=True)]
        # It was lost in a change that is being undone: it is asleep as the others are, or will be.
        change.broken.discard(worker)
        if change.stage is Stage.TAKING_UP:
            change.done.discard(worker)
            commands.append(self._perform(change, worker))
        return commands

    def lose(self, worker: str) -> list[RoleCommand]:
        member = self.members.get(worker)
        if member is None or not member.present:
            return []
        member.present = False
        change = self.change_of(worker)
        if change is None:
            return []
        if not change.final:
            return self._undo(change, f"{worker} left the cluster")
        change.done.add(worker)
        return self._go_on(change)

    def _stage_done(self, worker: str, generation: int, stage: str) -> list[RoleCommand]:
        change = self.changes.get(generation)
        if change is None or stage != change.stage or worker not in change.moves.keys() - change.done - change.broken:
            return []
        change.done.add(worker)
        return self._go_on(change)

    def _failed(self, worker: str, generation: int, detail: str) -> list[RoleCommand]:
        member, change = self.members.get(worker), self.change_of(worker)
        if member is None or not member.present:
            return []
        if change is None:
            if generation != member.generation or member.settled == member.base:
                return []
            return self._to_base(worker, detail)
        if change.generation != generation or worker in change.broken:
            return []
        if not change.final:
            return self._undo(change, f"{worker}: {detail}")
        if change.undoes is None and any(to != self.members[name].base for name, (_, to) in change.moves.items()):
            # It returned and could not start its assignment: fall back to its base.
            del self.changes[generation]
            return [facts.RoleChangeFailed(generation, detail), *self._to_base(worker, detail)]
        change.broken.add(worker)
        change.done.discard(worker)
        member.failures += 1
        if member.failures == 1:  # it may hold GPUs until it is lost
            return [facts.RoleMemberFailed(worker, detail, restarts=True)]
        member.present = False
        change.done.add(worker)
        return [facts.RoleMemberFailed(worker, detail, restarts=False), *self._go_on(change)]

    def _to_base(self, worker: str, reason: str) -> list[RoleCommand]:
        names = sorted(self.members[worker].bond | {worker})
        targets = {name: self.members[name].base for name in names}
        for name in names:  # also a partner that is changing
            if (change := self.change_of(name)) is not None:
                del self.changes[change.generation]
        return self._begin(targets, reason, bonds=dict.fromkeys(names, frozenset()), final=True)

    def _begin(
        self,
        targets: Mapping[str, Assignment],
        reason: str,
        *,
        bonds: dict[str, frozenset[str]],
        at: Stage = Stage.DRAINING,
        final: bool = False,
        undoes: int | None = None,
    ) -> list[RoleCommand]:
        self.generation += 1
        now = {name: self.members[name].settled for name in targets}
        moves = {name: (now[name], target) for name, target in targets.items()}
        change = Change(self.generation, moves, at, bonds, final, undoes)
        self.changes[self.generation] = change
        change.done = {name for name in moves if not self.members[name].present}
        wanted = {name: {"role": str(to.role), "tp": to.tp} for name, to in targets.items()}
        commands: list[RoleCommand] = [facts.RoleChangeStarted(change.generation, wanted, reason, undoes)]
        commands += [Withdraw(name, change.generation) for name in moves if name not in change.done]
        return [*commands, *self._perform_all(change), *self._go_on(change)]

    def _undo(self, change: Change, detail: str, *, cancelled: bool = False) -> list[RoleCommand]:
        """Return every member in a new change, so that late reports of this change are ignored."""
        del self.changes[change.generation]
        at = Stage.TAKING_UP if change.stage is Stage.DRAINING else Stage.SLEEPING
        old = {name: before for name, (before, _) in change.moves.items()}
        bonds = {name: self.members[name].bond for name in old}
        number = change.generation
        undone = facts.RoleChangeCancelled(number) if cancelled else facts.RoleChangeFailed(number, detail)
        return [undone, *self._begin(old, detail, bonds=bonds, at=at, final=True, undoes=number)]

    def _perform(self, change: Change, name: str) -> Perform:
        return Perform(name, change.generation, change.stage, change.moves[name][1], self._slots_of(change, name))

    def _perform_all(self, change: Change) -> list[RoleCommand]:
        return [self._perform(change, name) for name in change.moves if name not in change.done]

    @staticmethod
    def _slots_of(change: Change, name: str) -> tuple[str, ...]:
        return tuple(sorted(change.bonds[name] | {name})) if change.moves[name][1].role is Role.ROLLOUT else ()

    def _go_on(self, change: Change) -> list[RoleCommand]:
        commands: list[RoleCommand] = []
        while change.done >= change.moves.keys():
            change.stage = _NEXT[change.stage]
            if change.stage is Stage.RESUPPLIED:
                return [*commands, *self._end(change)]
            change.done = {name for name in change.moves if not self.members[name].present}
            commands += self._perform_all(change)
        return commands

    def _end(self, change: Change) -> list[RoleCommand]:
        del self.changes[change.generation]
        commands: list[RoleCommand] = []
        for name, (_, target) in change.moves.items():
            member = self.members[name]
            member.settled, member.bond, member.generation = target, change.bonds[name], change.generation
            if member.present:
                member.failures = 0
                commands.append(Supply(name, change.generation, target, self._slots_of(change, name)))
        return [*commands, Ended(change.generation, change.moves)]

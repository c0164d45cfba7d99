"""The policy objects of one run, and the facts each receives: the same in scheduler and replay."""

from __future__ import annotations

from dataclasses import dataclass

from libra import facts, keys
from libra.facts import Command, Fact
from libra.policy.admission import Admission
from libra.policy.one_version import OneVersion
from libra.policy.ordering import Ordering
from libra.policy.tail import Tail
from libra.types import Phase

DECIDED = frozenset({
    facts.TrajectoryParked, facts.QuantumFinished, facts.QuantumContinued, facts.HomeForgotten, facts.HomeChanged,
    facts.PromptsNamed, facts.TrajectoryEnded, facts.WorkerCapacity, facts.WorkerWithdrawn, facts.BoundariesSet,
    facts.VersionPublished, facts.QuantumDispatched,
})  # fmt: skip
"""Facts for ordering and dispatcher; the dispatcher does not receive `QuantumDispatched`."""
OF_THE_TAIL = frozenset({
    facts.RoleMemberKnown, facts.RoleChangeStarted, facts.RoleChanged, facts.RoleRestored, facts.TurnRefused,
})  # fmt: skip
"""Facts that only the tail receives."""


@dataclass(slots=True)
class RunPolicies:
    """The ordering, staleness bound and role switches of a run, and `OneVersion` if it is used."""

    policy: Ordering
    admission: Admission
    tail: Tail
    one: OneVersion | None

    def tell(self, fact: Fact) -> tuple[Command, ...] | None:
        """The commands that answer a fact; None if no policy object receives its kind."""
        self.tail.handle(fact)
        answers = self._decided(fact) if type(fact) in DECIDED else self.admission.handle(fact)
        if turns := self.tail.look():
            return (*(answers or ()), *turns)
        if answers is None and self.tail.settings is not None and type(fact) in OF_THE_TAIL:
            return ()
        return answers

    def _decided(self, fact: Fact) -> tuple[Command, ...]:
        if type(fact) is facts.QuantumDispatched and fact.phase is Phase.ROLLOUT:
            parsed = keys.parse(fact.key)
            if parsed is not None and parsed.split == "train":
                self.admission.generation_started(parsed.indices[0], parsed.indices[1], self.admission.version)
        answers: tuple[Command, ...] = self.policy.handle(fact)
        if self.one is not None:
            answers = (*answers, *self.one.handle(fact))
        if type(fact) is facts.VersionPublished:
            answers = (*answers, *self.admission.version_published(fact.version))
        return answers

    def snapshot(self, family: str) -> facts.PolicySnapshot:
        versions = {} if self.one is None else self.one.snapshot()
        state = (self.policy.snapshot(), self.admission.snapshot(), self.tail.snapshot(), versions)
        return facts.PolicySnapshot(self.policy.name, family, *state)

    def restore(self, snapshot: facts.PolicySnapshot) -> None:
        """Take the state of ``snapshot``; KeyError, TypeError or ValueError if unreadable."""
        self.policy.restore(snapshot.order)
        self.admission.restore(snapshot.admission)
        self.tail.restore(snapshot.turning)
        self.one = OneVersion() if snapshot.versions else None
        if self.one is not None:
            self.one.restore(snapshot.versions)

"""The policy objects of one epoch of a log that is replayed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from libra import facts, keys
from libra.errors import StoreError
from libra.facts import (
    Command,
    Fact,
    Priority,
)
from libra.policy.admission import Admission, CommittedGroup
from libra.policy.dispatcher import Dispatcher
from libra.policy.leases.resources import Revoke
from libra.policy.one_version import OneVersion
from libra.policy.ordering import ORDERINGS, OnlineLearner, Ordering
from libra.policy.placements import Place
from libra.policy.tail import Tail
from libra.types import Phase

_RECEIVED = (
    facts.TrajectoryParked, facts.QuantumFinished, facts.QuantumContinued, facts.HomeForgotten, facts.HomeChanged,
    facts.PromptsNamed, facts.TrajectoryEnded, facts.WorkerCapacity, facts.WorkerWithdrawn, facts.BoundariesSet,
)  # fmt: skip
"""Facts that dispatcher and ordering receive as they are."""
_OF_THE_TAIL = (
    facts.RoleMemberKnown, facts.RoleChangeStarted, facts.RoleChanged, facts.RoleRestored, facts.TurnRefused,
)  # fmt: skip
"""Facts that only the tail receives."""

BlankOrdering = Callable[[str], Ordering]
"""Makes an ordering by the name that a log gives it, to be restored; KeyError for an unknown name."""


class ReplayedObjects:
    """The policy objects of one epoch, and the priorities they gave."""

    def __init__(
        self, line: int, policy: str, eta: int, groups_per_batch: int, family: str, blank: BlankOrdering
    ) -> None:
        try:
            self.ordering: Ordering = blank(policy)
        except KeyError:
            raise StoreError(
                f"line {line}: decisions of policy {policy!r}; this Libra has {', '.join(ORDERINGS)}; "
                "replay it with the Libra that wrote it"
            ) from None
        self.admission = Admission(eta, groups_per_batch)
        self.tail = Tail(self.admission)
        self.family = family
        self.places: dict[str, Priority] = {}
        self.dispatched: set[str] = set()  # since they were last parked
        self.dispatcher: Dispatcher | None = None
        self.one: OneVersion | None = None
        self._placed: deque[Place] = deque()
        self._at_s = 0.0  # of the last lease that was granted
        self._lease: facts.LeaseGranted | None = None
        self._revoked: deque[Revoke] = deque()

    def restore(self, line: int, snapshot: facts.PolicySnapshot) -> None:
        try:
            self.ordering.restore(snapshot.order)
            self.admission.restore(snapshot.admission)
            self.tail.restore(snapshot.turning)
            self.one = OneVersion() if snapshot.versions else None
            if self.one is not None:
                self.one.restore(snapshot.versions)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise StoreError(
                f"line {line}: this policy_snapshot cannot be read: {type(error).__name__}: {error}"
            ) from error

        if self.dispatcher is not None and self.one is not None:
            self.dispatcher.allowed = self.one.may

    def tell(self, line: int, fact: Fact) -> tuple[Command, ...] | None:
        """Their answers to a fact; None if they do not receive this kind."""
        self.tail.handle(fact)
        answers, turns = self._answers(line, fact), self.tail.look()
        if answers is None and not turns and (self.tail.settings is None or not isinstance(fact, _OF_THE_TAIL)):
            return None
        return (*(answers or ()), *turns)

    def _answers(self, line: int, fact: Fact) -> tuple[Command, ...] | None:
        match fact:
            case facts.VersionPublished(version=version):
                return (*self._handle(fact), *self.admission.version_published(version))
            case facts.PolicyLearned():
                if isinstance(self.ordering, OnlineLearner):
                    self.ordering.learn()
                return ()
            case facts.QuantumLost(key=key) | facts.QuantumGivenBack(key=key):
                if self.dispatcher is not None:
                    self.dispatcher.stopped(key)
                return ()
            case facts.PlacementVoid(key=key, phase=phase):
                if self.dispatcher is not None:
                    if not self._placed:
                        self._dispatch(self.dispatcher, phase)
                    if self._placed:
                        self._placed.popleft()
                    self.dispatcher.stopped(key)
                    self._revoked = deque(each for each in self._revoked if each.holder != key)
                return ()
            case facts.QuantumDispatched(key=key, phase=phase):
                parsed = read_key(line, key)
                if parsed.split == "train" and phase is Phase.ROLLOUT:
                    iteration, group, _ = parsed.indices
                    self.admission.generation_started(iteration, group, self.admission.version)
                return self._decided(fact)
        return self._handle(fact) if isinstance(fact, _RECEIVED) else self._admitted(fact)

    def _admitted(self, fact: Fact) -> tuple[Command, ...] | None:
        """Answers about gates, batches and waves; None if the fact is about none of them."""
        match fact:
            case facts.GroupCommitted(split=split, iteration=iteration, group=group, oldest_version=oldest):
                return (
                    () if split != "train" else self.admission.group_committed(CommittedGroup(iteration, group, oldest))
                )
            case facts.GateParked(iteration=iteration):
                return self.admission.gate_parked(iteration)
            case facts.BatchParked(batch=batch):
                return self.admission.batch_parked(batch)
            case facts.WaveParked(batch=batch, wave=wave):
                return self.admission.wave_parked(batch, wave)
            case facts.StepFinished(step=step) if fact.beside:
                return self.admission.step_ended(step)
            case facts.WaveTrained(batch=batch, wave=wave):
                return self.admission.wave_trained(batch, wave)
            case facts.StepMeasured():
                return self.admission.steps_measured(fact)
            case facts.ToolsDeclared() | facts.ToolCapacity() | facts.ActionRequested():
                if self.dispatcher is not None:
                    self.dispatcher.handle(fact)
                return ()
            case facts.LeaseGranted(at_s=at_s):
                self._at_s, self._lease = at_s, fact
                return ()
        return None

    def _handle(self, fact: Fact) -> tuple[Command, ...]:
        if self.dispatcher is not None:
            self.dispatcher.handle(fact)
        return self._decided(fact)

    def _decided(self, fact: Fact) -> tuple[Command, ...]:
        """Answers of the ordering, and about the versions of engines."""
        answers: tuple[Command, ...] = self.ordering.handle(fact)
        answers = answers if self.one is None else (*answers, *self.one.handle(fact))
        if self.dispatcher is not None:
            self.dispatcher.apply(answers)
        return answers

    def placed(self, line: int, fact: facts.QuantumDispatched) -> str:
        """How a dispatch differs from the dispatcher's choice now; empty if the log does not have all of the dispatcher's
        input."""
        if not fact.alone:
            self.dispatcher = None
        if self.dispatcher is None:
            return ""
        if not self._placed:
            if self._revoked:
                return self._differs(
                    f"{self._revoked[0].holder} is revoked now ({self._revoked[0].reason}), and was not"
                )
            self._dispatch(self.dispatcher, fact.phase)
        if not self._placed:
            return f"{fact.key} was given a slot of {fact.worker}; now no trajectory gets one"
        place = self._placed.popleft()
        if (place.key, str(place.phase), place.worker, place.reason) == (
            fact.key,
            fact.phase,
            fact.worker,
            fact.reason,
        ):
            logged, self._lease = self._lease, None
            if place.lease is None or logged is None or place.lease.cores == logged.cores:
                return ""
            return f"{fact.key} was leased {logged.cores} cores; now it gets {place.lease.cores}"
        return self._differs(
            f"{fact.key} was given a {fact.phase} slot of {fact.worker} ({fact.reason}); now {place.key} gets a "
            f"{place.phase} slot of {place.worker} ({place.reason})"
        )

    def revoked(self, fact: facts.LeaseRevoked) -> str:
        """How a revocation differs from the lease table's choice now; empty as of `placed`."""
        if not fact.alone:
            self.dispatcher = None
        if self.dispatcher is None:
            return ""
        if not self._revoked:
            self._at_s = fact.at_s
            self._dispatch(self.dispatcher, Phase.TOOL)
        if not self._revoked:
            return self._differs(f"the lease of {fact.key} was revoked ({fact.reason}); now none is")
        now = self._revoked.popleft()
        if (now.holder, now.worker, now.ran_s, now.reason) == (fact.key, fact.worker, fact.ran_s, fact.reason):
            return ""
        return self._differs(
            f"the lease of {fact.key} was revoked on {fact.worker} ({fact.reason}); now that of {now.holder} on {now.worker} "
            f"({now.reason})"
        )

    def _dispatch(self, dispatcher: Dispatcher, phase: Phase) -> None:
        self._placed.extend(dispatcher.dispatch(phase, self._at_s))
        self._revoked.extend(dispatcher.revocations())

    def _differs(self, text: str) -> str:
        self.dispatcher = None  # later differences would only follow from this one
        return text


def read_key(line: int, key: str) -> keys.Key:
    parsed = keys.parse(key)
    if parsed is None or len(parsed.indices) != 3:
        raise StoreError(f"line {line}: {key!r} is not the key of a trajectory, as in trajectory-train-3-0-7-e0-demo")
    return parsed

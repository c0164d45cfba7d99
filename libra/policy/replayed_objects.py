"""The policy objects of one epoch of a log that is replayed, and how its events become the messages they receive."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import msgspec

from libra import events, keys
from libra.errors import StoreError
from libra.policy.admission import Admission, CommittedGroup
from libra.policy.dispatcher import Dispatcher
from libra.policy.leases.resources import Revoke
from libra.policy.messages import (
    ActionRequested,
    BoundariesSet,
    Command,
    Event,
    HomeForgotten,
    KVTransferred,
    Place,
    Priority,
    QuantumFinished,
    QuantumStarted,
    ToolCapacity,
    ToolNeeds,
    ToolsDeclared,
    TrajectoryEnded,
    TrajectoryParked,
    VersionPublished,
    WorkerJoined,
    WorkerLeft,
    groups_named,
)
from libra.policy.one_version import OneVersion
from libra.policy.ordering import ORDERINGS, OnlineLearner, Ordering
from libra.policy.tail import RoleBegins, RoleKnown, RoleTaken, Tail, TailEvent, TurnRefused, WaveDone, price_s
from libra.policy.way_choice import MeasuredStep
from libra.types import Phase, tool_outcome

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
        self._lease: events.LeaseGranted | None = None
        self._revoked: deque[Revoke] = deque()

    def restore(self, line: int, snapshot: events.PolicySnapshot) -> None:
        try:
            self.ordering.restore(snapshot.order)
            self.admission.restore(snapshot.admission)
            self.tail.restore(snapshot.turning)
            self.one = OneVersion.restored(snapshot.versions) if snapshot.versions else None
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise StoreError(
                f"line {line}: this policy_snapshot cannot be read: {type(error).__name__}: {error}"
            ) from error

        if self.dispatcher is not None and self.one is not None:
            self.dispatcher.allowed = self.one.may

    def tell(self, line: int, event: events.Event) -> tuple[Command, ...] | None:
        """Their answers to an event; None if they do not receive this kind."""
        happened = () if self.tail.settings is None else tail_events(event)
        for each in happened:
            self.tail.handle(each)
        answers = self._answers(line, event)
        turns = self.tail.look()
        return (*(answers or ()), *turns) if turns or happened else answers

    def _answers(self, line: int, event: events.Event) -> tuple[Command, ...] | None:
        match event:
            case events.VersionPublished(version=version):
                return (*self._handle(VersionPublished(version)), *self.admission.version_published(version))
            case events.PolicyLearned():
                if isinstance(self.ordering, OnlineLearner):
                    self.ordering.learn()
                return ()
            case events.QuantumLost(key=key) | events.QuantumGivenBack(key=key):
                if self.dispatcher is not None:
                    self.dispatcher.stopped(key)
                return ()
            case events.PlacementVoid(key=key, phase=phase):
                if self.dispatcher is not None:
                    if not self._placed:
                        self._dispatch(self.dispatcher, read_phase(line, phase))
                    if self._placed:
                        self._placed.popleft()
                    self.dispatcher.stopped(key)
                    self._revoked = deque(each for each in self._revoked if each.holder != key)
                return ()
            case events.QuantumDispatched(key=key, phase=phase, worker=worker):
                parsed = read_key(line, key)
                if parsed.split == "train" and phase == Phase.ROLLOUT:
                    iteration, group, _ = parsed.indices
                    self.admission.generation_started(iteration, group, self.admission.version)
                started = QuantumStarted(key, read_phase(line, phase), worker)
                self.tail.handle(started)
                answers = self._decided(started)
                if self.dispatcher is not None:
                    self.dispatcher.apply(answers)
                return answers
        received = policy_event(line, event, self.family)
        return self._admitted(event) if received is None else self._handle(received)

    def _admitted(self, event: events.Event) -> tuple[Command, ...] | None:
        """Answers about gates, batches and waves; None if the event is about none of them."""
        match event:
            case events.GroupCommitted(split=split, iteration=iteration, group=group, oldest_version=oldest):
                if split != "train":
                    return ()
                self.tail.group_committed()
                return self.admission.group_committed(CommittedGroup(iteration, group, oldest))
            case events.GateParked(iteration=iteration):
                return self.admission.gate_parked(iteration)
            case events.BatchParked(batch=batch):
                return self.admission.batch_parked(batch)
            case events.WaveParked(batch=batch, wave=wave):
                return self.admission.wave_parked(batch, wave)
            case events.StepFinished(step=step) if event.beside:
                return self.admission.step_ended(step)
            case events.WaveTrained(batch=batch, wave=wave):
                return self.admission.wave_trained(batch, wave)
            case events.StepMeasured():
                return self.admission.steps_measured(
                    MeasuredStep(**{name: getattr(event, name) for name in MeasuredStep.__struct_fields__})
                )
        return self._leases(event)

    def _leases(self, event: events.Event) -> tuple[Command, ...] | None:
        """Follow what actions declare and hold; None if the event is about none of it."""
        match event:
            case events.ToolsDeclared() | events.ToolCapacity() | events.ActionRequested():
                if self.dispatcher is not None:
                    self.dispatcher.handle(_declared(event))
                return ()
            case events.LeaseGranted(at_s=at_s):
                self._at_s, self._lease = at_s, event
                return ()
        return None

    def _handle(self, event: Event) -> tuple[Command, ...]:
        if self.dispatcher is not None:
            self.dispatcher.handle(event)
        self.tail.handle(event)
        answers = self._decided(event)
        if self.dispatcher is not None:
            self.dispatcher.apply(answers)
        return answers

    def _decided(self, event: Event) -> tuple[Command, ...]:
        """Answers of the ordering, and about the versions of engines."""
        answers = self.ordering.handle(event)
        return answers if self.one is None else (*answers, *self.one.handle(event))

    def placed(self, line: int, event: events.QuantumDispatched) -> str:
        """How a dispatch differs from the dispatcher's choice now; empty if the log does not have all of the dispatcher's
        input."""
        if not event.alone:
            self.dispatcher = None
        if self.dispatcher is None:
            return ""
        if not self._placed:
            if self._revoked:
                return self._differs(
                    f"{self._revoked[0].holder} is revoked now ({self._revoked[0].reason}), and was not"
                )
            self._dispatch(self.dispatcher, read_phase(line, event.phase))
        if not self._placed:
            return f"{event.key} was given a slot of {event.worker}; now no trajectory gets one"
        place = self._placed.popleft()
        if (place.key, str(place.phase), place.worker, place.reason) == (
            event.key,
            event.phase,
            event.worker,
            event.reason,
        ):
            logged, self._lease = self._lease, None
            if place.lease is None or logged is None or place.lease.cores == logged.cores:
                return ""
            return f"{event.key} was leased {logged.cores} cores; now it gets {place.lease.cores}"
        return self._differs(
            f"{event.key} was given a {event.phase} slot of {event.worker} ({event.reason}); now {place.key} gets a "
            f"{place.phase} slot of {place.worker} ({place.reason})"
        )

    def revoked(self, event: events.LeaseRevoked) -> str:
        """How a revocation differs from the lease table's choice now; empty as of `placed`."""
        if not event.alone:
            self.dispatcher = None
        if self.dispatcher is None:
            return ""
        if not self._revoked:
            self._at_s = event.at_s
            self._dispatch(self.dispatcher, Phase.TOOL)
        if not self._revoked:
            return self._differs(f"the lease of {event.key} was revoked ({event.reason}); now none is")
        now = self._revoked.popleft()
        if (now.holder, now.worker, now.ran_s, now.reason) == (event.key, event.worker, event.ran_s, event.reason):
            return ""
        return self._differs(
            f"the lease of {event.key} was revoked on {event.worker} ({event.reason}); now that of {now.holder} on {now.worker} "
            f"({now.reason})"
        )

    def _dispatch(self, dispatcher: Dispatcher, phase: Phase) -> None:
        self._placed.extend(dispatcher.dispatch(phase, self._at_s))
        self._revoked.extend(dispatcher.revocations())

    def _differs(self, text: str) -> str:
        self.dispatcher = None  # later differences would only follow from this one
        return text


def _declared(
    event: events.ToolsDeclared | events.ToolCapacity | events.ActionRequested,
) -> ToolsDeclared | ToolCapacity | ActionRequested:
    """What the dispatcher receives for a line about tools with resources."""
    match event:
        case events.ToolsDeclared(tools=tools, quotas=quotas):
            return ToolsDeclared({name: msgspec.convert(needs, ToolNeeds) for name, needs in tools.items()}, quotas)
        case events.ToolCapacity():
            return ToolCapacity(event.worker, event.cores, event.memory_bytes, event.gpus)
        case events.ActionRequested(key=key, tools=tools):
            return ActionRequested(key, tools)


def policy_event(line: int, event: events.Event, family: str) -> Event | None:
    """The event that policy objects receive for a line; None: none."""
    match event:
        case events.TrajectoryParked(key=key, phase=phase, quanta=quanta, context_tokens=context):
            parsed = read_key(line, key)
            group = f"{parsed.split}-{parsed.indices[0]}-{parsed.indices[1]}"
            return TrajectoryParked(key, parsed.indices[0], read_phase(line, phase), quanta, group, family, context)
        case events.QuantumFinished(key=key, phase=phase, tokens=tokens, tool=tool, status=status):
            took = event.latency_s, event.payload_tokens, event.tools_s
            return QuantumFinished(key, read_phase(line, phase), tokens, tool, tool_outcome(status), *took)
        case events.QuantumContinued(key=key, phase=phase, worker=worker):
            return QuantumStarted(key, read_phase(line, phase), worker)
        case events.HomeForgotten(key=key):
            return HomeForgotten(key)
        case events.HomeChanged(num_bytes=num_bytes, took_s=took_s):
            return KVTransferred(num_bytes, took_s) if num_bytes else None
        case events.PromptsNamed(iteration=iteration, prompts=prompts):
            return groups_named("train", iteration, prompts)
        case events.TrajectoryEnded(key=key, completed=completed):
            return TrajectoryEnded(key, completed)
        case events.WorkerCapacity():
            return WorkerJoined(**{name: getattr(event, name) for name in WorkerJoined.__struct_fields__})
        case events.WorkerWithdrawn(worker=worker):
            return WorkerLeft(worker)
        case events.BoundariesSet(boundaries=boundaries):
            return BoundariesSet(tuple((int(tp), float(tokens)) for tp, tokens in boundaries))
    return None


def read_phase(line: int, phase: str) -> Phase:
    if phase not in list(Phase):
        raise StoreError(f"line {line}: phase {phase!r}; it is one of {', '.join(Phase)}")
    return Phase(phase)


def read_key(line: int, key: str) -> keys.Key:
    parsed = keys.parse(key)
    if parsed is None or len(parsed.indices) != 3:
        raise StoreError(f"line {line}: {key!r} is not the key of a trajectory, as in trajectory-train-3-0-7-e0-demo")
    return parsed


def tail_events(event: events.Event) -> tuple[TailEvent, ...]:
    """What a run's tail receives for a line, besides the messages of `policy_event`."""
    match event:
        case events.WaveTrained(batch=batch, wave=wave, train_s=train_s, hybrids=hybrids):
            return (WaveDone(batch, wave, train_s, hybrids),)
        case events.RoleMemberKnown(worker=worker, tp=tp):
            return (RoleKnown(worker, tp),)
        case events.RoleChangeStarted(assignments=assignments):
            return tuple(RoleBegins(worker, has["role"]) for worker, has in assignments.items())
        case events.RoleChanged(worker=worker, to_role=role, stage_s=stage_s):
            return (RoleTaken(worker, role, price_s(stage_s)),)
        case events.RoleRestored(worker=worker, role=role):
            return (RoleTaken(worker, role, None),)
        case events.TurnRefused(worker=worker):
            return (TurnRefused(worker),)
    return ()

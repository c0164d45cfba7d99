"""Repeats a run's decisions from its event log, and compares them with the logged decisions.

Promises
--------
1. The policy objects receive the log's events in order, and nothing else.
2. Logged commands and replayed commands are matched one to one, late-reward decisions of batches
   included. Only the last event of an epoch may lack answers, because its writer died: `Told.cut`.
3. Every snapshot except an epoch's first is compared with the state of the objects.
4. A dispatch is compared with the last logged priority of its trajectory, and needs its own
   parking. If the log begins at the run's start and no other run shared the scheduler, the
   dispatcher's choices of trajectory and worker are also compared.
5. After a difference the replay continues; later differences may follow from the first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import zip_longest
from math import isclose
from typing import Any, NamedTuple

from libra import facts, keys
from libra.errors import StoreError
from libra.facts import Command, Fact, Priority, SetPriority, sentence
from libra.policy.admission import Admission
from libra.policy.dispatcher import Dispatcher
from libra.policy.late_rewards import WaitingGroup, settle
from libra.policy.leases.resources import Revoke
from libra.policy.ordering import ORDERINGS, OnlineLearner, Ordering, make_ordering
from libra.policy.phase_queue import Place
from libra.policy.run_policies import DECIDED, RunPolicies
from libra.policy.tail import Tail
from libra.policy.tool_fleet import ordered
from libra.types import Phase

NOISE_FRAC = 1e-7  # of numbers in snapshots: their last bits depend on the alignment of memory

_OF_THE_DISPATCHER = (
    facts.ToolsDeclared, facts.ToolCapacity, facts.ActionRequested, facts.QuantumLost, facts.QuantumGivenBack,
    facts.PlacementVoid,
)  # fmt: skip

BlankOrdering = Callable[[str], Ordering]  # by its name in a log; KeyError


class Logged(NamedTuple):
    """A command, its line number, and the trajectory's known priority before the command."""

    line: int
    command: Command
    before: Priority | None


@dataclass(slots=True)
class Told:
    """One event that the policy objects received, with the commands that answered it."""

    line: int  # in the log
    event: Fact
    now: tuple[Command, ...] = ()  # commands of the replay
    difference: str = ""  # from the commands in the log; empty if there is none
    logged: list[Logged] = field(default_factory=list)  # commands in the log
    cut: bool = False  # the log, or the epoch, ends before all of ``now`` was written

    def compared(self, *, last: bool = False) -> Told:
        """The same event, compared once all its commands are logged; ``last``: no event follows."""
        logged, now = tuple(entry.command for entry in self.logged), self.now
        self.cut = last and len(logged) < len(now)
        self.difference = self.difference or _difference(logged, now[: len(logged)] if self.cut else now)
        return self


def replay(lines: Iterable[tuple[int, Fact]], blank: BlankOrdering = make_ordering) -> Iterator[Told]:
    """Replay a log from ``run_started`` or a ``policy_snapshot``; yields each event received.

    StoreError if the log begins with neither, or has an unknown policy or key.
    """
    objects: _Objects | None = None
    waiting: Told | None = None
    fresh = False
    for line, event in lines:
        if isinstance(event, Command):
            if objects is None or waiting is None:
                logged = [Logged(line, event, None)]
                yield Told(line, event, difference=f"no event precedes it, yet {sentence(event)}", logged=logged)
            else:
                waiting.logged.append(objects.logged(line, event))
        elif isinstance(event, facts.RunStarted | facts.PolicySnapshot):
            if waiting is not None:
                yield waiting.compared(last=isinstance(event, facts.RunStarted))
                waiting = None
            if isinstance(event, facts.RunStarted):
                objects, fresh = _Objects(line, event.policy, blank, event), True
                objects.dispatcher = Dispatcher()
            elif objects is None or fresh:
                objects = objects or _Objects(line, event.policy, blank)
                objects.restored(line, event)
                fresh = False
            else:
                yield Told(line, event, difference=objects.unlike(line, event))
        elif objects is None:
            raise StoreError(
                f"line {line}: a replay begins at run_started or policy_snapshot, got {event.name}; is the log's head missing?"
            )
        elif (told := objects.answered(line, event)) is not None:
            if waiting is not None:
                yield waiting.compared()
            waiting, fresh = told, False
    if waiting is not None:
        yield waiting.compared(last=True)


def learned(lines: Iterable[tuple[int, Fact]], blank: BlankOrdering = make_ordering) -> dict[str, Any] | None:
    """A log's ordering at its end, without unfinished trajectories; None unless it learns."""
    objects: _Objects | None = None
    fresh = True
    for line, event in lines:
        if isinstance(event, facts.RunStarted):
            fresh = True  # a start that died before its first snapshot changes nothing
            objects = objects or _Objects(line, event.policy, blank, event)
        elif isinstance(event, facts.PolicySnapshot):
            if objects is None or fresh:
                objects = objects or _Objects(line, event.policy, blank)
                objects.restored(line, event)
            fresh = False
        elif objects is not None:
            objects.told(line, event)
    if objects is None or not isinstance(objects.policy, OnlineLearner):
        return None
    objects.policy.forget_live()
    return objects.policy.snapshot()


class _Objects(RunPolicies):
    def __init__(self, line: int, policy: str, blank: BlankOrdering, run: facts.RunStarted | None = None) -> None:
        try:
            ordering = blank(policy)
        except KeyError:
            raise StoreError(
                f"line {line}: decisions of policy {policy!r}; this Libra has {', '.join(ORDERINGS)}; "
                "replay it with the Libra that wrote it"
            ) from None
        admission = Admission(0, 1) if run is None else Admission(run.eta, run.groups_per_batch)
        super().__init__(ordering, admission, Tail(admission), None)
        self.dispatcher: Dispatcher | None = None
        self._places: dict[str, Priority] = {}
        self._dispatched: set[str] = set()  # since they were last parked
        self._placed: deque[Place] = deque()
        self._at_s = 0.0  # of the last lease that was granted
        self._lease: facts.LeaseGranted | None = None
        self._revoked: deque[Revoke] = deque()

    def restored(self, line: int, snapshot: facts.PolicySnapshot) -> None:
        with _readable(line):
            self.restore(snapshot)
        if self.dispatcher is not None and self.one is not None:
            self.dispatcher.allowed = self.one.may

    def unlike(self, line: int, snapshot: facts.PolicySnapshot) -> str:
        if snapshot.policy != self.policy.name:
            return f"a snapshot of policy {snapshot.policy!r}, now it is {self.policy.name!r}"
        admission = Admission(0, 1)
        with _readable(line):
            admission.restore(snapshot.admission)
        parts = (
            ("order", snapshot.order, self.policy.snapshot()),
            ("admission", admission.snapshot(), self.admission.snapshot()),
            ("turning", snapshot.turning, self.tail.snapshot()),
        )
        return next((text for part, then, now in parts if (text := _unlike(then, now, part))), "")

    def logged(self, line: int, command: Command) -> Logged:
        if not isinstance(command, SetPriority):
            return Logged(line, command, None)
        before = self._places.get(command.key)
        self._places[command.key] = command.priority
        return Logged(line, command, before)

    def answered(self, line: int, fact: Fact) -> Told | None:
        difference = ""
        match fact:
            case facts.LateRewardsTaken():
                return None if fact.awaited else Told(line, fact, difference=_late_difference(fact))
            case facts.ToolWorkersOrdered():
                if (order := ordered(fact)) != fact:
                    instead = "nothing" if order is None else f"{order.ordered} ({order.reason})"
                    difference = f"{fact.ordered} tool workers were ordered ({fact.reason}); now {instead}"
                return Told(line, fact, difference=difference)
            case facts.LeaseRevoked():
                return Told(line, fact, difference=self._revoked_as(fact))
            case facts.QuantumDispatched():
                difference = self._misplaced(fact) or self._placed_as(fact)
        now = self.told(line, fact)
        if now is None:
            return None
        match fact:
            case facts.TrajectoryParked(key=key):
                self._dispatched.discard(key)
            case facts.QuantumDispatched(key=key):
                self._dispatched.add(key)
            case facts.TrajectoryEnded(key=key):
                self._dispatched.discard(key)
                self._places.pop(key, None)
        return Told(line, fact, now, difference)

    def told(self, line: int, fact: Fact) -> tuple[Command, ...] | None:
        received = type(fact) in DECIDED
        match fact:
            case facts.PolicyLearned():
                if isinstance(self.policy, OnlineLearner):
                    self.policy.learn()
                return ()
            case facts.QuantumDispatched(key=key):
                parsed, received = keys.parse(key), False
                if parsed is None or len(parsed.indices) != 3:
                    raise StoreError(
                        f"line {line}: {key!r} is not the key of a trajectory, as in trajectory-train-3-0-7-e0-demo"
                    )
            case facts.LeaseGranted(at_s=at_s):
                self._at_s, self._lease = at_s, fact
                return ()
        if isinstance(fact, _OF_THE_DISPATCHER):
            if self.dispatcher is not None:
                self._followed(self.dispatcher, fact)
            return ()
        if self.dispatcher is not None and received:
            self.dispatcher.handle(fact)
        commands = self.tell(fact)
        if self.dispatcher is not None and commands:
            self.dispatcher.apply(commands)
        return commands

    def _followed(self, dispatcher: Dispatcher, fact: Fact) -> None:
        match fact:
            case facts.QuantumLost(key=key) | facts.QuantumGivenBack(key=key):
                dispatcher.stopped(key)
            case facts.PlacementVoid(key=key, phase=phase):
                if not self._placed:
                    self._dispatch(dispatcher, phase)
                if self._placed:
                    self._placed.popleft()
                dispatcher.stopped(key)
                self._revoked = deque(each for each in self._revoked if each.holder != key)
            case _:
                dispatcher.handle(fact)

    def _misplaced(self, event: facts.QuantumDispatched) -> str:
        if event.key in self._dispatched:
            return f"{event.key} was dispatched twice and not parked in between"
        place = self._places.get(event.key)
        if place is None or tuple(place) == event.priority:
            return ""
        return f"{event.key} was dispatched with priority {list(event.priority)}; the last one logged is {list(place)}"

    def _placed_as(self, fact: facts.QuantumDispatched) -> str:
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
        if (place.key, place.phase, place.worker, place.reason) == (fact.key, fact.phase, fact.worker, fact.reason):
            logged, self._lease = self._lease, None
            if place.lease is None or logged is None or place.lease.resources.cores == logged.cores:
                return ""
            return f"{fact.key} was leased {logged.cores} cores; now it gets {place.lease.resources.cores}"
        return self._differs(
            f"{fact.key} was given a {fact.phase} slot of {fact.worker} ({fact.reason}); now {place.key} gets a "
            f"{place.phase} slot of {place.worker} ({place.reason})"
        )

    def _revoked_as(self, fact: facts.LeaseRevoked) -> str:
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
            f"the lease of {fact.key} was revoked on {fact.worker} ({fact.reason}); now the lease of {now.holder} on {now.worker} "
            f"({now.reason})"
        )

    def _dispatch(self, dispatcher: Dispatcher, phase: Phase) -> None:
        self._placed.extend(dispatcher.dispatch(phase, self._at_s))
        self._revoked.extend(dispatcher.revocations())

    def _differs(self, text: str) -> str:
        self.dispatcher = None  # later differences would only follow from this one
        return text


@contextmanager
def _readable(line: int) -> Iterator[None]:
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise StoreError(
            f"line {line}: this policy_snapshot cannot be read: {type(error).__name__}: {error}"
        ) from error


def _late_difference(event: facts.LateRewardsTaken) -> str:
    groups = (WaitingGroup(group[0], group[1], group[2], group[3:]) for group in event.waited)
    now = settle(groups, event.batch, dict.fromkeys(event.came, 0.0), versions=event.versions)
    rewards = ((each.group, sample, each.delay) for each in now.arrivals for sample in each.rewards)
    arrived = tuple((group.iteration, group.group, sample, delay) for group, sample, delay in rewards)
    if (arrived, now.dropped) == (event.arrived, event.dropped):
        return ""
    return (
        f"batch {event.batch} took late rewards {list(event.arrived)} and dropped {list(event.dropped)}; now it takes "
        f"{list(arrived)} and drops {list(now.dropped)}"
    )


def _difference(logged: tuple[Command, ...], now: tuple[Command, ...]) -> str:
    for recorded, taken in zip_longest(logged, now):
        if recorded == taken:
            continue
        if recorded is None:
            return f"the log has no such command; now: {sentence(taken)}"
        if taken is None:
            return f"logged: {sentence(recorded)}; now there is none"
        names = recorded.__struct_fields__ if type(recorded) is type(taken) else ()
        differing = ", ".join(
            f"{name} was {_plain(getattr(recorded, name))}, now {_plain(getattr(taken, name))}"
            for name in names
            if getattr(recorded, name) != getattr(taken, name)
        )
        return f"logged: {sentence(recorded)}; now: {sentence(taken)}" + (f"; {differing}" if differing else "")
    return ""


def _unlike(recorded: object, now: object, path: str) -> str:
    pairs: Iterable[tuple[str, object, object]]
    if isinstance(recorded, dict) and isinstance(now, dict):
        names = sorted(recorded.keys() | now.keys(), key=str)
        pairs = ((f"{path}.{key}", recorded.get(key), now.get(key)) for key in names)
    elif isinstance(recorded, list | tuple) and isinstance(now, list | tuple) and len(recorded) == len(now):
        pairs = ((f"{path}[{i}]", a, b) for i, (a, b) in enumerate(zip(recorded, now, strict=True)))
    else:
        numbers = isinstance(recorded, float) and isinstance(now, float)
        if recorded == now or (numbers and isclose(recorded, now, rel_tol=NOISE_FRAC, abs_tol=NOISE_FRAC)):  # type: ignore[arg-type]
            return ""
        return f"snapshot, {path}: logged {recorded!s:.200}, now {now!s:.200}"
    return next((text for where, a, b in pairs if (text := _unlike(a, b, where))), "")


def _plain(value: object) -> object:
    return list(value) if isinstance(value, Priority) else value

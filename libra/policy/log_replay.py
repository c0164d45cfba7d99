"""Repeats a run's decisions from its event log, and compares them with those that were logged and carried out.

Promises
--------
1. The policy objects receive the events of the log, in its order, and nothing else.
2. Every command in the log is compared with one of the replay, and conversely. Only at the end of an epoch may answers to its
   last event be missing, because its writer died: `Told.cut`.
3. Every snapshot except the first of an epoch is compared with the present state of the objects.
4. A dispatch is compared with the priority that was last logged for its trajectory, and each needs a parking of its own. If the
   log has the run from its start and no other run shared the scheduler, the dispatcher's choices of trajectory and worker are
   repeated and compared too.
5. What a batch did about late rewards is compared with what it would do about the same ones.
6. After a difference the replay continues; later differences may follow from the first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from math import isclose
from typing import Any, NamedTuple

from libra import facts
from libra.errors import StoreError
from libra.facts import Command, Fact, Priority, SetPriority, sentence
from libra.policy.admission import Admission
from libra.policy.dispatcher import Dispatcher
from libra.policy.late import WaitingGroup, settle
from libra.policy.ordering import OnlineLearner, blank_ordering
from libra.policy.replayed_objects import BlankOrdering, ReplayedObjects
from libra.policy.tool_fleet import FleetFacts, ordered

NOISE_FRAC = 1e-7
"""Tolerance for numbers in snapshots: the last bits of sums of products depend on the alignment of memory in each process.
Commands are compared exactly, because the numbers they rest on are rounded first."""


class Logged(NamedTuple):
    """A command, its line number, and the priority of its trajectory before it (None: none yet, or unknown)."""

    line: int
    command: Command
    before: Priority | None


@dataclass(frozen=True, slots=True)
class Told:
    """One event that the policy objects received, with the commands that answered it.

    Attributes
    ----------
    line : int
        Its line in the log.
    event : libra.Fact
    logged : tuple of Logged
        The commands in the log.
    now : tuple of commands
        The commands of the replay.
    difference : str
        How they differ; empty if they do not.
    cut : bool
        The log, or the epoch, ends before all of ``now`` was written.
    """

    line: int
    event: Fact
    logged: tuple[Logged, ...]
    now: tuple[Command, ...]
    difference: str
    cut: bool = False


def replay(lines: Iterable[tuple[int, Fact]], blank: BlankOrdering = blank_ordering) -> Iterator[Told]:
    """Replay a log from ``run_started`` or a ``policy_snapshot`` on; yields each event that the policy objects received, in order.

    ``blank`` makes the orderings; the default knows those that ship.

    Raises StoreError if the log begins with neither, or has a policy or a key that this Libra does not know.
    """
    objects: ReplayedObjects | None = None
    waiting: _Answers | None = None
    fresh = False
    for line, event in lines:
        if isinstance(event, Command):
            if waiting is None:
                difference = f"no event precedes it, yet {sentence(event)}"
                yield Told(line, event, (Logged(line, event, None),), (), difference)
            else:
                waiting.add(line, event)
            continue
        if isinstance(event, facts.RunStarted | facts.PolicySnapshot):
            if waiting is not None:
                yield waiting.compared(last=isinstance(event, facts.RunStarted))
                waiting = None
            if isinstance(event, facts.RunStarted):
                objects, fresh = (
                    ReplayedObjects(line, event.policy, event.eta, event.groups_per_batch, event.family, blank),
                    True,
                )
                objects.dispatcher = Dispatcher()
            elif objects is None:
                objects = _begun(line, event, blank)
            elif fresh:
                objects.restore(line, event)
                fresh = False
            else:
                yield Told(line, event, (), (), _snapshot_difference(line, objects, event))
            continue
        if objects is None:
            raise StoreError(
                f"line {line}: a replay begins at run_started or policy_snapshot, got {event.name}; is the log's head missing?"
            )
        answers = _answers(line, event, objects)
        if answers is not None:
            if waiting is not None:
                yield waiting.compared()
            waiting, fresh = answers, False
    if waiting is not None:
        yield waiting.compared(last=True)


def learned(lines: Iterable[tuple[int, Fact]], blank: BlankOrdering = blank_ordering) -> dict[str, Any] | None:
    """State of a log's ordering at its end, without running trajectories: where a later start of the run begins.

    A snapshot for ``Ordering.restore``; None if the log has none, or its ordering does not learn. Raises as `replay`.
    """
    objects: ReplayedObjects | None = None
    fresh = False
    for line, event in lines:
        if isinstance(event, facts.RunStarted):
            fresh = True  # a start that died before its first snapshot changes nothing
            if objects is None:
                objects = ReplayedObjects(line, event.policy, event.eta, event.groups_per_batch, event.family, blank)
        elif isinstance(event, facts.PolicySnapshot):
            if objects is None:
                objects = _begun(line, event, blank)
            elif fresh:
                objects.restore(line, event)
            fresh = False
        elif objects is not None:
            objects.tell(line, event)
    if objects is None or not isinstance(objects.ordering, OnlineLearner):
        return None
    objects.ordering.forget_live()
    return objects.ordering.snapshot()


class _Answers:
    """A received event, while the lines with its commands are read."""

    def __init__(
        self, line: int, event: Fact, now: tuple[Command, ...], places: dict[str, Priority], difference: str
    ) -> None:
        self._line, self._event, self._now, self._places, self._difference = line, event, now, places, difference
        self._logged: list[Logged] = []

    def add(self, line: int, command: Command) -> None:
        before = None
        if isinstance(command, SetPriority):
            before = self._places.get(command.key)
            self._places[command.key] = command.priority
        self._logged.append(Logged(line, command, before))

    def compared(self, *, last: bool = False) -> Told:
        logged, now = tuple(entry.command for entry in self._logged), self._now
        cut = last and len(logged) < len(now)
        difference = self._difference or _difference(logged, now[: len(logged)] if cut else now)
        return Told(self._line, self._event, tuple(self._logged), now, difference, cut)


def _answers(line: int, fact: Fact, objects: ReplayedObjects) -> _Answers | None:
    """Pass a fact to the objects; None if they do not receive this kind."""
    places = objects.places
    difference = ""
    if isinstance(fact, facts.LateRewardsTaken):
        return None if fact.awaited else _Answers(line, fact, (), places, _late_difference(fact))
    if isinstance(fact, facts.ToolWorkersOrdered):
        return _Answers(line, fact, (), places, _fleet_difference(fact))
    if isinstance(fact, facts.LeaseRevoked):
        return _Answers(line, fact, (), places, objects.revoked(fact))
    if isinstance(fact, facts.QuantumDispatched):
        difference = _misplaced(fact, objects) or objects.placed(line, fact)
    now = objects.tell(line, fact)
    if now is None:
        return None
    match fact:
        case facts.TrajectoryParked(key=key):
            objects.dispatched.discard(key)
        case facts.QuantumDispatched(key=key):
            objects.dispatched.add(key)
        case facts.TrajectoryEnded(key=key):
            objects.dispatched.discard(key)
            places.pop(key, None)
    return _Answers(line, fact, now, places, difference)


def _begun(line: int, snapshot: facts.PolicySnapshot, blank: BlankOrdering) -> ReplayedObjects:
    objects = ReplayedObjects(line, snapshot.policy, 0, 1, snapshot.family, blank)
    objects.restore(line, snapshot)
    return objects


def _misplaced(event: facts.QuantumDispatched, objects: ReplayedObjects) -> str:
    """How a dispatch differs from the priority last logged; unknown (empty) for priorities given before a snapshot."""
    if event.key in objects.dispatched:
        return f"{event.key} was dispatched twice and not parked in between"
    place = objects.places.get(event.key)
    if place is None or tuple(place) == event.priority:
        return ""
    return f"{event.key} was dispatched with priority {list(event.priority)}; the last one logged is {list(place)}"


def _late_difference(event: facts.LateRewardsTaken) -> str:
    """How what a batch did about late rewards differs from what it would do now."""
    groups = (WaitingGroup(group[0], group[1], group[2], group[3:]) for group in event.waited)
    now = settle(groups, event.batch, dict.fromkeys(event.came, 0.0), versions=event.versions)
    arrived = tuple(
        (arrival.group.iteration, arrival.group.group, s, arrival.delay)
        for arrival in now.arrivals
        for s in arrival.rewards
    )
    if (arrived, now.dropped) == (event.arrived, event.dropped):
        return ""
    return (
        f"batch {event.batch} took late rewards {list(event.arrived)} and dropped {list(event.dropped)}; now it takes "
        f"{list(arrived)} and drops {list(now.dropped)}"
    )


def _fleet_difference(event: facts.ToolWorkersOrdered) -> str:
    """How what was ordered differs from what would be ordered now."""
    now = ordered(FleetFacts(**{name: getattr(event, name) for name in FleetFacts.__struct_fields__}))
    told = (event.ordered, event.give_up, event.reason)
    if now is not None and (now.wanted, now.give_up, now.reason) == told:
        return ""
    instead = "nothing" if now is None else f"{now.wanted} ({now.reason})"
    return f"{event.ordered} tool workers were ordered ({event.reason}); now {instead}"


def _difference(logged: tuple[Command, ...], now: tuple[Command, ...]) -> str:
    for recorded, taken in zip_longest(logged, now):
        if recorded == taken:
            continue
        if recorded is None:
            return f"the log has no such command; now: {sentence(taken)}"
        if taken is None:
            return f"logged: {sentence(recorded)}; now there is no such command"
        names = recorded.__struct_fields__ if type(recorded) is type(taken) else ()
        differing = ", ".join(
            f"{name} was {_plain(getattr(recorded, name))}, now {_plain(getattr(taken, name))}"
            for name in names
            if getattr(recorded, name) != getattr(taken, name)
        )
        return f"logged: {sentence(recorded)}; now: {sentence(taken)}" + (f"; {differing}" if differing else "")
    return ""


def _as_now(line: int, recorded: Mapping[str, Any]) -> dict[str, Any]:
    """A snapshot of admission, of whichever Libra, as this one would write it."""
    admission = Admission(0, 1)
    try:
        admission.restore(recorded)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise StoreError(
            f"line {line}: this policy_snapshot cannot be read: {type(error).__name__}: {error}"
        ) from error
    return admission.snapshot()


def _snapshot_difference(line: int, objects: ReplayedObjects, snapshot: facts.PolicySnapshot) -> str:
    if snapshot.policy != objects.ordering.name:
        return f"a snapshot of policy {snapshot.policy!r}, now it is {objects.ordering.name!r}"
    for part, recorded, now in (
        ("order", snapshot.order, objects.ordering.snapshot()),
        ("admission", _as_now(line, snapshot.admission), objects.admission.snapshot()),
        ("turning", snapshot.turning, objects.tail.snapshot()),
    ):
        if text := _unlike(recorded, now, part):
            return text
    return ""


def _unlike(recorded: object, now: object, path: str) -> str:
    """The first difference of two parts of snapshots; empty if they are equal, numbers up to `NOISE_FRAC`."""
    if recorded == now:
        return ""
    if isinstance(recorded, dict) and isinstance(now, dict):
        pairs = (
            (f"{path}.{key}", recorded.get(key), now.get(key)) for key in sorted(recorded.keys() | now.keys(), key=str)
        )
    elif isinstance(recorded, list | tuple) and isinstance(now, list | tuple) and len(recorded) == len(now):
        pairs = ((f"{path}[{i}]", a, b) for i, (a, b) in enumerate(zip(recorded, now, strict=True)))
    elif (
        isinstance(recorded, float)
        and isinstance(now, float)
        and isclose(recorded, now, rel_tol=NOISE_FRAC, abs_tol=NOISE_FRAC)
    ):
        return ""
    else:
        return f"snapshot, {path}: logged {_brief(recorded)}, now {_brief(now)}"
    return next((text for where, a, b in pairs if (text := _unlike(a, b, where))), "")


def _plain(value: object) -> object:
    return list(value) if isinstance(value, Priority) else value


def _brief(value: object) -> str:
    text = str(value)
    return text if len(text) <= 200 else f"{text[:200]}..."

"""Arrangements of a run's workers: which train, which share an engine, slots per engine. Pure.

A *seat* is a rollout worker in its present state; an *arrangement* gives every seat a role.
`arrangements` lists those that the scheduler can reach (`libra.policy.role_changes`), `blocked`
lists unreachable ones with what is missing, and `steps_to` lists the role changes from one
arrangement to another.

1. Only workers that may change roles train, lend their GPU or lead a shared engine; at least one
   engine remains.
2. Two workers on one node with equal engines may form one engine and separate again: TP 1+1 and 2,
   or 2+2 and 4.
3. The fewest workers change: trainers stay, then workers with the fewest resident trajectories
   train, then by name; present two-worker engines stay while both workers roll out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations

from libra.types import EngineCapacity

ROLES, REBUCKET, SLOTS = "roles", "rebucket", "slots"
"""Kinds of change, priced separately: roles, grouping of GPUs into engines, slots per engine."""
NEAR = 2
"""Maximum change in the number of trainers if more than `MANY` workers may change."""
MANY = 4

MayHave = Callable[[str, int], str]
"""Function from (engine kind, TP degree) to what is missing for it; empty if possible."""


@dataclass(frozen=True, slots=True)
class Deployed:
    """A layout: GPUs of the trainer, engines and concurrency by TP degree."""

    train_gpus: int
    engines: Mapping[int, int]
    concurrency: Mapping[int, int]


def kind_of(bucket: str, base_tp: int, tp: int, slots: int) -> str:
    """Name of equal engines: their bucket, with its degree replaced by ``tp``, and their slots."""
    return f"{bucket.replace(f'-tp{base_tp}', f'-tp{tp}', 1)}-slots{slots}"


@dataclass(frozen=True, slots=True)
class Seat:
    """A rollout worker; bucket, degree and slots describe an engine on this worker's GPUs alone."""

    name: str
    host: str
    engine: str
    bucket: str  # capacity class, for example ``vllm-tp1-threads1``
    tp: int
    slots: int  # at the worker's start
    may_change: bool = False
    role: str = "rollout"  # or train, lent; during a role change, the new role
    bond: frozenset[str] = frozenset()  # other workers whose GPUs form one engine with this worker's
    residents: int = 0  # trajectories whose KV this worker's engine holds
    limits: Mapping[int, int] = field(default_factory=dict)  # slot limits, by TP degree
    declared: Mapping[int, EngineCapacity] = field(default_factory=dict)  # of engines led by this worker, by TP degree


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine of an arrangement: workers (leader first), kind, TP degree, slots in use, and all slots."""

    workers: tuple[str, ...]
    kind: str
    tp: int
    slots: int
    full_slots: int


@dataclass(frozen=True, slots=True)
class Arrangement:
    """A role for every seat; ``missing`` is why it cannot be reached, empty if it can."""

    engines: tuple[Engine, ...]
    training: frozenset[str]
    missing: str = ""

    @property
    def by_kind(self) -> Counter[str]:
        """Number of engines by kind."""
        return Counter(engine.kind for engine in self.engines)

    @property
    def shown(self) -> str:
        """Text for logs and pages."""
        alike = Counter((engine.tp, engine.slots) for engine in self.engines)
        engines = " + ".join(f"{count} x TP {tp} of {slots} slots" for (tp, slots), count in sorted(alike.items()))
        return engines + (f", {', '.join(sorted(self.training))} training" if self.training else "")

    def deployed(self, core_trainers: int) -> Deployed:
        """Training GPUs, engines by TP degree, and the fewest slots of an engine of each degree."""
        slots: dict[int, int] = {}
        for engine in self.engines:
            slots[engine.tp] = min(engine.slots, slots.get(engine.tp, engine.slots))
        return Deployed(core_trainers + len(self.training), dict(Counter(e.tp for e in self.engines)), slots)

    def limited(self, slots: Mapping[int, int]) -> Arrangement:
        """The arrangement with at most ``slots[tp]`` of its slots on each engine."""
        return replace(
            self,
            engines=tuple(
                replace(engine, slots=min(slots.get(engine.tp, engine.slots), engine.full_slots))
                for engine in self.engines
            ),
        )


def engine_of(seats: Mapping[str, Seat], workers: Sequence[str]) -> Engine:
    """The engine of these workers' GPUs, led by the first."""
    lead = seats[workers[0]]
    tp, full = sum(seats[name].tp for name in workers), sum(seats[name].slots for name in workers)
    kind = kind_of(lead.bucket, lead.tp, tp, full)
    return Engine(tuple(workers), kind, tp, min(lead.limits.get(tp, full), full), full)


def arranged(seats: Collection[Seat]) -> Arrangement:
    """The present arrangement of the seats."""
    by_name = {seat.name: seat for seat in seats}
    engines = tuple(
        engine_of(by_name, (seat.name, *sorted(seat.bond & by_name.keys())))
        for seat in _in_order(seats)
        if seat.role == "rollout"
    )
    return Arrangement(engines, frozenset(seat.name for seat in seats if seat.role == "train"))


def arrangements(seats: Collection[Seat], may_have: MayHave) -> list[Arrangement]:
    """Every reachable arrangement, with the present slot limits; the present arrangement is first."""
    now = arranged(seats)
    changing = sorted(
        (seat for seat in seats if seat.may_change),
        key=lambda seat: (seat.role != "train", bool(seat.bond), seat.residents, seat.name),
    )
    present, found = len(now.training), [now]
    counts = range(len(changing) + 1)
    if len(changing) > MANY:
        counts = range(max(0, present - NEAR), min(len(changing), present + NEAR) + 1)
    for count in counts:
        training = frozenset(seat.name for seat in changing[:count])
        rest = [seat for seat in changing if seat.name not in training]
        for pairs in _pairings(rest, may_have):
            made = _arrangement(seats, training, pairs)
            if made.engines and made not in found:
                found.append(made)
    return found


def _pairings(seats: Sequence[Seat], may_have: MayHave) -> list[list[tuple[str, str]]]:
    names = {seat.name for seat in seats}
    kept = sorted({tuple(sorted({seat.name, *seat.bond})) for seat in seats if seat.bond and seat.bond <= names})
    leads = {seat.name for seat in seats if seat.role == "rollout"}
    pairs = [(a, b) if a in leads else (b, a) for a, b in (pair for pair in kept if len(pair) == 2)]
    alike: dict[tuple[str, str, int, int], list[str]] = {}
    for seat in _in_order(seats):
        if not any(seat.name in pair for pair in pairs) and not may_have(seat.engine, 2 * seat.tp):
            alike.setdefault((seat.host, seat.bucket, seat.tp, seat.slots), []).append(seat.name)
    for free in alike.values():
        pairs += list(zip(free[::2], free[1::2], strict=False))
    return [pairs[:number] for number in range(len(pairs) + 1)]


def _arrangement(seats: Collection[Seat], training: Collection[str], pairs: Sequence[tuple[str, str]]) -> Arrangement:
    by_name, paired = {seat.name: seat for seat in seats}, {name for pair in pairs for name in pair}
    alone = [(seat.name,) for seat in seats if seat.name not in paired and seat.name not in training]
    workers = sorted([*pairs, *alone], key=lambda names: _order(names[0]))
    return Arrangement(tuple(engine_of(by_name, names) for names in workers), frozenset(training))


def blocked(seats: Collection[Seat], may_have: MayHave) -> list[Arrangement]:
    """Unreachable arrangements nearest to the present one, each with what is missing."""
    now, in_order, found = arranged(seats), _in_order(seats), []
    rolling = [seat for seat in in_order if seat.role == "rollout" and not seat.bond]
    still = [seat for seat in rolling if not seat.may_change]
    if still and len(rolling) > 1:
        missing = f"one more worker that trains needs cluster.hybrid_workers={_number_for(in_order, [still[0]])}"
        found.append(replace(_arrangement(seats, {*now.training, still[0].name}, []), missing=missing))
    joined = [pair for pair in combinations(rolling, 2) if _alike(*pair)]
    can = [
        (one, other)
        for one, other in joined
        if one.may_change and other.may_change and one.host == other.host and not may_have(one.engine, 2 * one.tp)
    ]
    if not can and len(rolling) > 1:
        one, other = next((pair for pair in joined if pair[0].host == pair[1].host), (rolling[0], rolling[1]))
        tp = one.tp + other.tp
        if reason := may_have(one.engine, tp):
            missing = f"TP {tp} needs {reason}"
        elif not _alike(one, other):
            kinds = (f"{seat.name} ({kind_of(seat.bucket, seat.tp, seat.tp, seat.slots)})" for seat in (one, other))
            missing = f"TP {tp} needs two rollout workers with equal engines, got {' and '.join(kinds)}"
        elif one.host != other.host:
            missing = f"TP {tp} needs two rollout workers of one node, {one.name} is on {one.host} and {other.name} on {other.host}"
        else:
            number = _number_for(in_order, [one, other])
            missing = f"TP {tp} needs two rollout workers of one node that may change: cluster.hybrid_workers={number}"
        found.append(replace(_arrangement(seats, now.training, [(one.name, other.name)]), missing=missing))
    full = [engine for engine in now.engines if engine.slots == engine.full_slots]
    if len(full) == len(now.engines) and full:
        more = 2 * max(engine.full_slots for engine in full)
        engines = tuple(replace(engine, slots=2 * engine.full_slots) for engine in full)
        missing = (
            f"{more} slots on an engine need rollout.slots={more} (or its slots in cluster.engines) when the run starts"
        )
        found.append(Arrangement(engines, now.training, missing))
    return found


def _number_for(in_order: Sequence[Seat], wanted: Sequence[Seat]) -> int:
    """Value of ``cluster.hybrid_workers`` that lets these seats change: it counts from the first worker."""
    return max(in_order.index(seat) for seat in wanted) + 1


def _alike(one: Seat, other: Seat) -> bool:
    return (one.bucket, one.tp, one.slots) == (other.bucket, other.tp, other.slots)


def _order(name: str) -> tuple[int, str]:
    return len(name), name  # rollout-2 before rollout-10


def _in_order(seats: Collection[Seat]) -> list[Seat]:
    return sorted(seats, key=lambda seat: _order(seat.name))


# ---------------------------------------------------------------- changes


def kinds_of_change(now: Arrangement, wanted: Arrangement) -> tuple[str, ...]:
    """Kinds of change between two arrangements, as priced by `libra.planner.replan`; empty if none."""
    before, after = ({engine.workers: engine for engine in each.engines} for each in (now, wanted))
    joined = {workers for workers in before.keys() ^ after.keys() if len(workers) > 1}
    slots = any(engine.slots != before[names].slots for names, engine in after.items() if names in before)
    return tuple(
        kind
        for kind, differs in ((ROLES, now.training != wanted.training), (REBUCKET, bool(joined)), (SLOTS, slots))
        if differs
    )


Assignments = dict[str, dict[str, object]]


def steps_to(now: Arrangement, wanted: Arrangement, base_tp: Mapping[str, int]) -> list[list[Assignments]]:
    """Role changes from ``now`` to ``wanted``, as `libra_set_roles` takes them.

    Changes in one inner list concern different workers and may run at once; the lists run in order.
    ``base_tp`` is the degree of each worker on its own.
    """
    target = _targets(wanted, base_tp)
    before, after = ({e.workers for e in each.engines if len(e.workers) > 1} for each in (now, wanted))
    made, undone = sorted(after - before), sorted(before - after)
    first: list[Assignments] = []
    again: list[Assignments] = []
    moved = {name for pair in undone for name in pair}
    new = {name for pair in made for name in pair}
    for pair in undone:
        own: Assignments = {name: {"role": "rollout", "tp": base_tp[name]} for name in pair}
        first.append({name: own[name] if name in new else target[name] for name in pair})
    for pair in made:
        (again if moved & set(pair) else first).append({name: target[name] for name in pair})
    alone = sorted(name for name in now.training ^ wanted.training if name not in moved | new)
    if alone:
        first.append({name: target[name] for name in alone})
    return [step for step in (first, again) if step]


def _targets(wanted: Arrangement, base_tp: Mapping[str, int]) -> Assignments:
    target: Assignments = {name: {"role": "train", "tp": base_tp[name]} for name in wanted.training}
    for engine in wanted.engines:
        target[engine.workers[0]] = {"role": "rollout", "tp": engine.tp}
        target |= {name: {"role": "lent", "tp": base_tp[name]} for name in engine.workers[1:]}
    return target


def limits_for(now: Arrangement, wanted: Arrangement) -> dict[str, dict[str, int]]:
    """Slot limits of new and resized engines, as `libra_set_slots` takes them."""
    has = {engine.workers: engine.slots for engine in now.engines}
    return {
        engine.workers[0]: {"tp": engine.tp, "slots": engine.slots}
        for engine in wanted.engines
        if engine.slots != has.get(engine.workers)
    }

"""The lease table: which action holds which resources of which worker, and which gets some next.

One table serves the actions of all trajectories. Each call passes the time, which never decreases.

Invariants
----------
1. A worker's leases never exceed its amount of any kind, and leases never exceed a quota
   (`libra.policy.leases.resources`). No lease outlives its worker.
2. A holder has at most one lease or request. A request is granted once: with its fewest cores, or
   with a larger size of its curve.
3. Requests are served by priority, then arrival. A request that does not fit reserves the kinds
   that it lacks, so no later request gets any of them. Among requests for the same kinds, the
   longest prefix that fits at minimum size is granted. A request larger than every worker reserves
   nothing (`LeaseTable.stranded`).
4. Enlargement uses only cores that the granted prefix leaves free, so grants do not change.
5. Only revocable leases are revoked, and only for the first request that does not fit, which then
   goes before all others. A revoked lease is held until released.
6. An `admit` without grants has no side effects, so a replay needs only the grants.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial

import msgspec

from libra.errors import ConfigError
from libra.facts import ActionRequested, Priority, ToolCapacity, ToolNeeds, ToolsDeclared
from libra.policy.leases.elastic import CORES, Candidate, Pressure, Running, SpeedUp, enlarged, stopped_for
from libra.policy.leases.resources import (
    KINDS,
    Lease,
    LeaseRequest,
    Quota,
    Resources,
    Revoke,
    covers,
    described,
    plus,
    quota_kind,
    read_quota,
)
from libra.types import NO_TOOL, ToolStatus

FORGETTING = 0.1  # weight of the newest action in its tool's mean seconds
NOTHING = (0,) * len(KINDS)
RETURNED = frozenset({ToolStatus.OK, ToolStatus.TRUNCATED})
CUT_OFF = frozenset({ToolStatus.TIMEOUT, NO_TOOL})  # more cores would not have ended them
FIRST = Priority(-1, -1, -1)  # the priority of a request for which leases are revoked


Place = tuple[Priority, int]  # the order of a request: its priority, then its arrival
Kinds = frozenset[str]


class WaitingRequests:
    """All requests in order; requests for the same kinds form a sorted line."""

    def __init__(self) -> None:
        self.requests: dict[str, tuple[Place, LeaseRequest]] = {}
        self._lines: dict[Kinds, list[tuple[Place, str]]] = {}

    def wanting(self, kind: str) -> int:
        return sum(len(line) for kinds, line in self._lines.items() if kind in kinds)

    def join(self, place: Place, request: LeaseRequest) -> None:
        self.leave(request.holder)
        self.requests[request.holder] = place, request
        insort(self._lines.setdefault(request.least.kinds, []), (place, request.holder))

    def leave(self, holder: str) -> None:
        if (found := self.requests.pop(holder, None)) is None:
            return
        place, request = found
        line = self._lines[request.least.kinds]
        del line[bisect_left(line, (place, holder))]
        if not line:
            del self._lines[request.least.kinds]

    def first(self, kinds: Kinds) -> tuple[Place, LeaseRequest] | None:
        line = self._lines.get(kinds)
        return self.requests[line[0][1]] if line else None

    def firsts(self) -> dict[Kinds, tuple[Place, LeaseRequest]]:
        return {kinds: self.requests[line[0][1]] for kinds, line in self._lines.items()}


class LeaseTable:
    def __init__(self) -> None:
        self._capacity: dict[str, Sequence[int]] = {}
        self._free: dict[str, list[int]] = {}
        self._quotas: dict[str, Quota] = {}
        self._curves: dict[str, SpeedUp] = {}
        self._seconds: dict[str, float] = {}  # of a tool's action with its least cores
        self._waiting = WaitingRequests()
        self._leases: dict[str, Lease] = {}
        self._stranded: dict[str, tuple[Place, LeaseRequest]] = {}  # larger than every worker
        self._kept: dict[str, Kinds] = {}  # that it lacked when a later one got some
        self._revoking: set[str] = set()  # holders that are to release their lease
        self._first: set[str] = set()  # who waits, and had leases revoked for it
        self._serial = 0
        self.pressure = Pressure()

    def supply(self, worker: str, capacity: Resources) -> None:
        held = plus(self._capacity.get(worker, NOTHING), self._free.get(worker, NOTHING), -1)
        self._capacity[worker], self._free[worker] = capacity.local, plus(capacity.local, held, -1)
        for place, request in self._stranded.values():
            self._waiting.join(place, request)
        self._stranded.clear()

    def withdraw(self, worker: str) -> tuple[Lease, ...]:
        """Remove ``worker``; returns the leases that ended with it."""
        self._capacity.pop(worker, None)
        self._free.pop(worker, None)
        ended = tuple(lease for lease in self._leases.values() if lease.worker == worker)
        for lease in ended:
            self._end(lease)
        return ended

    def limit(self, name: str, quota: Quota) -> None:
        """Limit the units of quota ``name``; the same limit again changes nothing."""
        known = self._quotas.setdefault(name, quota)
        if (known.units, known.per_s) != (quota.units, quota.per_s):
            quota.held = known.held
            self._quotas[name] = quota

    def declare(self, tool: str, curve: SpeedUp) -> None:
        self._curves.setdefault(tool, curve)

    def request(self, request: LeaseRequest, priority: Priority) -> None:
        """Queue ``request`` in place of an earlier one of its holder, which must hold no lease."""
        holder = request.holder
        assert holder not in self._leases, f"{holder} requests a lease and holds one"
        assert all(name in self._quotas for name, _ in request.least.quotas), request
        if request.least.cores and not self.waits(holder):
            self.pressure.came(self._held_cores(), self._total_cores())
        self._leave(holder)
        self._join(FIRST if holder in self._first else priority, request)

    def _join(self, priority: Priority, request: LeaseRequest) -> None:
        self._serial += 1
        self._waiting.join((priority, self._serial), request)

    def adopt(self, lease: Lease) -> None:
        """Hold a lease that was granted elsewhere, even beyond its worker's capacity."""
        assert lease.holder not in self._leases, f"{lease.holder} holds a lease"
        self.cancel(lease.holder)
        self._capacity.setdefault(lease.worker, NOTHING)
        self._free[lease.worker] = plus(self._free.get(lease.worker, NOTHING), lease.resources.local, -1)
        self._leases[lease.holder] = lease

    def cancel(self, holder: str) -> None:
        self._leave(holder)
        self._first.discard(holder)

    def release(self, holder: str, seconds: float | None = None, status: str = ToolStatus.OK) -> Lease | None:
        """End the lease of ``holder``; ``seconds`` of its action if it ended by itself."""
        lease = self._leases.get(holder)
        if lease is None:
            return None
        self._end(lease)
        if seconds is not None and lease.tool:
            self._learn(lease, seconds, status)
        return lease

    def lease(self, holder: str) -> Lease | None:
        return self._leases.get(holder)

    def leases(self) -> tuple[Lease, ...]:
        return tuple(self._leases.values())

    def waits(self, holder: str) -> bool:
        return holder in self._waiting.requests or holder in self._stranded

    def waiting_work(self) -> tuple[int, float]:
        """Requests that more workers would help, and their core-seconds (or slot-seconds)."""
        helped = [request for _, request in self._waiting.requests.values() if not request.least.quotas]
        units = (max(1, each.least.cores) * (self.expected_s(each.tool) or 1.0) for each in helped)
        return len(helped), sum(units)

    def num_waiting(self) -> int:
        return len(self._waiting.requests) + len(self._stranded)

    def held(self, worker: str) -> Resources:
        return Resources.of(plus(self._capacity.get(worker, NOTHING), self._free.get(worker, NOTHING), -1))

    def capacity(self) -> dict[str, Resources]:
        return {worker: Resources.of(amounts) for worker, amounts in self._capacity.items()}

    def stranded(self) -> tuple[LeaseRequest, ...]:
        """Requests larger than every present worker at the last `admit`, by holder."""
        return tuple(self._stranded[holder][1] for holder in sorted(self._stranded))

    def next_s(self, at_s: float) -> float | None:
        """Earliest time at which a quota refill may admit a request; None if no refill can."""
        quotas = [quota for _, first in self._waiting.firsts().values() for quota in first.least.quotas]
        times = [self._quotas[name].next_s(at_s, units) for name, units in quotas]
        return min((each for each in times if at_s < each < float("inf")), default=None)

    def expected_s(self, tool: str) -> float | None:
        """Mean seconds of an action of ``tool`` with its fewest cores; None before one ended."""
        return self._seconds.get(tool)

    def admit(self, at_s: float) -> tuple[Lease | Revoke, ...]:
        """Grant and enlarge what fits, in order; then revoke for the first that does not fit."""
        granted: list[str] = []
        passed: list[tuple[LeaseRequest, Kinds]] = []
        lines = self._waiting.firsts()
        blocked: Kinds = frozenset()
        while lines:
            kinds = min(lines, key=lambda each: lines[each][0])
            place, request = lines.pop(kinds)
            worker, lacks = (None, kinds & blocked) if kinds & blocked else self._find(request, at_s)
            if lacks:
                passed.append((request, lacks))
                blocked |= lacks | self._kept.get(request.holder, frozenset())
                continue
            self.cancel(request.holder)
            if worker is None:
                self._stranded[request.holder] = place, request
            else:
                self._grant(request, worker, at_s)
                granted.append(request.holder)
            if (behind := self._waiting.first(kinds)) is not None:
                lines[kinds] = behind
        if granted:
            for request, lacks in passed:
                self._kept[request.holder] = self._kept.get(request.holder, frozenset()) | lacks
            self._enlarge(granted)
        grants = tuple(self._leases[holder] for holder in granted)
        for lease in grants:
            if lease.resources.cores:
                self.pressure.began(lease.resources.cores)
        return (*grants, *self._revocations(*passed[0], at_s)) if passed else grants

    def _find(self, request: LeaseRequest, at_s: float) -> tuple[str | None, Kinds]:
        """Worker for a request, or the kinds it lacks; neither if no worker is large enough."""
        need = request.least.local
        short = {
            worker: [kind for kind, has, want in zip(KINDS, self._free[worker], need, strict=True) if has < want]
            for worker in self._able(need)
        }
        if not short:
            return None, frozenset()
        fits = [worker for worker, kinds in short.items() if not kinds]
        short_of = {quota_kind(name) for name, units in request.least.quotas if not self._quotas[name].may(at_s, units)}
        if short_of or not fits:
            return None, frozenset(short_of if fits else short_of.union(*short.values()))
        if request.home in fits:
            return request.home, frozenset()
        free = self._free
        if request.tool in self._curves or not need[CORES]:  # most room
            return max(fits, key=lambda worker: (free[worker], worker)), frozenset()
        return min(fits, key=lambda worker: (free[worker][CORES], worker)), frozenset()  # best fit

    def _able(self, need: Sequence[int]) -> list[str]:
        return [worker for worker, capacity in self._capacity.items() if covers(capacity, need)]

    def _grant(self, request: LeaseRequest, worker: str, at_s: float) -> None:
        least, holder = request.least, request.holder
        self._free[worker] = plus(self._free[worker], least.local, -1)
        for name, units in least.quotas:
            self._quotas[name].take(at_s, units)
        reason = "home" if worker == request.home else f"fits: {described(least)}"
        revocable = request.revocable
        self._leases[holder] = Lease(holder, worker, least, least.cores, request.tool, at_s, revocable, reason)

    def _enlarge(self, granted: list[str]) -> None:
        candidates = [
            Candidate(lease, self._curves[lease.tool], self.expected_s(lease.tool) or 1.0)
            for lease in map(self._leases.__getitem__, granted)
            if lease.tool in self._curves
        ]
        if not candidates:
            return
        free_cores = {worker: max(0, free[CORES]) for worker, free in self._free.items()}
        waiting = self._waiting.wanting("cores")
        price = self.pressure.price(waiting, self._held_cores(), self._total_cores())
        for holder, cores, reason in enlarged(candidates, free_cores, price, measures=not waiting):
            lease = self._leases[holder]
            self._free[lease.worker][CORES] -= cores - lease.resources.cores
            self._leases[holder] = msgspec.structs.replace(
                lease, resources=lease.resources.with_cores(cores), reason=f"{lease.reason}; {reason}"
            )

    def _held_cores(self) -> int:
        return self._total_cores() - sum(free[CORES] for free in self._free.values())

    def _total_cores(self) -> int:
        return sum(capacity[CORES] for capacity in self._capacity.values())

    def _revocations(self, request: LeaseRequest, lacks: Kinds, at_s: float) -> tuple[Revoke, ...]:
        seconds = self.expected_s(request.tool) if request.tool else None
        if seconds is None or not lacks <= set(KINDS) or request.holder in self._first:
            return ()
        if not any(lease.revocable for lease in self._leases.values()):
            return ()
        need = request.least.local
        free = {worker: self._free[worker] for worker in self._able(need)}
        running = [self._running(lease, at_s) for lease in self._leases.values()]
        price = self._waiting.wanting("cores") / max(1, self._total_cores())  # they wait longer
        found = stopped_for(need, seconds, free, running, price)
        if found is None:
            return ()
        self._revoking.update(found.holders)
        self._first.add(request.holder)
        self._join(FIRST, request)
        needs = f"{request.holder} needs {described(request.least)}, and would wait {found.saved_s:.3g} s"
        reason = f"{needs}; restarting costs {found.cost_s:.3g} s"
        ran_s = {holder: round(at_s - self._leases[holder].granted_s, 6) for holder in found.holders}
        return tuple(Revoke(holder, found.worker, seconds, reason) for holder, seconds in ran_s.items())

    def _running(self, lease: Lease, at_s: float) -> Running:
        has, seconds = lease.resources.local, self.expected_s(lease.tool) if lease.tool else None
        if seconds is None or lease.holder in self._revoking:
            return Running(lease.holder, lease.worker, has, has, 0.0, None)
        again_s = partial(self._seconds_on, lease.tool, seconds)
        left_s = max(0.0, again_s(lease.resources.cores) - (at_s - lease.granted_s))
        least = lease.resources.with_cores(lease.least_cores).local
        return Running(lease.holder, lease.worker, has, least, left_s, again_s if lease.revocable else None)

    def _seconds_on(self, tool: str, seconds: float, cores: int) -> float:
        curve = self._curves.get(tool)
        return seconds if curve is None else seconds / curve.speed(cores)

    def _leave(self, holder: str) -> None:
        self._waiting.leave(holder)
        self._stranded.pop(holder, None)
        self._kept.pop(holder, None)

    def _end(self, lease: Lease) -> None:
        del self._leases[lease.holder]
        self._revoking.discard(lease.holder)
        if lease.worker in self._free:
            self._free[lease.worker] = plus(self._free[lease.worker], lease.resources.local)
        for name, units in lease.resources.quotas:
            self._quotas[name].give_back(units)

    def _learn(self, lease: Lease, seconds: float, status: str) -> None:
        curve = self._curves.get(lease.tool)
        if curve is not None and status in RETURNED:
            curve.ended(lease.resources.cores, seconds)
        if curve is not None and status not in CUT_OFF:
            seconds *= curve.speed(lease.resources.cores)
        mean = self._seconds.get(lease.tool, seconds)
        self._seconds[lease.tool] = round(mean + FORGETTING * (seconds - mean), 9)


SLOT = Resources(slots=1)


class ActionLeases:
    """Leases of the trajectories' actions; all calls of a turn form one action.

    An action is elastic only if it is a single call of an elastic tool. An action whose tools
    declare no resources takes a slot and shares the cores that no lease holds. A single call of a
    revocable tool may be stopped once and then runs to its end, so it does not starve.
    """

    def __init__(self) -> None:
        self.table = LeaseTable()
        self._needs: dict[str, ToolNeeds] = {}
        self._asked: dict[str, tuple[str, ...]] = {}  # tools of a trajectory's next action
        self._slots: dict[str, int] = {}
        self._more: dict[str, ToolCapacity] = {}
        self._stopped: set[str] = set()  # whose action was stopped, and has not ended since
        self._revokes: list[Revoke] = []

    def handle(self, event: ToolsDeclared | ToolCapacity | ActionRequested) -> None:
        match event:
            case ActionRequested():
                self._asked[event.key] = event.tools
            case ToolCapacity():
                self._more[event.worker] = event
                self._supply(event.worker)
            case ToolsDeclared():
                for name, quota in event.quotas.items():
                    self.table.limit(name, read_quota(name, quota))
                self._needs |= event.tools
                curves = {name: curve_of(name, needs) for name, needs in event.tools.items()}
                for name, curve in curves.items():
                    if curve is not None:
                        self.table.declare(name, curve)

    def slots(self, worker: str, slots: int) -> None:
        self._slots[worker] = slots
        self._supply(worker)

    def left(self, worker: str) -> None:
        self._slots.pop(worker, None)
        self._more.pop(worker, None)
        self.table.withdraw(worker)

    def wait(self, key: str, priority: Priority, home: str) -> None:
        tools = self._asked.get(key, ())
        single = tools[0] if len(tools) == 1 else ""
        revocable = single in self._needs and self._needs[single].revocable and key not in self._stopped
        self.table.request(LeaseRequest(key, self._least(tools), single, home, revocable=revocable), priority)

    def ended(self, key: str) -> None:
        self._stopped.discard(key)

    def forget(self, key: str) -> None:
        self._asked.pop(key, None)
        self._stopped.discard(key)
        self.table.cancel(key)
        self.table.release(key)

    def adopt(self, key: str, worker: str) -> None:
        """Hold a slot for an action that began before leases were used."""
        self.table.adopt(Lease(key, worker, SLOT, 0, "", 0.0, reason="began before"))

    def admit(self, at_s: float) -> tuple[Lease, ...]:
        granted: list[Lease] = []
        for each in self.table.admit(at_s):
            if isinstance(each, Revoke):
                self._stopped.add(each.holder)
                self._revokes.append(each)
            else:
                self._asked.pop(each.holder, None)
                granted.append(each)
        return tuple(granted)

    def revocations(self) -> tuple[Revoke, ...]:
        found = tuple(self._revokes)
        self._revokes.clear()
        return found

    def _supply(self, worker: str) -> None:
        slots, more = self._slots.get(worker, 0), self._more.get(worker)
        own = (0, 0, 0) if more is None else (more.cores, more.memory_bytes, more.gpus)
        self.table.supply(worker, Resources(slots, *own))

    def _least(self, tools: tuple[str, ...]) -> Resources:
        needs = [self._needs[name] for name in tools if name in self._needs]
        if not needs:
            return SLOT
        units = Counter(each.quota for each in needs if each.quota)
        cores, gpus = sum(each.least_cores for each in needs), sum(each.gpus for each in needs)
        return Resources(1, cores, sum(each.memory_bytes for each in needs), gpus, tuple(sorted(units.items())))


def curve_of(name: str, needs: ToolNeeds) -> SpeedUp | None:
    """The curve of an elastic tool, else None; ConfigError for an invalid curve."""
    if needs.elastic is None:
        return None
    return SpeedUp(needs.least_cores, needs.most_cores, needs.elastic, f"tool {name!r}")


def check_declared(
    tools: Mapping[str, ToolNeeds], quotas: Mapping[str, str], largest: tuple[str, Resources] | None
) -> None:
    """ConfigError for an invalid curve or quota, or a call that worker ``largest`` cannot run."""
    for name, text in quotas.items():
        read_quota(name, text)
    for name, needs in tools.items():
        curve_of(name, needs)
        if needs.quota and needs.quota not in quotas:
            known = f"; known are {', '.join(sorted(quotas))}" if quotas else ""
            raise ConfigError(
                f"tool {name!r}: quota {needs.quota!r} is not configured{known}; type environment.quotas.{needs.quota}=10/s, "
                "with the rate that its API allows"
            )
        least = Resources(0, needs.least_cores, needs.memory_bytes, needs.gpus)
        if largest is not None and not covers(largest[1].local, least.local):
            raise ConfigError(
                f"tool {name!r}: a call takes {described(least)}, and the largest tool worker, {largest[0]}, has "
                f"{described(largest[1])}, so no call can ever run; declare less, or give workers more with "
                "cluster.tool_supply"
            )

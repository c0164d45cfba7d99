"""The lease table: who holds which resources of which worker, and who gets some next.

One table for the actions of all trajectories. Time arrives with every call and never goes back.

Invariants
----------
1. Leases of a worker never hold more of any kind than it has, nor more of a quota than
   `libra.policy.leases.resources` promises. No lease outlives its worker.
2. A holder has at most one lease or request. A request is granted once: its least, or a larger
   legal number of cores of its curve.
3. Requests are considered in order (priority, then arrival). One that does not fit keeps the kinds
   that it lacks: no later request gets any of them. Of requests for the same kinds, the longest
   prefix whose minima fit is granted. So each kind goes to the first of its line; a request larger
   than every worker keeps nothing (`LeaseTable.stranded`).
4. Enlargement takes only cores that are free after the prefix: without it the same requests are
   granted.
5. Only revocable leases are revoked, for the first request that does not fit, which then goes
   before all others. A revoked lease is held until it is released.
6. An empty `admit` has no side effects, so that a replay needs grants only.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from functools import partial

import msgspec

from libra.facts import Priority
from libra.policy.leases.elastic import CORES, Candidate, Pressure, Running, SpeedUp, enlarged, stopped_for
from libra.policy.leases.resources import KINDS, Lease, LeaseRequest, Quota, Resources, Revoke, described, quota_kind
from libra.types import NO_TOOL, ToolStatus

FORGETTING = 0.1  # weight of the newest action in its tool's mean seconds
NOTHING = (0,) * len(KINDS)
RETURNED = frozenset({ToolStatus.OK, ToolStatus.TRUNCATED})
CUT_OFF = frozenset({ToolStatus.TIMEOUT, NO_TOOL})
"""Outcomes of actions that more cores would not have ended sooner."""
FIRST = Priority(-1, -1, -1)  # the priority of a request for which leases are revoked


Place = tuple[Priority, int]  # the order of a request: its priority, then its arrival
Kinds = frozenset[str]


class WaitingRequests:
    """Every request with its place; requests of the same kinds form a line."""

    def __init__(self) -> None:
        self._requests: dict[str, tuple[Place, LeaseRequest]] = {}
        self._lines: dict[Kinds, list[tuple[Place, str]]] = {}
        self._with: dict[str, int] = {}  # waiting requests by kind

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, holder: object) -> bool:
        return holder in self._requests

    def __iter__(self) -> Iterator[LeaseRequest]:
        return (request for _, request in self._requests.values())

    def wanting(self, kind: str) -> int:
        return self._with.get(kind, 0)

    def join(self, place: Place, request: LeaseRequest) -> None:
        self.leave(request.holder)
        kinds = request.least.kinds
        self._requests[request.holder] = (place, request)
        line = self._lines.setdefault(kinds, [])
        heapq.heappush(line, (place, request.holder))
        if len(line) > 64 + 4 * len(self._requests):  # most have left
            line[:] = [entry for entry in line if self._waits(entry, kinds)]
            heapq.heapify(line)
        for kind in kinds:
            self._with[kind] = self._with.get(kind, 0) + 1

    def leave(self, holder: str) -> LeaseRequest | None:
        _, request = self._requests.pop(holder, (None, None))
        if request is not None:
            for kind in request.least.kinds:
                self._with[kind] -= 1
        return request

    def lines(self) -> list[Kinds]:
        """The kinds of every line with a request, by the place of its first."""
        heads = [(line[0], kinds) for kinds in list(self._lines) if (line := self._line(kinds))]
        return [kinds for _, kinds in sorted(heads, key=lambda head: head[0])]

    def first(self, kinds: Kinds) -> tuple[Place, LeaseRequest] | None:
        line = self._line(kinds)
        return self._requests[line[0][1]] if line else None

    def _line(self, kinds: Kinds) -> list[tuple[Place, str]]:
        line = self._lines.get(kinds, [])
        while line and not self._waits(line[0], kinds):
            heapq.heappop(line)
        if not line:
            self._lines.pop(kinds, None)
        return line

    def _waits(self, entry: tuple[Place, str], kinds: Kinds) -> bool:
        found = self._requests.get(entry[1])
        return found is not None and found[0] == entry[0] and found[1].least.kinds == kinds


class LeaseTable:
    """One per scheduler."""

    def __init__(self) -> None:
        self._capacity: dict[str, tuple[int, ...]] = {}
        self._free: dict[str, list[int]] = {}
        self._quotas: dict[str, Quota] = {}
        self._curves: dict[str, SpeedUp] = {}
        self._seconds: dict[str, float] = {}  # of a tool's action with its least cores
        self._waiting = WaitingRequests()
        self._leases: dict[str, Lease] = {}
        self._stranded: dict[str, tuple[Place, LeaseRequest]] = {}  # larger than every worker
        self._kept: dict[str, frozenset[str]] = {}  # that it lacked when a later one got some
        self._revoking: set[str] = set()  # holders that are to release their lease
        self._first: set[str] = set()  # who waits, and had leases revoked for it
        self._serial = 0
        self.pressure = Pressure()

    # ---------------------------------------------------------------- what there is

    def supply(self, worker: str, capacity: Resources) -> None:
        before = self._capacity.get(worker, NOTHING)
        free = self._free.setdefault(worker, [0] * len(KINDS))
        for index, (old, new) in enumerate(zip(before, capacity.local, strict=True)):
            free[index] += new - old
        self._capacity[worker] = capacity.local
        for place, request in self._stranded.values():
            self._waiting.join(place, request)
        self._stranded.clear()

    def withdraw(self, worker: str) -> tuple[Lease, ...]:
        """``worker`` is gone; returns the leases that ended with it."""
        ended = tuple(lease for lease in self._leases.values() if lease.worker == worker)
        for lease in ended:
            self._end(lease)
        self._capacity.pop(worker, None)
        self._free.pop(worker, None)
        return ended

    def limit(self, name: str, quota: Quota) -> None:
        """Limit units of ``name``; the same limit again changes nothing."""
        known = self._quotas.get(name)
        if known is None or not known.limits(quota):
            if known is not None:
                quota.held = known.held
            self._quotas[name] = quota

    def declare(self, tool: str, curve: SpeedUp) -> None:
        self._curves.setdefault(tool, curve)

    # ---------------------------------------------------------------- who asks, and who has ended

    def request(self, request: LeaseRequest, priority: Priority) -> None:
        """``request`` waits, instead of an earlier one of its holder, which has no lease."""
        holder = request.holder
        assert holder not in self._leases, f"{holder} requests a lease and holds one"
        assert all(name in self._quotas for name, _ in request.least.quotas), request
        again = self.waits(holder)
        first = holder in self._first
        self._leave(holder)
        if request.least.cores and not again:
            self.pressure.came(self._held_cores(), self._total_cores())
        self._serial += 1
        self._waiting.join((FIRST if first else priority, self._serial), request)

    def adopt(self, lease: Lease) -> None:
        """A lease granted elsewhere is held, even beyond the capacity of its worker."""
        assert lease.holder not in self._leases, f"{lease.holder} holds a lease"
        self.cancel(lease.holder)
        free = self._free.setdefault(lease.worker, list(NOTHING))
        self._capacity.setdefault(lease.worker, NOTHING)
        for index, amount in enumerate(lease.resources.local):
            free[index] -= amount
        self._leases[lease.holder] = lease

    def cancel(self, holder: str) -> None:
        self._leave(holder)
        self._first.discard(holder)

    def release(self, holder: str, seconds: float | None = None, status: str = ToolStatus.OK) -> Lease | None:
        """The lease of ``holder`` has ended; ``seconds`` of its action, if it ended by itself."""
        lease = self._leases.get(holder)
        if lease is None:
            return None
        self._end(lease)
        if seconds is not None and lease.tool:
            self._learn(lease, seconds, status)
        return lease

    # ---------------------------------------------------------------- queries

    def lease(self, holder: str) -> Lease | None:
        return self._leases.get(holder)

    def leases(self) -> tuple[Lease, ...]:
        return tuple(self._leases.values())

    def waits(self, holder: str) -> bool:
        return holder in self._waiting or holder in self._stranded

    def waiting_work(self) -> tuple[int, float]:
        """Requests that more workers would help, and their core-seconds (slot-seconds without
        cores).

        An action counts a second until one of its tool has ended; requests that wait for a quota
        are left out.
        """
        helped = [request for request in self._waiting if not request.least.quotas]
        units = (max(1, each.least.cores) * (self.expected_s(each.tool) or 1.0) for each in helped)
        return len(helped), sum(units)

    def num_waiting(self) -> int:
        return len(self._waiting) + len(self._stranded)

    def held(self, worker: str) -> Resources:
        pairs = zip(self._capacity.get(worker, NOTHING), self._free.get(worker, NOTHING), strict=True)
        return _vector(tuple(has - free for has, free in pairs))

    def capacity(self) -> dict[str, Resources]:
        return {worker: _vector(amounts) for worker, amounts in self._capacity.items()}

    def stranded(self) -> tuple[LeaseRequest, ...]:
        """Requests larger than every present worker, by holder; as of the last `admit`."""
        return tuple(self._stranded[holder][1] for holder in sorted(self._stranded))

    def next_s(self, at_s: float) -> float | None:
        """Earliest time at which a quota refill may admit a request; None if no refill can."""
        times: list[float] = []
        for kinds in self._waiting.lines():
            first = self._waiting.first(kinds)
            assert first is not None
            times += [self._quotas[name].next_s(at_s, units) for name, units in first[1].least.quotas]
        return min((each for each in times if at_s < each < float("inf")), default=None)

    def expected_s(self, tool: str) -> float | None:
        """Mean seconds of an action of ``tool`` with its least cores, once one has ended."""
        return self._seconds.get(tool)

    # ---------------------------------------------------------------- admission

    def admit(self, at_s: float) -> tuple[Lease | Revoke, ...]:
        """Grant what fits, in order, and enlarge; then revoke for the first that does not fit."""
        granted: list[str] = []
        passed: list[tuple[LeaseRequest, frozenset[str]]] = []
        lines = {kinds: first for kinds in self._waiting.lines() if (first := self._waiting.first(kinds))}
        blocked: frozenset[str] = frozenset()
        while lines:
            kinds = min(lines, key=lambda each: lines[each][0]) if len(lines) > 1 else next(iter(lines))
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

    def _find(self, request: LeaseRequest, at_s: float) -> tuple[str | None, frozenset[str]]:
        """The worker for a request, or the kinds that it lacks; neither if none is large enough."""
        need = request.least.local
        fits: list[str] = []
        able, lacks = False, set[str]()
        for worker, capacity in self._capacity.items():
            if any(has < want for has, want in zip(capacity, need, strict=True)):
                continue
            free = self._free[worker]
            able = True
            short = [kind for kind, has, want in zip(KINDS, free, need, strict=True) if has < want]
            lacks.update(short)
            if not short:
                fits.append(worker)
        if not able:
            return None, frozenset()
        short_of = {quota_kind(name) for name, units in request.least.quotas if not self._quotas[name].may(at_s, units)}
        if short_of or not fits:
            return None, frozenset(short_of if fits else lacks | short_of)
        if request.home in fits:
            return request.home, frozenset()
        free_of = self._free
        if request.tool in self._curves or not need[CORES]:  # most room
            return max(fits, key=lambda worker: (free_of[worker], worker)), frozenset()
        return min(fits, key=lambda worker: (free_of[worker][CORES], worker)), frozenset()  # best fit

    def _grant(self, request: LeaseRequest, worker: str, at_s: float) -> None:
        least = request.least
        for index, amount in enumerate(least.local):
            self._free[worker][index] -= amount
        for name, units in least.quotas:
            self._quotas[name].take(at_s, units)
        reason = "home" if worker == request.home else f"fits: {described(least)}"
        self._leases[request.holder] = Lease(
            request.holder, worker, least, least.cores, request.tool, at_s, request.revocable, reason
        )  # fmt: skip

    def _enlarge(self, granted: list[str]) -> None:
        leases = [lease for lease in map(self._leases.__getitem__, granted) if lease.tool in self._curves]
        candidates = [
            Candidate(
                each.holder, each.worker, each.resources.cores, each.least_cores, self._curves[each.tool],
                self.expected_s(each.tool) or 1.0,
            )
            for each in leases
        ]  # fmt: skip
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

    def _revocations(self, request: LeaseRequest, lacks: frozenset[str], at_s: float) -> tuple[Revoke, ...]:
        """Leases to revoke for the first request that does not fit, once, not for a quota."""
        seconds = self.expected_s(request.tool) if request.tool else None
        if seconds is None or not lacks <= set(KINDS) or request.holder in self._first:
            return ()
        if not any(lease.revocable for lease in self._leases.values()):
            return ()
        need = request.least.local
        free = {
            worker: amounts
            for worker, amounts in self._free.items()
            if all(has >= want for has, want in zip(self._capacity[worker], need, strict=True))
        }
        running = [self._running(lease, at_s) for lease in self._leases.values()]
        price = self._waiting.wanting("cores") / max(1, self._total_cores())  # they wait longer
        found = stopped_for(need, seconds, free, running, price)
        if found is None:
            return ()
        self._revoking.update(found.holders)
        self._first.add(request.holder)
        self._serial += 1
        self._waiting.join((FIRST, self._serial), request)
        reason = (
            f"{request.holder} needs {described(request.least)}, and would wait {found.saved_s:.3g} s; beginning again costs "
            f"{found.cost_s:.3g} s"
        )
        return tuple(
            Revoke(holder, found.worker, round(at_s - self._leases[holder].granted_s, 6), reason)
            for holder in found.holders
        )

    def _running(self, lease: Lease, at_s: float) -> Running:
        """A lease as far as it can be forecast; one that is revoked already is about to end."""
        has, seconds = lease.resources.local, self.expected_s(lease.tool) if lease.tool else None
        if seconds is None or lease.holder in self._revoking:
            return Running(lease.holder, lease.worker, has, has, 0.0, None)
        again_s: Callable[[int], float] = partial(self._seconds_on, lease.tool, seconds)
        left_s = max(0.0, again_s(lease.resources.cores) - (at_s - lease.granted_s))
        least = lease.resources.with_cores(lease.least_cores).local
        return Running(lease.holder, lease.worker, has, least, left_s, again_s if lease.revocable else None)

    def _seconds_on(self, tool: str, seconds: float, cores: int) -> float:
        curve = self._curves.get(tool)
        return seconds if curve is None else seconds / curve.speed(cores)

    # ---------------------------------------------------------------- bookkeeping

    def _leave(self, holder: str) -> None:
        self._waiting.leave(holder)
        self._stranded.pop(holder, None)
        self._kept.pop(holder, None)

    def _end(self, lease: Lease) -> None:
        del self._leases[lease.holder]
        self._revoking.discard(lease.holder)
        free = self._free.get(lease.worker)
        if free is not None:
            for index, amount in enumerate(lease.resources.local):
                free[index] += amount
        for name, units in lease.resources.quotas:
            self._quotas[name].give_back(units)

    def _learn(self, lease: Lease, seconds: float, status: str) -> None:
        """Learn from an action: its tool's mean however it ended, its curve if it returned."""
        curve = self._curves.get(lease.tool)
        if curve is not None and status in RETURNED:
            curve.ended(lease.resources.cores, seconds)
        if curve is not None and status not in CUT_OFF:
            seconds *= curve.speed(lease.resources.cores)
        mean = self._seconds.get(lease.tool, seconds)
        self._seconds[lease.tool] = round(mean + FORGETTING * (seconds - mean), 9)


def _vector(amounts: tuple[int, ...]) -> Resources:
    slots, cores, memory_bytes, gpus = amounts
    return Resources(slots, cores, memory_bytes, gpus)

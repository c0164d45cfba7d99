"""One phase of the dispatcher: waiting trajectories in order, free slots, running trajectories."""

from __future__ import annotations

import heapq
from collections.abc import Sized

import msgspec

from libra.facts import Priority
from libra.policy.engine_capacity import Move
from libra.policy.engine_table import Trajectory
from libra.policy.leases.resources import Lease
from libra.types import Phase


class Place(msgspec.Struct, frozen=True, gc=False):
    """Give a parked trajectory a slot on ``worker``, with the price of its move and its lease."""

    key: str
    phase: Phase
    worker: str
    reason: str
    move: Move | None = None
    lease: Lease | None = None


Entry = tuple[Priority, int, Trajectory]  # valid while its serial is the record's


class Order:
    """A heap over ``waiting``; stale entries are dropped when they reach the top."""

    def __init__(self, waiting: Sized) -> None:
        self._heap: list[Entry] = []
        self._waiting = waiting

    def push(self, entry: Entry) -> None:
        heapq.heappush(self._heap, entry)
        if len(self._heap) > 64 + 4 * len(self._waiting):
            self._heap = [each for each in self._heap if each[2].serial == each[1]]
            heapq.heapify(self._heap)

    def first(self) -> Entry | None:
        heap = self._heap
        while heap and heap[0][2].serial != heap[0][1]:
            heapq.heappop(heap)
        return heap[0] if heap else None

    def first_few(self, count: int) -> list[Entry]:
        """Up to ``count`` first entries in order, without removing them."""
        taken: list[Entry] = []
        while len(taken) < count and (entry := self.first()) is not None:
            taken.append(heapq.heappop(self._heap))
        for entry in taken:
            heapq.heappush(self._heap, entry)
        return taken


class PhaseQueue:
    """One phase; ``overfull`` workers supply fewer slots than are taken."""

    def __init__(self) -> None:
        self.waiting: dict[str, Priority] = {}
        self.all_waiting, self.anywhere = Order(self.waiting), Order(self.waiting)
        self.at_home: dict[str, Order] = {}
        self.in_bucket: dict[str, Order] = {}
        self.waiting_at: dict[str, int] = {}
        self.slots: dict[str, int] = {}
        self.free: dict[str, int] = {}
        self.running: dict[str, str] = {}
        self.taken: dict[str, int] = {}
        self.overfull: set[str] = set()

    def push(self, one: Trajectory, priority: Priority, serial: int) -> Entry:
        one.serial = serial
        self.waiting[one.key] = priority
        entry = (priority, serial, one)
        self.all_waiting.push(entry)
        return entry

    def push_at(self, entry: Entry, home: str) -> None:
        one = entry[2]
        if one.waits_at != home:
            one.waits_at = home
            self.waiting_at[home] = self.waiting_at.get(home, 0) + 1
        self._order(self.at_home, home).push(entry)
        for bucket in one.buckets:
            self._order(self.in_bucket, bucket).push(entry)

    def _order(self, orders: dict[str, Order], name: str) -> Order:
        found = orders.get(name)
        if found is None:
            found = orders[name] = Order(self.waiting)
        return found

    def leave(self, one: Trajectory) -> None:
        if self.waiting.pop(one.key, None) is None:
            return
        one.serial = 0
        home, one.waits_at = one.waits_at, ""
        if home:
            self.waiting_at[home] -= 1
            if not self.waiting_at[home]:
                del self.waiting_at[home]

    def supply(self, worker: str, slots: int) -> None:
        """Set the slots of ``worker``; while more are taken it gets no task."""
        self.slots[worker] = slots
        self._room(worker)

    def take(self, key: str, worker: str) -> None:
        self.running[key] = worker
        self.taken[worker] = self.taken.get(worker, 0) + 1
        self._room(worker)

    def give_back(self, key: str) -> None:
        worker = self.running.pop(key, None)
        if worker is not None:
            self.taken[worker] -= 1
            self._room(worker)

    def lose(self, worker: str) -> None:
        self.slots.pop(worker, None)
        self.free.pop(worker, None)
        for key in [key for key, at in self.running.items() if at == worker]:
            del self.running[key]
        self.taken.pop(worker, None)
        self.overfull.discard(worker)

    def _room(self, worker: str) -> None:
        count = self.slots.get(worker, 0) - self.taken.get(worker, 0)
        if count > 0:
            self.free[worker] = count
        else:
            self.free.pop(worker, None)
        if count < 0 and worker in self.slots:
            self.overfull.add(worker)
        else:
            self.overfull.discard(worker)

"""One phase of the dispatcher: who waits in which order, slots that are free, and what runs."""

from __future__ import annotations

import heapq

from libra.facts import Priority

Entry = tuple[Priority, int, str]


class Order:
    """A heap of waiting keys; an entry that was replaced, or whose key left, is dropped when it reaches the top."""

    def __init__(self, serials: dict[str, int]) -> None:
        self._heap: list[Entry] = []
        self._serials = serials

    def push(self, entry: Entry) -> None:
        heapq.heappush(self._heap, entry)
        if len(self._heap) > 64 + 4 * len(self._serials):
            self._heap = [e for e in self._heap if self._serials.get(e[2]) == e[1]]
            heapq.heapify(self._heap)

    def first(self) -> Entry | None:
        heap, serials = self._heap, self._serials
        while heap and serials.get(heap[0][2]) != heap[0][1]:
            heapq.heappop(heap)
        return heap[0] if heap else None

    def first_few(self, count: int) -> list[Entry]:
        """Up to ``count`` entries in order; they stay."""
        taken: list[Entry] = []
        while len(taken) < count and (entry := self.first()) is not None:
            taken.append(heapq.heappop(self._heap))
        for entry in taken:
            heapq.heappush(self._heap, entry)
        return taken


class PhaseQueue:
    """One phase: waiting trajectories, free slots, and what runs."""

    def __init__(self) -> None:
        self.serials: dict[str, int] = {}
        self.waiting: dict[str, Priority] = {}
        self.all_waiting = Order(self.serials)
        self.anywhere = Order(self.serials)
        self.at_home: dict[str, Order] = {}
        self.in_bucket: dict[str, Order] = {}
        self.waiting_at: dict[str, int] = {}
        self.home_of: dict[str, str] = {}  # of those that wait in ``at_home``
        self.slots: dict[str, int] = {}
        self.free: dict[str, int] = {}
        self.running: dict[str, str] = {}
        self.taken: dict[str, int] = {}
        self.overfull: set[str] = set()  # workers with fewer slots than are taken

    def leave(self, key: str) -> None:
        """``key`` no longer waits here."""
        if self.serials.pop(key, None) is None:
            return
        del self.waiting[key]
        home = self.home_of.pop(key, None)
        if home is not None:
            self.waiting_at[home] -= 1
            if not self.waiting_at[home]:
                del self.waiting_at[home]

    def supply(self, worker: str, slots: int) -> None:
        """``worker`` has ``slots`` slots from now on; if more are taken, it gets no task until enough are free."""
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


def order_of(orders: dict[str, Order], name: str, serials: dict[str, int]) -> Order:
    found = orders.get(name)
    if found is None:
        found = orders[name] = Order(serials)
    return found

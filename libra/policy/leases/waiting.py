"""Requests that wait, in their order, by the kinds that they want."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from libra.facts import Priority
from libra.policy.leases.resources import LeaseRequest

Place = tuple[Priority, int]
"""The order of a request: its priority, then its arrival."""
Kinds = frozenset[str]


class WaitingRequests:
    """Every request with its place; those of the same kinds form a line."""

    def __init__(self) -> None:
        self._requests: dict[str, tuple[Place, LeaseRequest]] = {}
        self._lines: dict[Kinds, list[tuple[Place, str]]] = {}
        self._with: dict[str, int] = {}  # waiting requests by kind

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, holder: object) -> bool:
        return holder in self._requests

    def __iter__(self) -> Iterator[LeaseRequest]:
        """In no order."""
        return (request for _, request in self._requests.values())

    def wanting(self, kind: str) -> int:
        """How many want some of ``kind``."""
        return self._with.get(kind, 0)

    def join(self, place: Place, request: LeaseRequest) -> None:
        """``request`` waits at ``place``, in place of an earlier one of its holder."""
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
        """``holder`` no longer waits; returns its request."""
        _, request = self._requests.pop(holder, (None, None))
        if request is not None:
            for kind in request.least.kinds:
                self._with[kind] -= 1
        return request

    def request(self, holder: str) -> LeaseRequest | None:
        """The request of ``holder``, if it waits."""
        return self._requests[holder][1] if holder in self._requests else None

    def lines(self) -> list[Kinds]:
        """The kinds of every line with a request, by the place of its first."""
        heads = [(line[0], kinds) for kinds in list(self._lines) if (line := self._line(kinds))]
        return [kinds for _, kinds in sorted(heads, key=lambda head: head[0])]

    def first(self, kinds: Kinds) -> tuple[Place, LeaseRequest] | None:
        """The first of a line; None: it is empty."""
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

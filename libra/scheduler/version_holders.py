"""The workers that hold each version of a run's weights, and the order in which another worker should query them. Pure.

Invariants
1. A holder is named only for versions that it reported, and no longer once it has left.
2. Nearest first: the worker's own host, then other rollout workers, then the trainer, which many requests would slow down.
   Among equals the least often named come first, so that a version spreads as a tree.
"""

from __future__ import annotations

from collections import Counter
from urllib.parse import urlsplit

Address = tuple[str, int]
"""Host and port of a worker's weight server."""


class Holders:
    """The holders of one run; workers are known by their Dask address."""

    def __init__(self) -> None:
        self._at: dict[str, Address] = {}
        self._trainers: set[str] = set()
        self._versions: dict[int, set[str]] = {}
        self._digests: dict[int, str] = {}
        self._named: Counter[str] = Counter()

    def offers(self, worker: str, at: Address | None, *, trains: bool = False) -> None:
        """``worker`` has a weight server ``at``; None: it has none."""
        if at is not None:
            self._at[worker] = at
            if trains:
                self._trainers.add(worker)

    def has(self, worker: str, version: int, digest: str = "") -> None:
        """``worker`` has ``version`` now."""
        self._versions.setdefault(version, set()).add(worker)
        if digest:
            self._digests[version] = digest

    def digest(self, version: int) -> str | None:
        """Digest of a version; None if it was not reported."""
        return self._digests.get(version)

    def lost(self, worker: str) -> None:
        """``worker`` has left."""
        self._at.pop(worker, None)
        self._trainers.discard(worker)
        for holders in self._versions.values():
            holders.discard(worker)

    def nearest(self, version: int, worker: str) -> list[Address]:
        """Servers from which ``worker`` should fetch ``version``, nearest first."""
        here = urlsplit(worker).hostname
        found = [other for other in self._versions.get(version, ()) if other != worker and other in self._at]
        found.sort(
            key=lambda other: (
                urlsplit(other).hostname != here, other in self._trainers, self._named[other], other
            )
        )  # fmt: skip
        if found:
            self._named[found[0]] += 1
        return [self._at[other] for other in found]

"""KV of trajectories in the memory of hosts, from which any engine can fetch it: what Seer's pool does (arXiv:2511.14617)."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple


class HostPool(NamedTuple):
    """A pool: tokens of KV that all hosts hold together, and the price of a fetch, in seconds and seconds per token."""

    capacity_tokens: int
    latency_s: float
    token_s: float


class HostKv:
    """Tokens of KV by trajectory; the least recently stored are dropped first.

    A trajectory's KV is stored when its turn, or a part of it, ends; storing overlaps with steps and takes no time here. During a
    fetch the engine goes on with others.
    """

    def __init__(self, pool: HostPool) -> None:
        self.pool = pool
        self._tokens: OrderedDict[str, int] = OrderedDict()
        self.held_tokens = self.fetched_tokens = 0
        self._untold: list[tuple[int, float]] = []

    def tokens(self, key: str) -> int:
        """Tokens of KV that are held of a trajectory."""
        return self._tokens.get(key, 0)

    def fetch(self, tokens: int, prefill_s: float) -> float:
        """Seconds of a fetch of ``tokens`` that begins now; 0, and none begins, if computing them is sooner."""
        seconds = self.pool.latency_s + tokens * self.pool.token_s
        if seconds >= prefill_s:
            return 0.0
        self.fetched_tokens += tokens
        self._untold.append((tokens, seconds))
        return seconds

    def fetches(self) -> list[tuple[int, float]]:
        """Tokens and seconds of the fetches since the last call."""
        untold, self._untold = self._untold, []
        return untold

    def put(self, key: str, tokens: int) -> None:
        """Store a trajectory's KV instead of what is held of it."""
        self.drop(key)
        self._tokens[key] = tokens
        self.held_tokens += tokens
        while self.held_tokens > self.pool.capacity_tokens:
            self.drop(next(iter(self._tokens)))

    def drop(self, key: str) -> None:
        """The trajectory has ended."""
        self.held_tokens -= self._tokens.pop(key, 0)

    def clear(self) -> None:
        """New weights: no KV is used across versions."""
        self._tokens.clear()
        self.held_tokens = 0

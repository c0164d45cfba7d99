"""Rollout workers, what runs on each, and which engine holds each trajectory's KV; from the events alone.

Invariants
----------
1. A trajectory has at most one home, a present worker: the one where it generated last.
2. A worker that has left holds nothing.
3. ``restore(snapshot())`` changes no later answer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from libra.facts import (
    Fact,
    HomeForgotten,
    QuantumFinished,
    QuantumStarted,
    TrajectoryEnded,
    TrajectoryParked,
    WorkerCapacity,
    WorkerWithdrawn,
)
from libra.policy.snapshots import Saved
from libra.types import Phase

REMEMBERED = 0.95
"""Weight of an engine's past generations, relative to its newest, in the seconds that generations and tools take."""
MOST_OPEN = 8.0
"""Contexts under way are at most so many times what memory holds, however long tools take."""
_DEGREE = re.compile(r"(?:^|-)tp(\d+)(?:-|$)")


def degree_of(bucket: str) -> int:
    """Tensor-parallel degree in the name of a bucket (``tp4``, ``tp2-threads1``); 1 if it has none."""
    found = _DEGREE.search(bucket)
    return int(found[1]) if found else 1


@dataclass(slots=True)
class Host:
    """A worker with an engine: its declaration, and its present state.

    Attributes
    ----------
    spec : WorkerCapacity
    running : int
        Generations that run there.
    context_tokens : int
        Context of all trajectories at home there, running or not: the demand on its KV memory.
    residents : int
        Number of trajectories at home there.
    generated_s, tools_s : float
        Seconds that generations of those at home there took, without waits for memory, and their tools, inline or not; the newest
        with most weight. Of an engine that exchanges KV, else 0.
    declared : bool
    context_s_per_token : float
        Of ``spec``, which derives them; every comparison of engines reads them.
    """

    spec: WorkerCapacity
    running: int = 0
    context_tokens: int = 0
    residents: int = 0
    generated_s: float = 0.0
    tools_s: float = 0.0
    declared: bool = False
    context_s_per_token: float = 0.0

    def declare(self, spec: WorkerCapacity) -> None:
        """Take a new declaration."""
        self.spec, self.declared = spec, spec.declared
        self.context_s_per_token = spec.context_s_per_token if spec.declared else 0.0

    @property
    def open_tokens(self) -> float:
        """Tokens of context that may be under way there, 0 if not known: what its memory holds, and where KV is exchanged more by
        the seconds of tools over those of generations, for a context needs no memory while its tools run."""
        spec = self.spec
        if not spec.kv_token_bytes or not self.tools_s:
            return spec.kv_tokens
        return spec.kv_tokens * min(MOST_OPEN, 1.0 + self.tools_s / max(self.generated_s, 1e-9))

    def generation_s(self, tokens: int, most_s: float) -> float:
        """Seconds of ``tokens`` beside those that its memory holds, at most ``most_s``, which may include a wait for memory."""
        if not self.declared:
            return most_s
        fits = min(1.0, self.spec.kv_tokens / max(1, self.context_tokens))
        others = max(0, round(fits * self.running) - 1)
        return min(most_s, tokens * self.s_per_token(fits * self.context_tokens, others))

    def s_per_token(self, held_tokens: float, others: int) -> float:
        """Seconds per token beside ``others`` generations, with ``held_tokens`` of context in all; `spec` is declared."""
        spec = self.spec
        beside = min(others, max(0, spec.rollout_slots - 1))
        return spec.alone_s_per_token + spec.beside_s_per_token * beside + self.context_s_per_token * held_tokens


class Fleet(Saved):
    """Rollout workers by name, and the home of every trajectory."""

    SAVED = {
        "hosts": dict[str, Host],
        "home": dict[str, str],
        "context_tokens": dict[str, int],
        "_running": dict[str, str],
        "buckets": dict[str, list[str]],
        "silent": set[str],
        "max_context_tokens": int,
        "slot_tokens": float,
    }

    def __init__(self) -> None:
        self.hosts: dict[str, Host] = {}
        self.home: dict[str, str] = {}
        self.context_tokens: dict[str, int] = {}
        self._running: dict[str, str] = {}
        self.buckets: dict[str, list[str]] = {}
        self.silent: set[str] = set()  # workers whose engine has not declared itself
        self.max_context_tokens = 0  # of the engine that takes the longest contexts; 0: not known
        self.exchanging: list[Host] = []  # those whose engines exchange KV
        self.slot_tokens = 0.0  # KV of one slot, of the engine that has least; 0: not known

    def handle(self, event: Fact) -> None:
        """Follow one event."""
        # Type comparisons instead of match: every event comes here twice.
        if type(event) is TrajectoryParked:
            self._stopped(event.key)
            if event.context_tokens:
                self._grew(event.key, event.context_tokens - self.context_tokens.get(event.key, 0))
        elif type(event) is QuantumFinished:
            self._took(event)
            self._stopped(event.key)
            self._grew(event.key, event.tokens + event.payload_tokens)
        elif isinstance(event, QuantumStarted):
            if event.phase is Phase.ROLLOUT:
                self._started(event.key, event.worker)
        elif type(event) is TrajectoryEnded:
            self._stopped(event.key)
            self._moved(event.key, None)
            self.context_tokens.pop(event.key, None)
        elif type(event) is HomeForgotten:
            self._moved(event.key, None)
        elif type(event) is WorkerCapacity:
            if event.rollout_slots > 0:
                self._joined(event)
        elif type(event) is WorkerWithdrawn:
            self._left(event.worker)

    def _started(self, key: str, worker: str) -> None:
        self._stopped(key)
        self._moved(key, worker)
        if worker in self.hosts:
            self._running[key] = worker
            self.hosts[worker].running += 1

    def _took(self, event: QuantumFinished) -> None:
        host = self.hosts.get(self.home.get(event.key, ""))
        if host is None or not host.spec.kv_token_bytes:
            return
        if event.phase is Phase.TOOL:
            host.tools_s += event.latency_s
        else:
            own_s = host.generation_s(event.tokens, max(0.0, event.latency_s - event.tools_s))
            host.generated_s = REMEMBERED * host.generated_s + own_s
            host.tools_s = REMEMBERED * host.tools_s + min(event.tools_s, event.latency_s)

    def bucket_of(self, key: str) -> str | None:
        """Bucket of a trajectory's home; None if it has none."""
        home = self.home.get(key)
        return None if home is None else self.hosts[home].spec.bucket

    def of_degree(self, tp: int) -> list[str]:
        """Workers whose engines have this tensor-parallel degree, or the next higher one present; may be empty."""
        degrees = {bucket: degree_of(bucket) for bucket in self.buckets}
        least = min((degree for degree in degrees.values() if degree >= tp), default=None)
        return [worker for bucket, degree in degrees.items() if degree == least for worker in self.buckets[bucket]]

    def _joined(self, spec: WorkerCapacity) -> None:
        host = self.hosts.get(spec.worker)
        if host is None:
            host = self.hosts[spec.worker] = Host(spec)
        else:
            self._out_of_bucket(host.spec)
        host.declare(spec)
        self.buckets.setdefault(spec.bucket, []).append(spec.worker)
        (self.silent.discard if spec.declared else self.silent.add)(spec.worker)
        specs = [host.spec for host in self.hosts.values()]
        self.max_context_tokens = max(spec.max_context_tokens for spec in specs)
        self.exchanging = _exchanging(self.hosts)
        self.slot_tokens = min((s.kv_tokens / s.rollout_slots for s in specs if s.kv_tokens), default=0.0)

    def _out_of_bucket(self, spec: WorkerCapacity) -> None:
        names = self.buckets[spec.bucket]
        names.remove(spec.worker)
        if not names:
            del self.buckets[spec.bucket]

    def _left(self, worker: str) -> None:
        host = self.hosts.pop(worker, None)
        if host is None:
            return
        self.silent.discard(worker)
        self.exchanging = [other for other in self.exchanging if other is not host]
        self._out_of_bucket(host.spec)
        for table in (self.home, self._running):
            for key in [key for key, at in table.items() if at == worker]:
                del table[key]

    def _stopped(self, key: str) -> None:
        worker = self._running.pop(key, None)
        if worker is not None:
            self.hosts[worker].running -= 1

    def _grew(self, key: str, tokens: int) -> None:
        self.context_tokens[key] = self.context_tokens.get(key, 0) + tokens
        home = self.home.get(key)
        if home is not None:
            self.hosts[home].context_tokens += tokens

    def _moved(self, key: str, worker: str | None) -> None:
        old, tokens = self.home.get(key), self.context_tokens.get(key, 0)
        if old == worker:
            return
        if old is not None:
            del self.home[key]
            self.hosts[old].context_tokens -= tokens
            self.hosts[old].residents -= 1
        if worker in self.hosts:
            assert worker is not None
            self.home[key] = worker
            self.hosts[worker].context_tokens += tokens
            self.hosts[worker].residents += 1

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Take the state of ``snapshot``."""
        super().restore(snapshot)
        self.exchanging = _exchanging(self.hosts)


def _exchanging(hosts: Mapping[str, Host]) -> list[Host]:
    return [host for host in hosts.values() if host.spec.kv_token_bytes and host.spec.kv_tokens]

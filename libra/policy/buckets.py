"""Which buckets suit a trajectory: boundaries from the balance of loads, and moves only where they pay.

A bucket is a rollout capacity class, one tensor-parallel degree. The faster ones are for the longer trajectories: sorted by
forecast, longest first, the fastest bucket takes them until they make up its share of the fleet's capacity, then comes the
next. No fixed lengths: those overload one bucket and starve another as soon as lengths drift.

Differs from the paper (Libra, arXiv:2606.03077 v2, C-MLFQ), whose boundaries are fixed and whose moves are free of charge.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from libra.policy.fleet import Fleet, Host
from libra.policy.lives import NUM_CLASSES, length_class

PAYS_FACTOR = 2.0
"""A move must save this many times the seconds it costs: forecasts err, and two moves that cancel out must not pay."""
FASTER_FACTOR = 0.9
"""A bucket is faster than another where its seconds per token are below this share of the other's."""
REBALANCED_EVERY = 64
"""Changes of forecasts between two computations of the boundaries."""


class Buckets:
    """Load by length class over all trajectories under way, and what follows for each of them."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._load = [0.0] * NUM_CLASSES
        self._changes = 0
        self._edges: dict[str, int] = {}

    def changed(self, before_tokens: float, after_tokens: float) -> None:
        """A trajectory is believed to have ``after_tokens`` left, and was believed to have ``before_tokens``."""
        if before_tokens:
            self._load[length_class(before_tokens)] -= before_tokens
        if after_tokens:
            self._load[length_class(after_tokens)] += after_tokens
        self._changes += 1
        if self._changes % REBALANCED_EVERY == 1:
            self.rebalance()

    def rebalance(self) -> None:
        """Compute the boundaries anew."""
        buckets = self._fastest_first()
        capacity = {bucket: self._capacity(bucket) for bucket in buckets}
        load, total = sum(self._load), sum(capacity.values())
        self._edges = dict.fromkeys(buckets, 0)
        if load <= 0.0 or total <= 0.0:
            return
        length, reached, share = NUM_CLASSES, 0.0, 0.0
        for bucket in buckets:
            share += capacity[bucket] / total
            while length > 0 and reached < share * load:
                length -= 1
                reached += self._load[length]
            self._edges[bucket] = length

    @property
    def edges(self) -> dict[str, int]:
        """Lowest length class of each bucket, the fastest bucket first; below it the bucket only helps out."""
        return dict(self._edges)

    def suited(self, key: str, remaining_tokens: float) -> tuple[str, ...]:
        """Buckets that ``key`` should take slots of besides those of its home; before others where it has no home yet."""
        home = self._fleet.home.get(key)
        if home is None:
            return ()
        host = self._fleet.hosts[home]
        context = self._fleet.context_tokens.get(key, 0)
        return tuple(bucket for bucket in self._edges if self._pays(host, bucket, remaining_tokens, context))

    def _pays(self, host: Host, bucket: str, remaining_tokens: float, context_tokens: int) -> bool:
        """Whether the rest would be generated so much sooner on some engine of ``bucket`` that computing the context again pays."""
        hosts = self._fleet.hosts
        target = min((hosts[name] for name in self._fleet.buckets.get(bucket, ())), key=_token_s, default=host)
        if target is host:
            return False
        there_s, here_s = target.token_s(context_tokens), host.token_s()
        if there_s >= FASTER_FACTOR * here_s:
            return False
        return remaining_tokens * (here_s - there_s) > PAYS_FACTOR * context_tokens * target.spec.prefill_token_s

    def _fastest_first(self) -> list[str]:
        fleet = self._fleet
        return sorted(fleet.buckets, key=lambda bucket: (fleet.hosts[fleet.buckets[bucket][0]].spec.token_s, bucket))

    def _capacity(self, bucket: str) -> float:
        """Tokens per second of a bucket whose slots are all taken; 0 where its speed is not known."""
        specs = [self._fleet.hosts[name].spec for name in self._fleet.buckets[bucket]]
        return sum(spec.rollout_slots / spec.token_full_s for spec in specs if spec.token_full_s > 0.0)

    def snapshot(self) -> dict[str, Any]:
        """Everything it knows, as values that JSON can hold."""
        return {"load": list(self._load), "changes": self._changes, "edges": list(map(list, self._edges.items()))}

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Know what ``snapshot`` says and nothing else."""
        self._load = [float(load) for load in snapshot["load"]]
        self._changes = int(snapshot["changes"])
        self._edges = {str(bucket): int(edge) for bucket, edge in snapshot["edges"]}


def _token_s(host: Host) -> float:
    return host.token_s()

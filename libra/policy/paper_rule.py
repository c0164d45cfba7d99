"""The published rule, for comparison: a prefix tree of tool returns, and a move if mean and P90 fall into one bucket.

Source: Libra, arXiv:2606.03077 v2, C-MLFQ, with additions of its released code (NetX-lab/Libra @c51bf84): one root per
prompt and a global one; an unknown state falls back to the deepest known ancestor. Deviations, beside those of
`libra.policy.prefix_tree`: placement goes through `libra.policy.dispatcher`, which is work conserving, instead of a router that
queues at one server; prompts are forgotten with their last trajectory.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from typing import Any, ClassVar

from libra.facts import Fact, Prefer, QuantumFinished, SetPriority, TrajectoryEnded, TrajectoryParked
from libra.policy.fifo import Fifo
from libra.policy.fleet import Fleet
from libra.policy.prefix_tree import Node, dump, load, state_name
from libra.types import Phase

THRESHOLDS = {2: (5_000,), 3: (4_000, 12_000), 4: (4_000, 12_000, 30_000)}
"""Longest remaining output of each bucket but the last, by number of buckets; its defaults and its production settings."""


class PaperRule:
    """First come, first served, with buckets by the prefix tree; every trajectory begins in the slowest bucket."""

    name: ClassVar[str] = "paper"

    def __init__(self) -> None:
        self._fifo = Fifo()
        self._fleet = Fleet()
        self._root = Node()
        self._prompts: dict[str, Node] = {}
        self._alive: dict[str, int] = {}
        self._paths: dict[str, tuple[str, list[str], list[int]]] = {}  # group, states, tokens generated before each

    def handle(self, event: Fact) -> tuple[SetPriority | Prefer, ...]:
        """Answer one event; deterministic in the sequence of events."""
        self._fleet.handle(event)
        answers = self._fifo.handle(event)
        match event:
            case TrajectoryParked(key=key, phase=phase, group=group):
                if key not in self._paths:
                    self._paths[key] = (group, [], [0])
                    self._alive[group] = self._alive.get(group, 0) + 1
                if phase is Phase.ROLLOUT:
                    return (*answers, *self._prefer(key))
            case QuantumFinished(key=key) if key in self._paths:
                self._returned(event)
            case TrajectoryEnded(key=key) if key in self._paths:
                self._ended(key, event.completed)
        return answers

    def _returned(self, event: QuantumFinished) -> None:
        _, states, generated = self._paths[event.key]
        generated[-1] += event.tokens
        if event.status:
            states.append(state_name(event.tool, event.status, event.payload_tokens))
            generated.append(generated[-1])

    def _ended(self, key: str, completed: bool) -> None:
        group, states, generated = self._paths.pop(key)
        if completed and states:
            trees = [self._root]
            if group:
                trees.append(self._prompts.setdefault(group, Node()))
            for node in trees:
                node.enter(states, (generated[-1] - before for before in generated[: len(states)]))
        self._alive[group] -= 1
        if not self._alive[group]:
            del self._alive[group]
            self._prompts.pop(group, None)

    def _prefer(self, key: str) -> tuple[Prefer, ...]:
        buckets = self._slowest_first()
        if len(buckets) < 2:
            return ()
        group, states, _ = self._paths[key]
        home = self._fleet.bucket_of(key)
        if home is None:
            return (Prefer(key, (buckets[0],), "paper: everybody begins in the slowest bucket"),)
        node = self._prompts.get(group, self._root).deepest(states)
        if not node.count:
            return ()
        edges = THRESHOLDS.get(len(buckets), THRESHOLDS[4])
        by_mean, by_p90 = bisect_left(edges, node.mean), bisect_left(edges, node.p90())
        if by_mean != by_p90 or buckets[by_mean] == home:
            return ()
        return (Prefer(key, (buckets[by_mean],), f"paper: mean {int(node.mean)} and P90 are in one bucket"),)

    def _slowest_first(self) -> list[str]:
        fleet = self._fleet
        return sorted(
            fleet.buckets, key=lambda bucket: (-fleet.hosts[fleet.buckets[bucket][0]].spec.alone_s_per_token, bucket)
        )

    def snapshot(self) -> dict[str, Any]:
        """Its state, as JSON-able values."""
        return {
            "fifo": self._fifo.snapshot(),
            "fleet": self._fleet.snapshot(),
            "root": dump(self._root),
            "prompts": {group: dump(node) for group, node in sorted(self._prompts.items())},
            "alive": dict(sorted(self._alive.items())),
            "paths": {key: [group, states, tokens] for key, (group, states, tokens) in sorted(self._paths.items())},
        }

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Take the state of ``snapshot``; KeyError, TypeError or ValueError if it is not a snapshot."""
        self._fifo.restore(snapshot["fifo"])
        self._fleet.restore(snapshot["fleet"])
        self._root = load(snapshot["root"])
        self._prompts = {group: load(node) for group, node in snapshot["prompts"].items()}
        self._alive = {str(group): int(count) for group, count in snapshot["alive"].items()}
        self._paths = {
            str(key): (str(group), [str(s) for s in states], [int(t) for t in tokens])
            for key, (group, states, tokens) in snapshot["paths"].items()
        }

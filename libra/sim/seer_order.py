"""Seer's order (arXiv:2511.14617 v3): a probe of every group first, then the groups that are expected to be longest.

Differs from the paper: it has a starvation guard, and it says where a request goes; here the dispatcher does, as for every order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from libra.facts import Fact, Priority, QuantumFinished, SetPriority, TrajectoryEnded, TrajectoryParked
from libra.policy.trajectory_table import NUM_CLASSES, length_class


class SeerOrder:
    """The first member of a group is its probe; probes go first, those with fewest tokens before others. A group is expected to be
    as long as its longest member that has ended, and as long as can be before one has."""

    name: ClassVar[str] = "seer"

    def __init__(self) -> None:
        self._members: dict[str, dict[str, int]] = {}  # of each group, in order of arrival: tokens generated
        self._probe: dict[str, str] = {}
        self._longest: dict[str, int] = {}  # of its members that have ended
        self._group: dict[str, str] = {}
        self._iteration: dict[str, int] = {}
        self._arrival: dict[str, int] = {}

    def handle(self, event: Fact) -> tuple[SetPriority, ...]:
        """Answer one event."""
        match event:
            case TrajectoryParked(key=key, iteration=iteration, group=group):
                if key not in self._group:
                    self._group[key], self._iteration[key], self._arrival[key] = group, iteration, len(self._arrival)
                    self._members.setdefault(group, {})[key] = 0
                    self._probe.setdefault(group, key)
                return (self._placed(key),)
            case QuantumFinished(key=key, tokens=tokens) if key in self._group:
                self._members[self._group[key]][key] += tokens
            case TrajectoryEnded(key=key) if key in self._group:
                group = self._group.pop(key)
                members = self._members[group]
                self._longest[group] = max(self._longest.get(group, 0), members.pop(key))
                return tuple(self._placed(member) for member in members)
        return ()

    def _placed(self, key: str) -> SetPriority:
        group = self._group[key]
        longest = self._longest.get(group)
        if longest is None and self._probe[group] == key:
            place = Priority(self._iteration[key], 0, self._members[group][key])
            return SetPriority(key, place, "seer: probe of its group")
        level = 1 if longest is None else 1 + NUM_CLASSES - length_class(longest)
        reason = (
            "seer: nobody of its group has ended" if longest is None else f"seer: its group has up to {longest} tokens"
        )
        return SetPriority(key, Priority(self._iteration[key], level, self._arrival[key]), reason)

    def snapshot(self) -> dict[str, Any]:
        """Its state, as JSON-able values."""
        return {
            "members": self._members,
            "probe": self._probe,
            "longest": self._longest,
            "group": self._group,
            "iteration": self._iteration,
            "arrival": self._arrival,
        }

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Take the state of ``snapshot``."""
        self._members = {group: dict(members) for group, members in snapshot["members"].items()}
        self._probe, self._longest = dict(snapshot["probe"]), dict(snapshot["longest"])
        self._group, self._iteration = dict(snapshot["group"]), dict(snapshot["iteration"])
        self._arrival = dict(snapshot["arrival"])

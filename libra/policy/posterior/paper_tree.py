"""The paper's causal prefix tree, as its published code does it, for comparison (Libra, arXiv:2606.03077 v2, C-MLFQ).

A node is a prompt and the path of tool-return states (tool, payload class, status) so far; it holds the mean and the 90th
percentile of the remaining length there. A prompt that was never seen falls back to one root over all prompts; a path that
was not, to its deepest known ancestor, whose statistics are of the remaining length *there*. One visit is enough to be
believed, nothing is forgotten, trajectories without tools are not entered. The mean is over all visits, the percentile over
the last 200. Only the persistence of the published code is left out: memory grows with every trajectory, as there.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from libra.policy.forecast import Forecast
from libra.policy.posterior.columns import PAYLOAD_TOKENS
from libra.policy.posterior.tracks import State, Track, Tracker

RECENT = 200
"""Visits that the percentile is taken over."""


class _Node:
    __slots__ = ("children", "count", "mean", "recent")

    def __init__(self) -> None:
        self.children: dict[str, _Node] = {}
        self.count = 0
        self.mean = 0.0
        self.recent: list[int] = []

    def visit(self, left: int) -> None:
        self.count += 1
        self.mean += (left - self.mean) / self.count
        self.recent.append(left)
        del self.recent[:-RECENT]


def _name(state: State) -> str:
    tool, status, payload = state
    size = "short" if payload <= PAYLOAD_TOKENS[0] else "medium" if payload <= PAYLOAD_TOKENS[1] else "long"
    return f"{tool}:{size}:{'success' if status == 'success' else 'failure'}"


class PaperTree(Tracker):
    """See the module. Its skill is 0: the published code does not measure any; the paper's policy does not ask for it."""

    def __init__(self) -> None:
        super().__init__()
        self._root = _Node()
        self._prompts: dict[str, _Node] = {}

    def _learn(self, track: Track) -> None:
        if not track.states:
            return
        for node in (self._root, self._prompts.setdefault(track.group, _Node())):
            node.visit(track.tokens)
            for state, mark in zip(track.states, track.marks[1:], strict=True):
                node = node.children.setdefault(_name(state), _Node())
                node.visit(track.tokens - mark)

    def _node(self, track: Track) -> _Node:
        node = self._prompts.get(track.group, self._root)
        for state in track.states:
            below = node.children.get(_name(state))
            if below is None:
                break
            node = below
        return node

    def _forecast(self, track: Track) -> Forecast:
        mean = self._node(track).mean
        return Forecast(mean, mean, 0.0)

    def mean_and_p90(self, key: str) -> tuple[float, float]:
        """Both statistics of the node that a live trajectory is at; the paper moves it only where both fall in one bucket.

        (inf, inf) before anything has finished. KeyError as `remaining`.
        """
        node = self._node(self._tracks[key])
        return (node.mean, float(np.percentile(node.recent, 90))) if node.count else (math.inf, math.inf)

    def _learned(self) -> Any:
        return {
            "root": _dump(self._root),
            "prompts": [[group, _dump(node)] for group, node in self._prompts.items()],
        }

    def _load(self, learned: Any) -> None:
        self._root = _load(learned["root"])
        self._prompts = {str(group): _load(node) for group, node in learned["prompts"]}


def _dump(root: _Node) -> list[Any]:
    """Nodes in order of depth first, each with the number of its parent; flat, since paths get deeper than recursion may."""
    out: list[Any] = []
    open_nodes: list[tuple[int, str, _Node]] = [(-1, "", root)]
    while open_nodes:
        parent, name, node = open_nodes.pop()
        number = len(out)
        out.append([parent, name, node.count, node.mean, list(node.recent)])
        open_nodes += [(number, below, child) for below, child in node.children.items()]
    return out


def _load(dumped: Any) -> _Node:
    nodes: list[_Node] = []
    for parent, name, count, mean, recent in dumped:
        node = _Node()
        node.count, node.mean, node.recent = int(count), float(mean), [int(left) for left in recent]
        nodes.append(node)
        if parent >= 0:
            nodes[parent].children[str(name)] = node
    return nodes[0]

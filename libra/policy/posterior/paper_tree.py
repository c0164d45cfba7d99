"""The paper's causal prefix tree, as its published code does it, for comparison (Libra, arXiv:2606.03077 v2, C-MLFQ).

A node is a prompt and the path of tool-return states (tool, payload class, status) so far; it holds the mean and the 90th
percentile of the remaining length there. A prompt that was never seen falls back to one root over all prompts; a path that
was not, to its deepest known ancestor, whose statistics are of the remaining length *there*. One visit is enough to be
believed, nothing is forgotten, trajectories without tools are not entered (`libra.policy.prefix_tree`). Only the
persistence of the published code is left out: memory grows with every trajectory, as there.
"""

from __future__ import annotations

import math
from typing import Any

from libra.policy.forecast import Forecast
from libra.policy.posterior.progress_table import Track, Tracker
from libra.policy.prefix_tree import Node, dump, load, state_name


class PaperTree(Tracker):
    """See the module. Its skill is 0: the published code does not measure any; the paper's policy does not ask for it."""

    def __init__(self) -> None:
        super().__init__()
        self._root = Node()
        self._prompts: dict[str, Node] = {}

    def _learn(self, track: Track) -> None:
        if not track.states:
            return
        for node in (self._root, self._prompts.setdefault(track.group, Node())):
            node.visit(track.tokens)
            node.enter(
                (state_name(*state) for state in track.states), (track.tokens - mark for mark in track.marks[1:])
            )

    def _node(self, track: Track) -> Node:
        return self._prompts.get(track.group, self._root).deepest(state_name(*state) for state in track.states)

    def _forecast(self, track: Track) -> Forecast:
        mean = self._node(track).mean
        return Forecast(mean, mean, 0.0)

    def mean_and_p90(self, key: str) -> tuple[float, float]:
        """Both statistics of the node that a live trajectory is at; the paper moves it only where both fall in one bucket.

        (inf, inf) before anything has finished. KeyError as `remaining`.
        """
        node = self._node(self._tracks[key])
        return (node.mean, node.p90()) if node.count else (math.inf, math.inf)

    def _learned(self) -> Any:
        return {
            "root": dump(self._root),
            "prompts": [[group, dump(node)] for group, node in self._prompts.items()],
        }

    def _load(self, learned: Any) -> None:
        self._root = load(learned["root"])
        self._prompts = {str(group): load(node) for group, node in learned["prompts"]}

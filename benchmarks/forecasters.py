"""Forecasters that the posterior is compared with: the global mean, the turn index, progress alone, the paper's prefix tree.

The true lengths are `benchmarks.orderings.KnownLengths`. `PaperTree` is the tree of the published code
(Libra, arXiv:2606.03077 v2, C-MLFQ; `benchmarks.prefix_tree`): a node is a prompt and the path of tool
returns so far. An unseen prompt falls back to one root over all prompts, an unseen path to its deepest
known ancestor, whose mean is of the remaining length *there*.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from benchmarks.prefix_tree import Node, state_name
from libra.facts import Fact, QuantumFinished, TrajectoryEnded, TrajectoryParked
from libra.policy.forecast import Forecast
from libra.policy.posterior import Posterior
from libra.types import ToolStatus

LAST_TURN = 100
"""Turns from here on share a mean."""
PRIOR_ROWS = 20.0
"""Rows' worth of evidence that a turn is like all others."""


class Track:
    """A running trajectory: tokens so far, tokens at the start (0) and at each return, and (tool, status, payload) of each."""

    def __init__(self, group: str) -> None:
        self.group = group
        self.tokens = 0
        self.marks = [0]
        self.states: list[tuple[str, ToolStatus, int]] = []


class Tracker(ABC):
    """Follows running trajectories; subclasses learn from an ended track and forecast from a running one."""

    def __init__(self) -> None:
        self._tracks: dict[str, Track] = {}

    def handle(self, event: Fact) -> None:
        """Learn from one event."""
        match event:
            case QuantumFinished(key=key, tokens=tokens, status=status):
                track = self._tracks.get(key)
                if track is not None:
                    track.tokens += tokens
                    if status:
                        track.marks.append(track.tokens)
                        track.states.append((event.tool, ToolStatus(status), event.payload_tokens))
            case TrajectoryParked(key=key):
                if key not in self._tracks:
                    self._tracks[key] = Track(event.group)
            case TrajectoryEnded(key=key, completed=completed):
                track = self._tracks.pop(key, None)
                if track is not None and completed:
                    self._learn(track)

    def learn(self) -> None:  # noqa: B027
        """Everything is learned when it comes."""

    def remaining(self, key: str) -> Forecast:
        """Forecast for a running trajectory; KeyError for one never parked or already ended."""
        return self._forecast(self._tracks[key])

    @abstractmethod
    def _learn(self, track: Track) -> None: ...

    @abstractmethod
    def _forecast(self, track: Track) -> Forecast: ...


class TurnIndex(Tracker):
    """The mean remaining length after as many turns, shrunk towards the global mean."""

    prior_rows = PRIOR_ROWS

    def __init__(self) -> None:
        super().__init__()
        self._turns = [[0.0, 0.0, 0.0] for _ in range(LAST_TURN + 1)]  # rows, tokens, logarithms
        self._all = [0.0, 0.0, 0.0]

    def _learn(self, track: Track) -> None:
        for turn, tokens in enumerate(track.marks):
            left = track.tokens - tokens
            if left >= 1:
                for sums in (self._turns[min(turn, LAST_TURN)], self._all):
                    for i, value in enumerate((1.0, left, math.log(left))):
                        sums[i] += value

    def _forecast(self, track: Track) -> Forecast:
        rows, tokens, logs = self._all
        if not rows:
            return Forecast(1.0, 1.0, 0.0)
        here = self._turns[min(len(track.marks) - 1, LAST_TURN)]
        if math.isinf(self.prior_rows):
            return Forecast(tokens / rows, math.exp(logs / rows), 0.0)
        visits = here[0] + self.prior_rows
        mean = (here[1] + self.prior_rows * tokens / rows) / visits
        return Forecast(mean, math.exp((here[2] + self.prior_rows * logs / rows) / visits), 0.0)


class GlobalMean(TurnIndex):
    """The mean remaining length over all returns so far, whatever the trajectory."""

    prior_rows = math.inf


class PaperTree(Tracker):
    """See the module. Skill 0: the published code measures none. Its persistence is left out: memory grows, as there."""

    def __init__(self) -> None:
        super().__init__()
        self._root = Node()
        self._prompts: dict[str, Node] = {}

    def _learn(self, track: Track) -> None:
        if track.states:
            for node in (self._root, self._prompts.setdefault(track.group, Node())):
                node.visit(track.tokens)
                left = (track.tokens - mark for mark in track.marks[1:])
                node.enter((state_name(*state) for state in track.states), left)

    def _forecast(self, track: Track) -> Forecast:
        node = self._prompts.get(track.group, self._root).deepest(state_name(*state) for state in track.states)
        return Forecast(node.mean, node.mean, 0.0)


class ProgressOnly(Posterior):
    """The posterior's reference: what it falls back to without skill."""

    def learn(self) -> None:
        """Learn, and trust nothing but progress."""
        super().learn()
        for blend in (self._regression.order, self._regression.mean):
            blend.factor = blend.skill = 0.0


FORECASTERS: dict[str, Callable[[], Any]] = {
    "global_mean": GlobalMean,
    "turn_index": TurnIndex,
    "progress": ProgressOnly,
    "paper_tree": PaperTree,
    "posterior": Posterior,
}
"""Every forecaster by name."""

"""The bookkeeping that simple forecasters share: what each live trajectory has generated, and where its returns were."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from libra.policy.forecast import Forecast
from libra.policy.messages import Event, QuantumFinished, TrajectoryEnded, TrajectoryParked
from libra.types import ToolStatus

State = tuple[str, ToolStatus, int]
"""Tool, status, payload tokens of a return."""


class Track:
    """A live trajectory.

    Attributes
    ----------
    group : str
    tokens : int
        Generated so far.
    marks : list of int
        Tokens at the start (0) and at each return.
    states : list of State
        One per return.
    """

    __slots__ = ("group", "marks", "states", "tokens")

    def __init__(self, group: str) -> None:
        self.group = group
        self.tokens = 0
        self.marks = [0]
        self.states: list[State] = []


class Tracker(ABC):
    """A forecaster but for what it learns of a finished track, and forecasts from a live one."""

    def __init__(self) -> None:
        self._tracks: dict[str, Track] = {}

    def handle(self, event: Event) -> None:
        """Learn from one event."""
        match event:
            case QuantumFinished(key=key, tokens=tokens, status=status):
                track = self._tracks.get(key)
                if track is not None:
                    track.tokens += tokens
                    if status:
                        track.marks.append(track.tokens)
                        track.states.append((event.tool, status, event.payload_tokens))
            case TrajectoryParked(key=key):
                if key not in self._tracks:
                    self._tracks[key] = Track(event.group)
            case TrajectoryEnded(key=key, completed=completed):
                track = self._tracks.pop(key, None)
                if track is not None and completed:
                    self._learn(track)

    def learn(self) -> None:  # noqa: B027 (nothing to do is right for most)
        """Everything was learned when it came."""

    def remaining(self, key: str) -> Forecast:
        """Forecast for a live trajectory; KeyError for one never parked or already ended."""
        return self._forecast(self._tracks[key])

    def snapshot(self) -> dict[str, Any]:
        """Everything it knows, as values that JSON can hold."""
        tracks = {
            key: [t.group, t.tokens, list(t.marks), [list(s) for s in t.states]] for key, t in self._tracks.items()
        }
        return {"tracks": tracks, "learned": self._learned()}

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Know what ``snapshot`` says and nothing else."""
        self._tracks = {}
        for key, (group, tokens, marks, states) in snapshot["tracks"].items():
            track = self._tracks[str(key)] = Track(group)
            track.tokens, track.marks = int(tokens), [int(mark) for mark in marks]
            track.states = [(str(tool), ToolStatus(status), int(payload)) for tool, status, payload in states]
        self._load(snapshot["learned"])

    @abstractmethod
    def _learn(self, track: Track) -> None:
        """Take in a trajectory that is over."""

    @abstractmethod
    def _forecast(self, track: Track) -> Forecast:
        """What is left of one that is live."""

    @abstractmethod
    def _learned(self) -> Any:
        """What was learned, as JSON can hold it."""

    @abstractmethod
    def _load(self, learned: Any) -> None:
        """Know what `_learned` gave and nothing else."""

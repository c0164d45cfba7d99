"""What every ordering remembers of a trajectory: where it came in, what it has generated, how often its tools came back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import log2
from typing import Any

from libra.policy.messages import Event, QuantumFinished, TrajectoryEnded, TrajectoryParked
from libra.types import Phase

NUM_CLASSES = 40
"""Length classes are half octaves: class c holds 2 ** (c / 2) - 1 tokens and more; the last one takes everything longer."""


def length_class(tokens: float) -> int:
    """The class of a number of tokens, 0 for none."""
    return min(NUM_CLASSES - 1, int(2.0 * log2(1.0 + tokens)))


@dataclass(slots=True)
class TrajectoryStats:
    """One trajectory between its first parking and its end.

    Attributes
    ----------
    arrival : int
        How many trajectories were parked before it was, for the first time.
    generated_tokens, calls : int
        What its generations have sampled; how often its tools came back.
    remaining_tokens : float
        What it was last believed to have left; for orderings that believe something.
    counted : bool
        Whether it is among its group's members; for orderings that count them.
    level, total_class : int
        The level it was last given, and the class of its total length as last believed; -1: none.
    context_tokens : int
        What an engine would have to compute to go on with it, as far as it is known.
    """

    arrival: int
    iteration: int
    group: str
    phase: Phase
    generated_tokens: int = 0
    calls: int = 0
    remaining_tokens: float = 0.0
    counted: bool = False
    level: int = -1
    total_class: int = -1
    context_tokens: int = 0


class TrajectoryTable:
    """Trajectories that are not over, by key."""

    def __init__(self) -> None:
        self.by_key: dict[str, TrajectoryStats] = {}
        self._arrivals = 0

    def handle(self, event: Event) -> TrajectoryStats | None:
        """Follow one event; answers the trajectory it is about, or was about. None: none that is known."""
        match event:
            case TrajectoryParked(key=key, iteration=iteration, phase=phase, group=group, context_tokens=context):
                life = self.by_key.get(key)
                if life is None:
                    life = self.by_key[key] = TrajectoryStats(self._arrivals, iteration, group, phase)
                    self._arrivals += 1
                life.iteration, life.phase = iteration, phase
                if context:
                    life.context_tokens = context
                return life
            case QuantumFinished(key=key, tokens=tokens, tool=tool, payload_tokens=payload):
                life = self.by_key.get(key)
                if life is not None:
                    life.generated_tokens += tokens
                    life.context_tokens += tokens + payload
                    life.calls += bool(tool)
                return life
            case TrajectoryEnded(key=key):
                return self.by_key.pop(key, None)
        return None

    def snapshot(self) -> dict[str, Any]:
        """Everything it knows, as values that JSON can hold."""
        lives = {key: list(asdict(life).values()) for key, life in sorted(self.by_key.items())}
        return {"arrivals": self._arrivals, "lives": lives}

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Know what ``snapshot`` says and nothing else."""
        self._arrivals = int(snapshot["arrivals"])
        self.by_key = {
            str(key): TrajectoryStats(arrival, iteration, group, Phase(phase), *rest)
            for key, (arrival, iteration, group, phase, *rest) in snapshot["lives"].items()
        }

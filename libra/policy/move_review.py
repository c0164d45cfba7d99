"""Moves of a run judged when it is over: what each was worth, by the lengths that trajectories turned out to have.

A log is read twice. The first time for how many tokens each trajectory generated in all and how long its context became; the second
time with these in place of beliefs (`Loads`), so that at every move both ends are known: of the home had it stayed, and of the two
engines with the move and its price. Engines are as fast as they had declared by then.

Invariants
1. Every generation that began on another engine than the one that held its KV is a move, whatever its reason; one whose home was
   lost, or forgotten, is none.
2. A move whose worth cannot be known, because an engine had told nothing or the trajectory never ended, counts as unjudged.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from libra import events
from libra.policy.engine_loads import SURE, Loads
from libra.policy.fleet import Fleet
from libra.policy.log_replay import told_of
from libra.policy.messages import HomeForgotten, QuantumFinished, QuantumStarted, TrajectoryEnded, WorkerLeft
from libra.types import Phase

NOISE_FRAC = 0.05
"""A move that brought the end later by less than this share of it is not called useless: seconds are measured that well."""


@dataclass(frozen=True, slots=True)
class Moved:
    """One move. ``stayed_s`` and ``moved_s`` are seconds from then until both engines in question are over, price included; both
    are None where nothing can be said."""

    key: str
    t_s: float
    home: str
    worker: str
    reason: str
    stayed_s: float | None = None
    moved_s: float | None = None

    @property
    def useless(self) -> bool:
        """Whether the end came later by it, beyond noise."""
        return (
            self.stayed_s is not None and self.moved_s is not None and self.moved_s > (1.0 + NOISE_FRAC) * self.stayed_s
        )

    @property
    def worth(self) -> bool:
        """Whether the end came sooner by it, beyond noise."""
        return (
            self.stayed_s is not None and self.moved_s is not None and self.stayed_s > (1.0 + NOISE_FRAC) * self.moved_s
        )


def moves(log: Iterable[tuple[int, events.Event]]) -> tuple[list[Moved], int]:
    """The moves of a log, in order, and how many generations were dispatched in all."""
    lines = list(log)
    generated, final = _lengths(lines)
    fleet = Fleet()
    loads = Loads(fleet, SURE)
    found: list[Moved] = []
    done: dict[str, int] = {}
    dispatched = 0
    for line, event in lines:
        if isinstance(event, events.QuantumDispatched):
            if event.phase == Phase.ROLLOUT:
                dispatched += 1
                home = fleet.home.get(event.key)
                if event.key in generated:
                    loads.believe(event.key, generated[event.key] - done.get(event.key, 0), final[event.key])
                if home is not None and home != event.worker:
                    found.append(_judged(event, home, fleet, loads, event.key in generated))
                loads.settle(event.key, event.worker)
            fleet.handle(QuantumStarted(event.key, Phase(event.phase), event.worker))
            continue
        told = told_of(line, event, "")
        if told is None:
            continue
        match told:
            case QuantumFinished(key=key, tokens=tokens):
                done[key] = done.get(key, 0) + tokens
                fleet.handle(told)
                loads.generated(key, tokens)
                continue
            case TrajectoryEnded(key=key):
                loads.end(key)
            case HomeForgotten(key=key):
                loads.settle(key, None)
            case WorkerLeft(worker=worker):
                loads.lose(worker)
        fleet.handle(told)
    return found, dispatched


def _lengths(lines: list[tuple[int, events.Event]]) -> tuple[dict[str, int], dict[str, int]]:
    """Tokens generated, and context at the end, of each trajectory that ended."""
    fleet, tokens, final = Fleet(), dict[str, int](), dict[str, int]()
    for line, event in lines:
        if isinstance(event, events.QuantumDispatched):
            continue
        told = told_of(line, event, "")
        if isinstance(told, TrajectoryEnded):
            final[told.key] = fleet.context_tokens.get(told.key, 0)
        if isinstance(told, QuantumFinished):
            tokens[told.key] = tokens.get(told.key, 0) + told.tokens
        if told is not None:
            fleet.handle(told)
    return {key: tokens[key] for key in final if tokens.get(key)}, final


def _judged(event: events.QuantumDispatched, home: str, fleet: Fleet, loads: Loads, known: bool) -> Moved:
    moved = Moved(event.key, event.t_s, home, event.worker, event.reason)
    told = all(name in fleet.hosts and fleet.hosts[name].spec.told for name in (home, event.worker))
    if not known or not told or not loads.believed(event.key):
        return moved
    home_s, moved_s, _ = loads.moved_s(event.key, event.worker)
    stayed_s = max(home_s, loads.over_s(event.worker))
    return Moved(event.key, event.t_s, home, event.worker, event.reason, stayed_s, moved_s)

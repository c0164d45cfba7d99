"""Engines that take new weights one by one, and hand thin ends of their work to each other: Laminar (arXiv:2510.12633).

In place of `libra.policy.dispatcher`, in whose words it is told of events. An engine takes an equal share of a batch from the pool
of prompts, generates it with one version, and takes the newest version when nothing of it is left. Every `REPACK_S`, and with
each version, engines in ramp-down hand their trajectories to others in ramp-down with the same version: those that hold less KV
than memory and than at the last look, have nothing waiting, and fewer trajectories than slots. Smallest first, each to the one
that is then fullest, as far as memory and slots allow.

Simplified: how many prompts an engine takes at once is not known to us (here: a batch over the number of engines); KV is counted
as of the last turn; the paper's bound on requests is where decoding becomes compute bound, ours the engine's slots; the paper
bounds neither open groups nor ages, here open groups are as many as in other systems of the same eta.

Invariants
----------
1. A trajectory is generated with one version, whatever engines it is on, and an engine has trajectories of one version.
2. A trajectory waits in the pool, waits at its engine, has a slot of it, or is elsewhere (tools): one of these.
3. An engine never has more trajectories in slots than it has slots.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from libra.facts import (
    Command,
    Fact,
    QuantumFinished,
    QuantumStarted,
    TrajectoryEnded,
    TrajectoryParked,
    VersionPublished,
    WorkerCapacity,
    WorkerWithdrawn,
)
from libra.policy import Place
from libra.types import Phase

REPACK_S = 5.0
"""Seconds from one look for engines in ramp-down to the next (Laminar)."""


class Handover(NamedTuple):
    """All trajectories of ``source`` go on on ``target``."""

    source: str
    target: str


@dataclass(slots=True)
class _Engine:
    slots: int = 0  # 0: it is stopped
    version: int = 0
    at: dict[str, None] = field(default_factory=dict)  # its trajectories, in order
    waiting: deque[str] = field(default_factory=deque)  # of these, those that wait for a slot
    in_slots: set[str] = field(default_factory=set)
    held_before: int = 0  # tokens, at the last look


class OwnVersions:
    """Placement of one run; ``share`` trajectories are taken by an engine at once.

    Attributes
    ----------
    loads : set of str
        Engines that took trajectories of a new version and have not loaded it; who loads it takes the engine out.
    """

    def __init__(self, share: int) -> None:
        self.loads: set[str] = set()
        self._share, self._newest = share, 0
        self._engines: dict[str, _Engine] = {}
        self._home: dict[str, _Engine] = {}
        self._pool: dict[str, None] = {}

    # ---------------------------------------------------------------- what the simulator asks

    def handle(self, event: Fact) -> None:
        """Follow one event."""
        match event:
            case TrajectoryParked(key=key):
                home = self._home.get(key)
                if home is None:
                    self._pool[key] = None
                else:
                    home.in_slots.discard(key)
                    home.waiting.append(key)
            case QuantumStarted(key=key):
                self._home[key].in_slots.add(key)
            case QuantumFinished(key=key):
                self._home[key].in_slots.discard(key)
            case TrajectoryEnded(key=key):
                self._pool.pop(key, None)
                home = self._home.pop(key, None)
                if home is not None:
                    del home.at[key]
                    home.in_slots.discard(key)
                    if key in home.waiting:
                        home.waiting.remove(key)
            case WorkerCapacity(worker=worker, rollout_slots=slots):
                self._engines.setdefault(worker, _Engine()).slots = slots
            case WorkerWithdrawn(worker=worker):
                self._engines[worker].slots = 0
            case VersionPublished(version=version):
                self._newest = version

    def apply(self, commands: Iterable[Command]) -> None:
        """Orders do not count: trajectories go in the order in which they begin."""

    def dispatch(self, phase: Phase) -> tuple[Place, ...]:
        """Placements in order; the trajectories hold these slots from now on."""
        found = []
        for name, engine in self._engines.items():
            if self._pool and not engine.at and engine.slots:
                if engine.version != self._newest:
                    engine.version = self._newest
                    self.loads.add(name)
                for key in [*self._pool][: self._share]:
                    del self._pool[key]
                    self._home[key], engine.at[key] = engine, None
                    engine.waiting.append(key)
            while engine.waiting and len(engine.in_slots) < engine.slots:
                key = engine.waiting.popleft()
                engine.in_slots.add(key)
                found.append(Place(key, phase, name, "the engine that took it"))
        return tuple(found)

    def num_waiting(self, phase: Phase) -> int:
        """How many trajectories wait for a slot."""
        return len(self._pool) + sum(len(engine.waiting) for engine in self._engines.values())

    def contended(self) -> bool:
        """Whether who ends a quantum releases its slot."""
        return self.num_waiting(Phase.ROLLOUT) > 0

    def residents(self, worker: str) -> int:
        """How many trajectories an engine has."""
        return len(self._engines[worker].at)

    def version_of(self, worker: str) -> int:
        """The version that an engine generates with."""
        return self._engines[worker].version

    # ---------------------------------------------------------------- ramp-down

    def repack(self, held: Mapping[str, int], memory: Mapping[str, int]) -> tuple[Handover, ...]:
        """Hand over what thin engines have; whoever carries it out stops the source, and has it join again.

        Parameters
        ----------
        held, memory : mappings
            Tokens of KV of each trajectory, and of each engine's memory.
        """
        load = {name: sum(held[key] for key in engine.at) for name, engine in self._engines.items()}
        down = {}
        for name, engine in self._engines.items():
            thins_out = load[name] < min(memory[name], engine.held_before) and not engine.waiting
            if thins_out and 0 < len(engine.at) < engine.slots:
                down[name] = engine
            engine.held_before = load[name]
        found: list[Handover] = []
        targets = set[str]()
        for name in sorted(down, key=lambda name: (load[name], name)):
            if name in targets:
                continue
            source = down[name]
            fits = [
                other
                for other, engine in down.items()
                if other != name
                and engine.at
                and engine.version == source.version
                and load[other] + load[name] <= memory[other]
                and len(engine.at) + len(source.at) <= engine.slots
            ]
            if not fits:
                continue
            target = max(fits, key=lambda other: (load[other], other))
            targets.add(target)
            self._hand_over(source, down[target])
            load[target] += load[name]
            found.append(Handover(name, target))
        return tuple(found)

    def _hand_over(self, source: _Engine, target: _Engine) -> None:
        for key in source.at:
            self._home[key], target.at[key] = target, None
        source.at, source.in_slots, source.held_before = {}, set(), 0

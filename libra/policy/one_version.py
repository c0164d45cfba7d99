"""When each engine takes new weights, in a run whose trajectories keep those that they began with (``staleness.versions=one``).

DORA, arXiv:2604.26256, C1. Differs from the paper: engines of an older version are not merged, by its rule of rounding, with their
trajectories and KV moved; each is emptied by the ends of its own trajectories.

Invariants
----------
1. An engine is told a version only while no trajectory that began there is under way: no weights change in the midst of one.
2. A trajectory begins only on an engine that was told the newest version. One under way goes only to engines of its own version, as
   long as there is one; then it counts as not begun, and its worker starts it again from its prompt (`libra.worker.quanta`).
3. No dead end: what is under way on an engine ends by itself, or leaves with it; then the engine is told the newest version.
"""

from __future__ import annotations

from libra.policy.messages import (
    Event,
    HomeForgotten,
    LoadVersion,
    QuantumStarted,
    TrajectoryEnded,
    VersionPublished,
    WorkerJoined,
    WorkerLeft,
)
from libra.types import Phase


class OneVersion:
    """The versions of a run's engines, and of its trajectories that have begun; engines by the names of their workers."""

    def __init__(self) -> None:
        self.newest = -1
        self.told: dict[str, int] = {}  # of each engine that takes quanta, the version that it was told last; -1: none
        self._under_way: dict[str, set[str]] = {}
        self._home: dict[str, str] = {}
        self._began: dict[str, int] = {}

    def may(self, key: str, worker: str) -> bool:
        """Whether the next generation of a trajectory may be at ``worker``."""
        began = self._began.get(key)
        wanted = self.newest if began is None or began not in self.told.values() else began
        return self.told.get(worker) == wanted

    def handle(self, event: Event) -> tuple[LoadVersion, ...]:
        """Follow one event; the engines that take new weights now."""
        if type(event) is QuantumStarted:
            return self._started(event.key, event.worker) if event.phase is Phase.ROLLOUT else ()
        if type(event) is TrajectoryEnded:
            self._began.pop(event.key, None)
            return self._left_home(event.key)
        if type(event) is HomeForgotten:
            return self._left_home(event.key)
        if type(event) is VersionPublished:
            self.newest = max(self.newest, event.version)
            return tuple(command for worker in list(self.told) for command in self._emptied(worker))
        if type(event) is WorkerJoined and event.rollout_slots:
            return self._emptied(event.worker) if self.told.setdefault(event.worker, -1) < 0 else ()
        if type(event) is WorkerLeft or type(event) is WorkerJoined:
            self._lost(event.worker)
        return ()

    def _started(self, key: str, worker: str) -> tuple[LoadVersion, ...]:
        if self._home.get(key) == worker:
            return ()
        commands = self._left_home(key)
        if worker in self.told:
            self._home[key], self._began[key] = worker, self.told[worker]
            self._under_way.setdefault(worker, set()).add(key)
        return commands

    def _left_home(self, key: str) -> tuple[LoadVersion, ...]:
        home = self._home.pop(key, None)
        if home is None:
            return ()
        self._under_way[home].discard(key)
        return self._emptied(home)

    def _emptied(self, worker: str) -> tuple[LoadVersion, ...]:
        """The command for an engine that is behind, if nothing that began there is under way."""
        before = self.told.get(worker, self.newest)
        if before >= self.newest or self._under_way.get(worker):
            return ()
        self.told[worker] = self.newest
        return (LoadVersion(worker, self.newest, f"nothing that began with version {before} is under way there"),)

    def _lost(self, worker: str) -> None:
        self.told.pop(worker, None)
        for key in self._under_way.pop(worker, ()):
            del self._home[key]

"""Engines shared out among the live weight versions: DORA (arXiv:2604.26256), in virtual time.

As `systems.own_versions`, in whose place it is: a trajectory keeps the version that it began with, and each engine serves one.
With each new version, and every `REPACK_S`, versions get engines by `libra.policy.one_version.version_shares`. An engine above
its version's share, the one with the fewest trajectories first, hands them to the others of its version, as far as their memory
and slots allow, and takes the newest version. Trajectories begin on engines of the newest version, as many as there are slots.

Simplified: the paper's triggers are weight updates, pressure on KV and a timer, ours the first and the last.
"""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.systems.own_versions import Handover, OwnVersions
from libra.policy import Place
from libra.policy.one_version import version_shares
from libra.types import Phase


class VersionWindow(OwnVersions):
    """Placement of one run."""

    def dispatch(self, phase: Phase) -> tuple[Place, ...]:
        """Placements in order; the trajectories hold these slots from now on."""
        for name, engine in self._engines.items():
            if self._pool and not engine.at and engine.slots and engine.version != self._newest:
                engine.version = self._newest
                self.loads.add(name)
        newest = [engine for engine in self._engines.values() if engine.slots and engine.version == self._newest]
        while self._pool and (free := [engine for engine in newest if len(engine.at) < engine.slots]):
            engine = min(free, key=lambda each: len(each.at))
            key = next(iter(self._pool))
            del self._pool[key]
            self._home[key], engine.at[key] = engine, None
            engine.waiting.append(key)
        found = []
        for name, engine in self._engines.items():
            while engine.waiting and len(engine.in_slots) < engine.slots:
                key = engine.waiting.popleft()
                engine.in_slots.add(key)
                found.append(Place(key, phase, name, f"an engine of version {engine.version}"))
        return tuple(found)

    def repack(self, held: Mapping[str, int], memory: Mapping[str, int]) -> tuple[Handover, ...]:
        """Empty the engines above their version's share; each `Handover` names one of those that take what its source had."""
        live = {name: engine for name, engine in self._engines.items() if engine.slots}
        under_way: dict[int, int] = {self._newest: len(self._pool)}
        for engine in live.values():
            under_way[engine.version] = under_way.get(engine.version, 0) + len(engine.at)
        shares = version_shares(len(live), under_way)
        load = {name: sum(held[key] for key in engine.at) for name, engine in live.items()}
        found: list[Handover] = []
        for version in sorted(set(shares) - {self._newest}):
            having = sorted(
                (n for n, e in live.items() if e.version == version and e.at), key=lambda n: (len(live[n].at), n)
            )
            excess = max(0, len(having) - shares[version])
            keep = having[excess:]
            for source in having[:excess]:
                if not self._fits(source, keep, held, memory, load):
                    break
                target = ""
                for key in sorted(live[source].at, key=lambda key: -held[key]):
                    fits = (n for n in keep if len(live[n].at) < live[n].slots and load[n] + held[key] <= memory[n])
                    target = min(fits, key=lambda n: load[n])
                    self._home[key], live[target].at[key] = live[target], None
                    load[target] += held[key]
                live[source].at, live[source].in_slots, load[source] = {}, set(), 0
                live[source].waiting.clear()
                found.append(Handover(source, target))
        return tuple(found)

    def _fits(
        self, source: str, keep: list[str], held: Mapping[str, int], memory: Mapping[str, int], load: Mapping[str, int]
    ) -> bool:
        """Whether the others can take all that ``source`` has: rehearsed, largest first, each to the emptiest."""
        room = {name: [load[name], len(self._engines[name].at)] for name in keep}
        for key in sorted(self._engines[source].at, key=lambda key: -held[key]):
            fits = [n for n in keep if room[n][1] < self._engines[n].slots and room[n][0] + held[key] <= memory[n]]
            if not fits:
                return False
            target = min(fits, key=lambda n: room[n][0])
            room[target][0] += held[key]
            room[target][1] += 1
        return True

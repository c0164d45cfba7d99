"""When engines take new weights if trajectories keep theirs (``staleness.versions=one``).

Source: DORA, arXiv:2604.26256, C1. An engine empties as its trajectories end or, with ``rounded``,
by shares (`version_shares`): if a version has more engines than its share, the engine with the
fewest trajectories hands them to engines of the same version. Differs from the paper: shares are
computed at each new version and whenever a trajectory starts waiting or ends, no engine returns to
an older version, and turns are not interrupted.

Invariants
----------
1. An engine takes a version only while no trajectory that began on the engine runs there.
2. A trajectory begins only on an engine with the newest version. A running trajectory goes only to
   engines of its version while there is one; after that its worker restarts it from its prompt.
3. No deadlock: each trajectory on an engine ends, goes to another engine of its version, or leaves
   with the engine; then the engine takes the newest version.
4. An engine that hands over its trajectories gets no new ones, and another engine keeps their
   version until all trajectories of that version have ended.
5. ``restore(snapshot())`` changes no later answer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

from libra import facts
from libra.policy.saved import Saved
from libra.types import Phase

Orders = tuple[facts.Vacate | facts.LoadVersion, ...]


class OneVersion(Saved):
    """The versions of a run's engines (by worker name) and of its running trajectories."""

    rounded: bool
    newest: int
    told: dict[str, int]  # newest version of each engine that takes quanta; -1: none
    emptying: set[str]  # engines that give their trajectories away
    _under_way: dict[str, set[str]]
    _home: dict[str, str]
    _began: dict[str, int]
    _specs: dict[str, facts.WorkerCapacity]  # this and the following for the rule of rounding
    _running: dict[str, str]  # generations
    _waiting: set[str]  # for their first generation
    _context: dict[str, int]

    def __init__(self, *, rounded: bool = False) -> None:
        super().__init__()
        self.rounded, self.newest = rounded, -1
        self._counts: Counter[int] = Counter()  # of `_began`

    def may(self, key: str, worker: str) -> bool:
        began = self._began.get(key)
        left = {self.told[each] for each in self.told.keys() - self.emptying} if self.emptying else self.told.values()
        wanted = self.newest if began is None or began not in left else began
        return self.told.get(worker) == wanted and worker not in self.emptying

    def handle(self, event: facts.Fact) -> Orders:
        """Commands that answer an event: vacate an engine, or load new weights."""
        if type(event) is facts.TrajectoryParked:
            return self._parked(event) if self.rounded else ()
        if isinstance(event, facts.QuantumStarted):
            return self._started(event.key, event.worker) if event.phase is Phase.ROLLOUT else ()
        if type(event) is facts.TrajectoryEnded:
            self._set_began(event.key, None)
            for table in (self._running, self._context):
                table.pop(event.key, None)
            self._waiting.discard(event.key)
            return (*self._left_home(event.key), *self._shared())
        if type(event) is facts.HomeForgotten:
            self._running.pop(event.key, None)
            return self._left_home(event.key)
        if type(event) is facts.VersionPublished:
            self.newest = max(self.newest, event.version)
            emptied = [command for worker in sorted(self.told) for command in self._emptied(worker)]
            return (*emptied, *self._shared())
        if type(event) is facts.WorkerCapacity and event.rollout_slots:
            self._specs[event.worker] = event
            return self._emptied(event.worker) if self.told.setdefault(event.worker, -1) < 0 else ()
        if type(event) is facts.WorkerWithdrawn or type(event) is facts.WorkerCapacity:
            self._lost(event.worker)
        return ()

    def _started(self, key: str, worker: str) -> Orders:
        if self.rounded:
            self._running[key] = worker
            self._waiting.discard(key)
        if self._home.get(key) == worker:
            return ()
        commands = self._left_home(key)
        if worker in self.told:
            self._home[key] = worker
            self._set_began(key, self.told[worker])
            self._under_way.setdefault(worker, set()).add(key)
        return commands

    def _set_began(self, key: str, version: int | None) -> None:
        before = self._began.pop(key, None)
        if before is not None:
            self._counts[before] -= 1
            if not self._counts[before]:
                del self._counts[before]
        if version is not None:
            self._began[key] = version
            self._counts[version] += 1

    def _left_home(self, key: str) -> Orders:
        home = self._home.pop(key, None)
        if home is None:
            return ()
        self._under_way[home].discard(key)
        return self._emptied(home)

    def _emptied(self, worker: str) -> tuple[facts.LoadVersion, ...]:
        before = self.told.get(worker, self.newest)
        if before >= self.newest or self._under_way.get(worker):
            return ()
        if self.rounded and self._counts[before] and self._open(before) == [worker]:
            return ()  # what was given away waits for it
        self.told[worker] = self.newest
        self.emptying.discard(worker)
        reason = "it has joined" if before < 0 else f"nothing that began with version {before} is under way there"
        return (facts.LoadVersion(worker, self.newest, reason),)

    def _lost(self, worker: str) -> None:
        version = self.told.pop(worker, None)
        self._specs.pop(worker, None)
        self.emptying.discard(worker)
        for key in self._under_way.pop(worker, ()):
            del self._home[key]
        self._running = {key: at for key, at in self._running.items() if at != worker}
        if version is not None and not self._open(version):  # what is left of it keeps its engines
            self.emptying -= {each for each, told in self.told.items() if told == version}

    def _parked(self, event: facts.TrajectoryParked) -> Orders:
        key = event.key
        self._running.pop(key, None)
        if event.context_tokens:
            self._context[key] = event.context_tokens
        home = self._home.get(key)
        if home is not None and home in self.emptying:
            return self._given_away(home, [key], "it gives its trajectories away")
        if key in self._began or key in self._waiting:
            return ()
        self._waiting.add(key)
        return self._shared()

    def _open(self, version: int) -> list[str]:
        return [worker for worker, told in self.told.items() if told == version and worker not in self.emptying]

    def _shared(self) -> Orders:
        if not self.rounded or all(told == self.newest for told in self.told.values()):
            return ()
        commands: list[facts.Vacate | facts.LoadVersion] = [
            each for worker in sorted(self.told) for each in self._emptied(worker)
        ]
        engines = sum(told >= 0 for told in self.told.values())
        under_way: Counter[int] = Counter({self.newest: len(self._waiting)})
        for version, count in self._counts.items():
            under_way[version if self._open(version) else self.newest] += count
        shares, total = version_shares(engines, under_way), sum(under_way.values())
        for version in sorted(set(self.told.values()) & shares.keys() - {self.newest}):
            having = sorted(self._open(version), key=lambda worker: (len(self._under_way.get(worker, ())), worker))
            for source in having[: max(0, len(having) - shares[version])]:
                keep = [worker for worker in self._open(version) if worker != source]
                if not self._fits(version, source, keep):
                    break
                self.emptying.add(source)
                idle = [key for key in sorted(self._under_way.get(source, ())) if self._running.get(key) != source]
                had = f"version {version} has {under_way[version]} of {total} trajectories"
                reason = f"{had}, and {shares[version]} of {engines} engines by rounding; it had {len(keep) + 1}"
                commands += self._given_away(source, idle, reason)
        return tuple(commands)

    def _given_away(self, worker: str, keys: list[str], reason: str) -> Orders:
        for key in keys:
            del self._home[key]
            self._under_way[worker].discard(key)
        return (facts.Vacate(worker, tuple(keys), reason), *self._emptied(worker))

    def _fits(self, version: int, source: str, keep: list[str]) -> bool:
        room = {each: self._held(self._under_way.get(each, ())) for each in keep}
        homeless = (key for key, began in self._began.items() if began == version and key not in self._home)
        sized = [(-self._context.get(key, 0), key) for key in (*homeless, *self._under_way.get(source, ()))]
        for less, _ in sorted(sized):
            able = [each for each in keep if self._has_room(self._specs[each], *room[each], -less)]
            if not able:
                return False
            target = min(able, key=lambda worker: (room[worker], worker))
            room[target] = room[target][0] - less, room[target][1] + 1
        return True

    @staticmethod
    def _has_room(spec: facts.WorkerCapacity, tokens: int, count: int, more: int) -> bool:
        return count < spec.rollout_slots and (not spec.kv_tokens or tokens + more <= spec.kv_tokens)

    def _held(self, keys: Collection[str]) -> tuple[int, int]:
        return sum(self._context.get(key, 0) for key in keys), len(keys)

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        super().restore(snapshot)
        self._counts = Counter(self._began.values())


def version_shares(engines: int, under_way: Mapping[int, int]) -> dict[int, int]:
    """Engines of each version: ``round(engines x R_w / sum of R)``, for R_w trajectories.

    Trajectories that have not begun count for the newest version. Differs from the paper: a version
    with trajectories has at least one of ``engines`` (at least as many as versions), the newest
    gets the rest, and versions with the fewest trajectories per engine give up
    engines if there are too few.
    """
    live = {version: count for version, count in sorted(under_way.items()) if count > 0}
    if not live:
        return {}
    total, newest = sum(live.values()), max(live)
    shares = {version: max(1, round(engines * count / total)) for version, count in live.items()}
    shares[newest] = max(1, engines - sum(share for version, share in shares.items() if version != newest))
    while sum(shares.values()) > engines and any(share > 1 for share in shares.values()):
        least = min((v for v in shares if shares[v] > 1), key=lambda v: (live[v] / shares[v], v))
        shares[least] -= 1
    return shares

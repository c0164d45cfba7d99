"""GangPlugin: the training replicas of a run as one process group, formed, placed and supervised; beside `LibraPlugin`.

::

    waiting --enough replicas--> forming --all joined--> ready --a member leaves--> waiting
    forming, ready --a member cannot reach the others--> doubtful --one leaves, or RETRY_S are over--> waiting

A group has a number, its *gang epoch*. To form one, rank 0 is told to open a rendezvous, then all are told to join it; each
answers when the state of the furthest is everybody's (`libra.worker.gang_member`). Tasks of the group wait under a resource
that nobody supplies (`libra.keys.GANG`), one per rank.

Invariants
----------
1. Tasks of one gang (a node of an iteration) are released together, each to the worker of its rank, once the group is ready and
   every rank's is here or done; or none is. Two gangs never run at once: ranks would meet in different collectives.
2. A member that leaves ends the group at once: the worker is named in the event log and by a warning, nobody asks anybody. What
   was placed comes back here by itself, and is released to the next group.
3. Whatever ends a task of a gang puts it back under the resource, or a result lost with its worker would be tied to it.
4. What workers say of another gang epoch or run epoch is not listened to.
5. Ranks stay with worker names where these come back; workers beyond the size of the group stand by.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from distributed.diagnostics.plugin import SchedulerPlugin

from libra import keys
from libra.scheduler import dask_internals

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler

logger = logging.getLogger(__name__)

RETRY_S = 0.5
"""How long it is waited for the news that a member left, when another cannot reach it; then all of them form a new group."""
_TELLS = frozenset({"trainer", "gang_open", "gang_joined", "gang_failed"})


@dataclass(slots=True)
class _Gang:
    run: str
    run_epoch: int
    size: int
    number: int = -1
    status: str = "waiting"
    replicas: dict[str, str] = field(default_factory=dict)  # address by name of every worker that has one
    names: list[str] = field(default_factory=list)  # by rank
    joined: dict[int, int] = field(default_factory=dict)  # steps taken, by rank
    parked: dict[tuple[str, tuple[int, ...]], set[str]] = field(default_factory=dict)  # keys by node and iteration
    placed: set[str] = field(default_factory=set)

    @property
    def addresses(self) -> list[str]:
        """Of the members, by rank."""
        return [self.replicas[name] for name in self.names]


class GangPlugin(SchedulerPlugin):
    """One per scheduler, shared by all runs that train on more than one replica."""

    name = "libra-gang"
    idempotent = True

    def __init__(self) -> None:
        self._gangs: dict[str, _Gang] = {}
        self._on_worker: dict[str, _Gang] = {}  # tasks that were placed and have not come back, by key

    async def start(self, scheduler: Scheduler) -> None:
        """Add the calls of the driver."""
        self._scheduler = scheduler
        dask_internals.add_handlers(
            scheduler, {"libra_register_gang": self.register_gang, "libra_end_gang": self.end_gang}
        )

    def register_gang(self, run: str, epoch: int, size: int) -> dict[str, Any]:
        """From now on form groups of ``size`` for a run; one of an older epoch is forgotten.

        A process can be in one torch.distributed group, so only one run at a time trains on several replicas here.
        """
        others = [other for other in self._gangs if other != run]
        if others:
            return {"error": f"run {others[0]!r} trains on several replicas here, and only one run at a time can"}
        self._gangs[run] = _Gang(run, epoch, size)
        return {}

    def end_gang(self, run: str) -> None:
        """Forget a run."""
        self._gangs.pop(run, None)
        self._on_worker = {key: gang for key, gang in self._on_worker.items() if gang.run != run}

    # ---------------------------------------------------------------- scheduler hooks

    def transition(self, key: Any, start: str, finish: str, *args: Any, **kwargs: Any) -> None:
        """Follow the tasks of gangs; of others nothing but a look-up."""
        if start == "processing" and (gang := self._on_worker.pop(key, None)) is not None:
            if (ts := self._scheduler.tasks.get(key)) is not None:
                dask_internals.park(ts, keys.GANG)
            gang.placed.discard(key)
            self._soon(gang)
        if finish == "no-worker":
            if dask_internals.waits_for(self._scheduler.tasks[key], keys.GANG):
                self._parked(key)
        elif start == "no-worker" and key not in self._on_worker:
            self._gone(key)

    def remove_worker(self, scheduler: Scheduler, worker: str, **kwargs: Any) -> None:
        """A member that leaves is named, and the next group is formed if there are enough without it."""
        for gang in self._gangs.values():
            for name in [name for name, address in gang.replicas.items() if address == worker]:
                is_member = name in gang.names
                del gang.replicas[name]
                if is_member:
                    self._lost(gang, name, f"worker {name} at {worker} left the cluster")
                    self._form(gang)

    def log_event(self, topic: str, msg: Any) -> None:
        """A worker says where it is with its group."""
        if topic != "libra" or not isinstance(msg, dict) or msg.get("kind") not in _TELLS:
            return
        gang = self._gangs.get(msg["run"])
        if gang is None or gang.run_epoch != msg["epoch"]:
            return
        if msg["kind"] == "trainer":
            gang.replicas[msg["name"]] = msg["address"]
            self._form(gang)
            return
        if msg["gang"] != gang.number or gang.status == "waiting":
            return
        match msg["kind"]:
            case "gang_open":
                self._tell(gang, "join", host=msg["host"], port=msg["port"])
            case "gang_joined":
                gang.joined[msg["rank"]] = msg["steps"]
                if len(gang.joined) == gang.size and gang.status == "forming":
                    gang.status = "ready"
                    self._emit(gang, "gang_formed", members=list(gang.names), steps=max(gang.joined.values()))
                    self._soon(gang)
            case "gang_failed" if gang.status != "doubtful":
                # Who says so is not who is to blame: most often that one's leaving is told a moment later.
                gang.status = "doubtful"
                self._scheduler.loop.call_later(
                    RETRY_S, self._unexplained, gang, gang.number, msg["rank"], msg["detail"]
                )

    # ---------------------------------------------------------------- the group

    def _form(self, gang: _Gang) -> None:
        """Begin a new group where there is none and enough replicas are there."""
        if gang.status != "waiting" or len(gang.replicas) < gang.size or self._gangs.get(gang.run) is not gang:
            return
        # Those that stay keep their rank: their tasks' results and rank 0's unwritten checkpoints are where they were.
        free = iter(sorted(name for name in gang.replicas if name not in gang.names))
        names: list[str | None] = [name if name in gang.replicas else None for name in gang.names] or [None] * gang.size
        gang.names = [name or next(free) for name in names]
        gang.number += 1
        gang.status, gang.joined = "forming", {}
        logger.info("run %s: group %d of training replicas is formed of %s", gang.run, gang.number, gang.names)
        self._tell(gang, "open", ranks=[0])

    def _unexplained(self, gang: _Gang, number: int, rank: int, detail: str) -> None:
        """A member could not reach the others, and none of them has left: all of them try again."""
        if gang.status == "doubtful" and gang.number == number:
            self._lost(gang, gang.names[rank], detail)
            self._form(gang)

    def _lost(self, gang: _Gang, name: str, detail: str) -> None:
        if gang.status == "waiting":
            return
        gang.status = "waiting"
        logger.warning("run %s: training group %d lost %s: %s", gang.run, gang.number, name, detail)
        self._emit(gang, "gang_lost", worker=name, detail=detail)

    def _tell(self, gang: _Gang, do: str, *, ranks: list[int] | None = None, **fields: Any) -> None:
        for rank in range(gang.size) if ranks is None else ranks:
            message = {"op": "libra-gang", "run": gang.run, "epoch": gang.run_epoch, "do": do, "gang": gang.number}
            dask_internals.tell_worker(
                self._scheduler, gang.addresses[rank], {**message, "rank": rank, "size": gang.size, **fields}
            )

    def _emit(self, gang: _Gang, event: str, **fields: Any) -> None:
        libra: Any = self._scheduler.plugins.get("libra")
        state = libra.runs.get(gang.run) if libra is not None else None
        if state is not None:
            state.emit(event, gang=gang.number, **fields)

    # ---------------------------------------------------------------- its tasks

    def _parked(self, key: str) -> None:
        parsed = keys.parse(key)
        gang = self._gangs.get(parsed.run) if parsed is not None else None
        if parsed is None or gang is None or parsed.epoch != gang.run_epoch:
            logger.debug("%s waits for a training group that is not on this scheduler", key)
            return
        gang.parked.setdefault((parsed.node, _without_rank(parsed)), set()).add(key)
        self._soon(gang)

    def _gone(self, key: str) -> None:
        """It waits no more, and nobody here released it: it was cancelled."""
        for gang in self._gangs.values():
            for waiting in gang.parked.values():
                waiting.discard(key)

    def _soon(self, gang: _Gang) -> None:
        """Place what can be placed, outside of the transition that brought us here."""
        self._scheduler.loop.add_callback(self._place, gang)

    def _place(self, gang: _Gang) -> None:
        if self._gangs.get(gang.run) is not gang or gang.status != "ready":
            return
        for (node, indices), waiting in list(gang.parked.items()):
            whole = node != "checkpoint"  # which is rank 0's alone, and takes part in nothing
            if not waiting:
                del gang.parked[node, indices]
            elif not (whole and gang.placed) and (releases := self._releases(gang, node, indices, waiting)):
                del gang.parked[node, indices]
                # Before they are released: a transition may come back from there.
                self._on_worker |= {release.key: gang for release in releases}
                if whole:
                    gang.placed |= {release.key for release in releases}
                placed = dask_internals.release(self._scheduler, releases, f"libra-gang-{node}-{gang.number}")
                for release in releases:
                    if release.key not in placed:
                        self._on_worker.pop(release.key, None)
                        gang.placed.discard(release.key)

    def _releases(
        self, gang: _Gang, node: str, indices: tuple[int, ...], waiting: set[str]
    ) -> list[dask_internals.Release]:
        """Every rank's task that is to run, or nothing where one that has to run is not here yet."""
        if node == "checkpoint":
            return [dask_internals.Release(key, {keys.TRAIN: 0}, gang.addresses[0]) for key in waiting]
        releases = []
        for rank, address in enumerate(gang.addresses):
            key = keys.make(node, (*indices, rank), epoch=gang.run_epoch, run=gang.run)
            ts = self._scheduler.tasks.get(key)
            if key in waiting:
                releases.append(dask_internals.Release(key, {keys.TRAIN: 1}, address))
            elif ts is None or ts.state != "memory":
                return []
        return releases


def _without_rank(parsed: keys.Key) -> tuple[int, ...]:
    return parsed.indices if parsed.node == "checkpoint" else parsed.indices[:-1]

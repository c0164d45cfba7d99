"""The training replicas of a run as one process group: formed, placed and supervised.

::

    waiting --enough replicas--> forming --all joined--> ready --a member leaves--> waiting
    forming, ready --a member cannot reach the others--> doubtful --leaves, or RETRY_S--> waiting

A group has a number, its *gang epoch*. To form one, rank 0 opens a rendezvous and all ranks join it
(`libra.worker.training.gang_member`). Its tasks wait for `libra.keys.GANG`, one per rank.

Invariants
----------
1. Tasks of one gang (a node of an iteration) are released together, each to the worker of its rank,
   once the group is ready and every rank's task is parked or done. Two gangs never run at once.
2. A member that leaves ends the group at once, with an event and a warning; its tasks park again.
3. A gang task parks at every end; otherwise a result lost with its worker stays pinned there.
4. Facts of another gang epoch are ignored.
5. A rank stays with its worker's name if the worker returns; surplus workers are spares.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from libra import facts, keys
from libra.facts import Fact
from libra.scheduler import scheduler_internals
from libra.scheduler.run_state import Handler, RunState

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler

logger = logging.getLogger(__name__)

RETRY_S = 0.5  # seconds to wait for Dask to report a lost member; then all form a new group


@dataclass(slots=True)
class _Gang:
    run: str
    run_epoch: int
    size: int
    number: int = -1
    status: str = "waiting"
    replicas: dict[str, str] = field(default_factory=dict)  # address by name
    names: list[str] = field(default_factory=list)  # by rank
    joined: dict[int, int] = field(default_factory=dict)  # steps taken, by rank
    parked: dict[tuple[str, tuple[int, ...]], set[str]] = field(default_factory=dict)  # by node and iteration
    placed: set[str] = field(default_factory=set)  # without checkpoints
    on_worker: set[str] = field(default_factory=set)  # placed tasks that have not returned

    @property
    def addresses(self) -> list[str]:
        return [self.replicas[name] for name in self.names]


class Gangs:
    """The gangs of a scheduler, for the one run that trains on several replicas."""

    def __init__(self, scheduler: Scheduler, runs: Mapping[str, RunState]) -> None:
        self._scheduler, self._runs = scheduler, runs
        self._gang: _Gang | None = None
        scheduler_internals.add_handlers(scheduler, {"libra_register_gang": self.register_gang})

    @property
    def present(self) -> bool:
        return self._gang is not None

    def handlers(self) -> dict[type[Fact], Handler]:
        told: dict[type[Fact], Handler] = dict.fromkeys(
            (facts.GangOpen, facts.GangRankJoined, facts.GangRankFailed), self._member_told
        )
        return {facts.TrainerJoined: self._trainer_joined, **told}

    def register_gang(self, run: str, epoch: int, size: int) -> dict[str, Any]:
        """Form groups of ``size`` for a run from now on; only one run at a time may do so."""
        if self._gang is not None and self._gang.run != run:
            return {"error": f"run {self._gang.run!r} trains on several replicas here, and only one run at a time can"}
        self._gang = _Gang(run, epoch, size)
        return {}

    def end_gang(self, run: str) -> None:
        if self._gang is not None and self._gang.run == run:
            self._gang = None

    def transition(self, key: Any, start: str, finish: str) -> None:
        """Follow the tasks of gangs; any other task costs one look-up."""
        if (gang := self._gang) is None:
            return
        if start == "processing" and key in gang.on_worker:
            gang.on_worker.discard(key)
            if (ts := self._scheduler.tasks.get(key)) is not None:
                scheduler_internals.park(ts, keys.GANG)
            gang.placed.discard(key)
            self._soon(gang)
        if finish == "no-worker":
            if scheduler_internals.waits_for(self._scheduler.tasks[key], keys.GANG):
                self._parked(key)
        elif start == "no-worker" and key not in gang.on_worker:  # it was cancelled
            for waiting in gang.parked.values():
                waiting.discard(key)

    def remove_worker(self, worker: str) -> None:
        gang = self._gang
        names = [] if gang is None else [name for name, address in gang.replicas.items() if address == worker]
        for name in names:
            assert gang is not None
            del gang.replicas[name]
            if name in gang.names:
                self._lost(gang, name, f"worker {name} at {worker} left the cluster")
                self._form(gang)

    def _trainer_joined(self, state: RunState, fact: facts.TrainerJoined, address: str) -> None:
        if (gang := self._of(state)) is not None:
            gang.replicas[fact.worker] = address
            self._form(gang)

    def _of(self, state: RunState) -> _Gang | None:
        gang = self._gang
        return gang if gang is not None and (gang.run, gang.run_epoch) == (state.run, state.epoch) else None

    def _member_told(self, state: RunState, fact: facts.GangSignal, _: str) -> None:
        gang = self._of(state)
        if gang is None or fact.gang != gang.number or gang.status == "waiting":
            return
        match fact:
            case facts.GangOpen():
                self._send(gang, "join", host=fact.host, port=fact.port)
            case facts.GangRankJoined():
                gang.joined[fact.rank] = fact.steps
                if len(gang.joined) == gang.size and gang.status == "forming":
                    gang.status = "ready"
                    state.log.emit(facts.GangFormed(gang.number, tuple(gang.names), max(gang.joined.values())))
                    self._soon(gang)
            case facts.GangRankFailed() if gang.status != "doubtful":
                # The reporting worker is not to blame: Dask usually reports the lost one later.
                gang.status = "doubtful"
                self._scheduler.loop.call_later(RETRY_S, self._unexplained, gang, gang.number, fact.rank, fact.detail)

    def _form(self, gang: _Gang) -> None:
        if gang.status != "waiting" or len(gang.replicas) < gang.size or self._gang is not gang:
            return
        # Ranks are kept: results and rank 0's unwritten checkpoints stay where they are.
        free = iter(sorted(name for name in gang.replicas if name not in gang.names))
        names: list[str | None] = [name if name in gang.replicas else None for name in gang.names] or [None] * gang.size
        gang.names = [name or next(free) for name in names]
        gang.number += 1
        gang.status, gang.joined = "forming", {}
        logger.info("run %s: group %d of training replicas is formed of %s", gang.run, gang.number, gang.names)
        self._send(gang, "open", ranks=[0])

    def _unexplained(self, gang: _Gang, number: int, rank: int, detail: str) -> None:
        if gang.status == "doubtful" and gang.number == number:
            self._lost(gang, gang.names[rank], detail)
            self._form(gang)

    def _lost(self, gang: _Gang, name: str, detail: str) -> None:
        if gang.status == "waiting":
            return
        gang.status = "waiting"
        logger.warning("run %s: training group %d lost %s: %s", gang.run, gang.number, name, detail)
        if (state := self._runs.get(gang.run)) is not None:
            state.log.emit(facts.GangLost(gang.number, name, detail))

    def _send(self, gang: _Gang, do: str, *, ranks: list[int] | None = None, **fields: Any) -> None:
        for rank in range(gang.size) if ranks is None else ranks:
            message = {"op": "libra-gang", "run": gang.run, "epoch": gang.run_epoch, "do": do, "gang": gang.number}
            scheduler_internals.tell_worker(
                self._scheduler, gang.addresses[rank], {**message, "rank": rank, "size": gang.size, **fields}
            )

    def _parked(self, key: str) -> None:
        parsed, gang = keys.parse(key), self._gang
        if parsed is None or gang is None or (parsed.run, parsed.epoch) != (gang.run, gang.run_epoch):
            logger.debug("%s waits for a training group that is not on this scheduler", key)
            return
        indices = parsed.indices if parsed.node == "checkpoint" else parsed.indices[:-1]  # without rank
        gang.parked.setdefault((parsed.node, indices), set()).add(key)
        self._soon(gang)

    def _soon(self, gang: _Gang) -> None:
        self._scheduler.loop.add_callback(self._place, gang)

    def _place(self, gang: _Gang) -> None:
        if self._gang is not gang or gang.status != "ready":
            return
        for (node, indices), waiting in list(gang.parked.items()):
            whole = node != "checkpoint"  # which is rank 0's alone, without collectives
            if not waiting:
                del gang.parked[node, indices]
            elif not (whole and gang.placed) and (releases := self._releases(gang, node, indices, waiting)):
                del gang.parked[node, indices]
                # Before the release, whose transitions may call back.
                sent = {release.key for release in releases}
                gang.on_worker |= sent
                gang.placed |= sent if whole else set()
                sent -= {*scheduler_internals.release(self._scheduler, releases, f"libra-gang-{node}-{gang.number}")}
                gang.on_worker -= sent
                gang.placed -= sent

    def _releases(
        self, gang: _Gang, node: str, indices: tuple[int, ...], waiting: set[str]
    ) -> list[scheduler_internals.Release]:
        if node == "checkpoint":
            return [scheduler_internals.Release(key, {keys.TRAIN: 0}, gang.addresses[0]) for key in waiting]
        releases = []
        for rank, address in enumerate(gang.addresses):
            key = keys.make(node, (*indices, rank), epoch=gang.run_epoch, run=gang.run)
            ts = self._scheduler.tasks.get(key)
            if key in waiting:
                releases.append(scheduler_internals.Release(key, {keys.TRAIN: 1}, address))
            elif ts is None or ts.state != "memory":
                return []
        return releases

"""A training worker's membership in its group: joins on the scheduler's message, and runs tasks.

`libra.scheduler.gangs` forms groups and defines the messages. All ranks of a new group start in the
state of the rank with most steps, but not behind the published version: surviving ranks send their
state; without survivors all ranks load the newest checkpoint and repeat committed batches together.

Invariants
----------
1. A task of a group and the formation of the next group never run at the same time.
2. A task whose group has ended returns to the scheduler (``Reschedule``), with weights and
   optimizer as before its step.
3. Messages of groups older than the newest known group are ignored.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from distributed import Reschedule
from distributed.comm import get_address_host

from libra.errors import GroupLost, LibraError
from libra.facts import GangOpen, GangRankFailed, GangRankJoined, TrainerJoined
from libra.tensors import compute_device
from libra.worker.context import WorkerContext
from libra.worker.training.worker_trainer import Trainer, committed_waves, group_token

if TYPE_CHECKING:
    from libra.train.replica_group import Rendezvous, TrainGroup

logger = logging.getLogger(__name__)


class GangMember:
    """One worker's place in a training group of several workers."""

    def __init__(self, context: WorkerContext, trainer: Trainer) -> None:
        self.context, self.trainer = context, trainer
        self.number = -1
        """Number of the newest group that a message named."""
        self.joined = -1
        """Number of its present group, or of the last one."""
        self.group: TrainGroup | None = None
        self.closed = False
        self.in_turn = threading.Lock()
        self._rendezvous: Rendezvous | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="libra-gang")

    def announce(self) -> None:
        """Subscribe to the scheduler's messages, and report that this worker has a replica."""
        self.context.listen("libra-gang", lambda **message: self.heard(message))
        self.context.report(TrainerJoined(self.context.name))

    def heard(self, message: dict[str, Any]) -> None:
        """Handle a message of the scheduler, on the event loop; must not wait or raise."""
        if message["gang"] < self.number or self.closed:
            return
        self.number = message["gang"]
        self._thread.submit(self._obey, message)

    def close(self) -> None:
        """Leave the group; its running collectives fail."""
        self.closed = True
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self.group is not None:
            self.group.leave()
        if self._rendezvous is not None:
            self._rendezvous.close()
        self.group = self._rendezvous = None

    @contextmanager
    def turn(self, rank: int) -> Iterator[None]:
        """Run exclusively on this worker as ``rank``; raises Reschedule if the group has ended."""
        with self.in_turn:
            if self.group is None or self.group.rank != rank:
                self._broken(
                    self.joined, rank, f"a task of rank {rank} is on {self.context.name}, which left its group"
                )
                raise Reschedule()
            try:
                yield
            except GroupLost as error:
                logger.warning("rank %d: %s", rank, error)
                self._broken(self.joined, rank, str(error))
                raise Reschedule() from None

    def _broken(self, number: int, rank: int, detail: str) -> None:
        self.group = None
        self.context.report(GangRankFailed(number, rank, detail[:500]))

    def _obey(self, message: dict[str, Any]) -> None:
        try:
            if message["do"] == "open":
                self._open(message)
            else:
                self._join(message)
        except Exception as error:  # the boundary of this thread, whose exceptions are not reported
            known = isinstance(error, LibraError)
            logger.warning("training group %d: %s", message["gang"], error, exc_info=not known)
            self._broken(message["gang"], message["rank"], str(error) if known else f"{type(error).__name__}: {error}")

    def _open(self, message: dict[str, Any]) -> None:
        from libra.train.replica_group import Rendezvous

        if self._rendezvous is not None:
            self._rendezvous.close()
        host = get_address_host(self.context.address)
        self._rendezvous = Rendezvous(group_token(self.context.spec, message["gang"]), host)
        self.context.report(GangOpen(message["gang"], host, self._rendezvous.address[1]))

    def _join(self, message: dict[str, Any]) -> None:
        from libra.train.replica_group import TrainGroup

        number, rank = message["gang"], message["rank"]
        with self.in_turn:  # a step that has lost its group ends first
            group = TrainGroup.join(
                (message["host"], message["port"]),
                rank,
                message["size"],
                token=group_token(self.context.spec, number),
                epoch=number,
                on_gpus=compute_device(self.context.spec.config.cluster.device).type == "cuda",
            )
            steps = self._bring_replica(group)
            self.group, self.joined = group, number
            if rank == 0:
                self.trainer.open_pool(number)
        self.context.report(GangRankJoined(number, rank, steps))

    def _bring_replica(self, group: TrainGroup) -> int:
        """Make the replica a member of ``group``; returns the steps that all ranks then have."""
        trainer, newest = self.trainer, self.context.weights.store.latest()
        known = [trainer.replica.steps_done if trainer.has_replica else 0, newest.number if newest is not None else 0]
        steps = max(max(taken) for taken in group.gather(known))
        if not trainer.has_replica or trainer.replica.settings.layout != "ddp":
            trainer.make_replica(group)
        replica, checkpoints = trainer.replica, trainer.checkpoints
        replica.group = group
        replica.abandon()  # other ranks may lack this rank's part of an open step
        checkpoints.is_writer, checkpoints.is_sharded = group.rank == 0, replica.is_sharded
        if not replica.is_sharded:
            replica.synchronise()
        trainer.replayed += trainer.recover(steps)
        # Here all ranks are present; later a task of an earlier wave may be repeated on one rank alone.
        waves = group.from_first(len(committed_waves(self.context.spec, replica.steps_done)))
        trainer.add_waves(replica.steps_done, waves)
        return replica.steps_done


def turn(gang: GangMember | None, rank: int) -> AbstractContextManager[None]:
    """`GangMember.turn`, or a null context without a group."""
    return nullcontext() if gang is None else gang.turn(rank)

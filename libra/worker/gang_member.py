"""A training worker's place in its group: joins when the scheduler says so, and gives its tasks their turn.

`libra.scheduler.gang_plugin` decides who is in which group; see there for the messages. A new group begins with everybody in the
state of whoever has taken most steps, and not behind what was published: survivors send theirs, else the newest checkpoint is
loaded and committed batches are replayed, by all ranks together.

Invariants
----------
1. A task of the group and the forming of another one exclude each other.
2. A task whose group is gone is given back (``Reschedule``), with weights and optimizer as they were before its step.
3. Messages of a group older than the last one heard of are not listened to.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from distributed import Reschedule
from distributed.comm import get_address_host

from libra.errors import GroupLost, LibraError
from libra.worker.recovery import catch_up
from libra.worker.reports import report
from libra.worker.role_member import open_pool

if TYPE_CHECKING:
    from libra.train.replica_group import TrainGroup
    from libra.worker.host import LibraHost

logger = logging.getLogger(__name__)


class GangMember:
    """One per host that trains together with others."""

    def __init__(self, host: LibraHost) -> None:
        self.host = host
        self.number = -1
        """Of the last group heard of."""
        self.joined = -1
        """Of the group that it is in, or was in last."""
        self.group: TrainGroup | None = None
        self.closed = False
        self.in_turn = threading.Lock()
        self._store: Any = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="libra-gang")

    def announce(self) -> None:
        """Listen, and tell the scheduler that a replica is here."""
        worker = self.host.worker
        worker.stream_handlers.setdefault("libra-gang", lambda **message: _heard(worker, message))
        report(worker, self.host.spec, "trainer", name=str(worker.name), address=worker.address)

    def heard(self, message: dict[str, Any]) -> None:
        """What the scheduler wants; called on the event loop, where nothing may wait or raise."""
        if message["gang"] < self.number or self.closed:
            return
        self.number = message["gang"]
        self._thread.submit(self._do, message)

    def close(self) -> None:
        """Leave the group; what runs in it ends by itself."""
        self.closed = True
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self.group is not None:
            self.group.leave()
        self.group = self._store = None

    def broken(self, number: int, rank: int, detail: str) -> None:
        """Tell the scheduler that group ``number`` is over; it may know, and be forming the next one already."""
        self.group = None
        report(self.host.worker, self.host.spec, "gang_failed", gang=number, rank=rank, detail=detail[:500])

    def _do(self, message: dict[str, Any]) -> None:
        try:
            if message["do"] == "open":
                self._open(message)
            else:
                self._join(message)
        except LibraError as error:
            logger.warning("training group %d: %s", message["gang"], error)
            self.broken(message["gang"], message["rank"], str(error))
        except Exception as error:  # the boundary of this thread: nobody else would ever hear of it
            logger.exception("training group %d", message["gang"])
            self.broken(message["gang"], message["rank"], f"{type(error).__name__}: {error}")

    def _open(self, message: dict[str, Any]) -> None:
        from libra.train.replica_group import TrainGroup

        worker = self.host.worker
        host = get_address_host(worker.address)
        self._store = TrainGroup.open(host, message["size"])
        report(worker, self.host.spec, "gang_open", gang=message["gang"], host=host, port=self._store.port)

    def _join(self, message: dict[str, Any]) -> None:
        from libra.tensors import compute_device
        from libra.train.replica_group import TrainGroup

        number, rank = message["gang"], message["rank"]
        with self.in_turn:  # a step that has lost its group ends first
            store = self._store if rank == 0 else None
            group = TrainGroup.join(
                (message["host"], message["port"]),
                rank,
                message["size"],
                epoch=number,
                store=store,
                on_gpus=compute_device(self.host.spec.config.cluster.device).type == "cuda",
            )
            steps = self._take_up(group)
            self.group, self.joined = group, number
            if rank == 0:
                open_pool(self.host, number)
        report(self.host.worker, self.host.spec, "gang_joined", gang=number, rank=rank, steps=steps)

    def _take_up(self, group: TrainGroup) -> int:
        """Make the host's replica one of ``group``; the steps that it and all others have taken then."""
        from libra.train.group_sync import synchronise

        host = self.host
        newest = host.weights.latest()
        known = [host.replica.steps_done if host.replica is not None else 0, newest.number if newest is not None else 0]
        steps = max(max(taken) for taken in group.gather(known))
        if host.replica is None or host.replica.settings.layout == "fsdp2":
            host.put_replica(group)
        assert host.replica is not None and host.checkpoints is not None
        host.replica.group = group
        host.checkpoints.is_writer, host.checkpoints.is_sharded = group.rank == 0, host.replica.is_sharded
        if not host.replica.is_sharded:
            synchronise(host.replica)
        host.replayed += catch_up(host, steps)
        return host.replica.steps_done


def _heard(worker: Any, message: dict[str, Any]) -> None:
    """A message for one of the hosts of this worker. Runs on the worker's stream, where an exception would close the worker."""
    from libra.worker.host import LibraHost, host_name

    host = worker.plugins.get(host_name(message["run"]))
    if isinstance(host, LibraHost) and host.spec.epoch == message["epoch"] and host.gang is not None:
        host.gang.heard(message)


@contextmanager
def turn(host: LibraHost, rank: int) -> Iterator[None]:
    """Do something as ``rank`` of the group, alone on this worker; a task whose group is gone is given back."""
    member = host.gang
    if member is None:
        yield
        return
    with member.in_turn:
        if member.group is None or member.group.rank != rank:
            member.broken(
                member.joined, rank, f"rank {rank} was asked for on {host.worker.name}, which has left its group"
            )
            raise Reschedule()
        try:
            yield
        except GroupLost as error:
            logger.warning("rank %d: %s", rank, error)
            member.broken(member.joined, rank, str(error))
            raise Reschedule() from None

"""A worker in role ``train``: its replica computes slices for the core's pool (`libra.train.hybrid_pool`).

After losing the core, it reconnects: to the same pool, if that had only dropped this replica, or to the next one that is
opened.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from libra.errors import LibraError, TransferError
from libra.worker.context import WorkerContext
from libra.worker.model_files import ONE_MODEL_AT_A_TIME, collect_frozen
from libra.worker.replica_factory import make_replica
from libra.worker.trainer import pool_token

if TYPE_CHECKING:
    from libra.train import Replica
    from libra.train.hybrid_replica import HybridReplica

logger = logging.getLogger(__name__)

Pool = tuple[int, str, int]
"""Number of the gang whose core opened it (0 if it is alone), host and port."""


class HybridTraining:
    """The replica of a worker that can change roles, and its service in the pool.

    ``stage_done`` (stage, when it began on the performance counter) and ``failed`` (detail) report events of the service.
    """

    def __init__(
        self, context: WorkerContext, stage_done: Callable[[str, float], None], failed: Callable[[str], None]
    ) -> None:
        self.context, self._stage_done, self._failed = context, stage_done, failed
        self._pool: Pool | None = None
        self._pool_changed = asyncio.Event()
        self._leaving = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="libra-hybrid")
        self._replica: Replica | None = None
        self._hybrid: HybridReplica | None = None
        self._service: asyncio.Future[None] | None = None

    @property
    def in_pool(self) -> bool:
        """Whether it serves the pool, or must still leave a broken service."""
        return self._service is not None

    def pool_opened(self, pool: Pool) -> None:
        """The core accepts hybrid replicas at this address."""
        self._pool = pool
        self._pool_changed.set()

    async def start(self) -> None:
        """Build a replica, unless one exists, and join the core; its weights arrive while the core continues."""
        if self._service is not None and not self._service.done():
            return  # its drain had not begun
        if self._pool is None:
            raise TransferError("no core replica accepts hybrid replicas now; request the change again later")
        if self._replica is None:
            async with ONE_MODEL_AT_A_TIME:
                self._replica = await self._in_thread(make_replica, self.context.spec, self.context.model_dir, None)
        self._leaving = False
        self._hybrid = await self._in_thread(self._connect, self._pool)
        self._service = asyncio.ensure_future(self._serve(self._hybrid))

    async def leave(self, timeout_s: float | None) -> None:
        """End the service: the current slice is finished, or goes to the core after ``timeout_s``."""
        self._leaving = True
        self._pool_changed.set()
        assert self._service is not None
        if self._hybrid is not None:
            try:
                self._hybrid.leave()
            except TransferError as error:
                logger.info("%s: the core had already ended: %s", self.context.name, error)
        _, late = await asyncio.wait([self._service], timeout=timeout_s)
        if late and self._hybrid is not None:
            self._hybrid.abandon()
            await asyncio.wait([self._service])
        self._service = self._hybrid = None

    async def drop_replica(self) -> None:
        """Free the replica's memory."""
        if self._replica is not None:
            self._replica = None
            await asyncio.to_thread(collect_frozen)

    def close(self) -> None:
        """Abort the service."""
        self._leaving = True
        if self._service is not None:
            self._service.cancel()
        if self._hybrid is not None:
            self._hybrid.abandon()
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._replica = None

    def _connect(self, pool: Pool) -> HybridReplica:
        from libra.train.hybrid_replica import HybridReplica

        gang, host, port = pool
        assert self._replica is not None
        began_s, loop = time.perf_counter(), self.context.worker.loop
        hybrid = HybridReplica(self._replica, (host, port), pool_token(self.context.spec, gang), name=self.context.name)
        hybrid.on_state = lambda: loop.add_callback(self._stage_done, "state", began_s)
        return hybrid

    async def _serve(self, hybrid: HybridReplica) -> None:
        """Compute slices until it leaves, or its core refuses it."""
        try:
            while True:
                used = self._pool
                await self._in_thread(hybrid.run)
                if self._leaving:
                    return
                lost_s = time.perf_counter()
                logger.warning("%s: the core's pool %s has closed; reconnecting", self.context.name, used)
                if (found := await self._reconnect(used)) is None:
                    return
                self._hybrid = hybrid = found
                self._stage_done("reconnected", lost_s)
        except LibraError as error:
            if not self._leaving:
                self._failed(str(error))
        except Exception as error:  # the boundary of this task, whose exceptions are not reported
            logger.exception("%s: training failed", self.context.name)
            if not self._leaving:
                self._failed(f"{type(error).__name__}: {error}")

    async def _reconnect(self, used: Pool | None) -> HybridReplica | None:
        """The replica in the same pool or the next one; None: it must leave first."""
        while not self._leaving:
            pool = self._pool
            self._pool_changed.clear()
            assert pool is not None
            try:
                found: HybridReplica = await self._in_thread(self._connect, pool)
                return found
            except TransferError:
                if pool != used:
                    raise
            while self._pool == used and not self._leaving:
                await self._pool_changed.wait()
                self._pool_changed.clear()
        return None

    async def _in_thread(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)

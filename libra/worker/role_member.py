"""A worker that can switch roles: carries out the stages of a switch, and reports end and seconds.

`libra.scheduler.worker_roles` sends the stages (`libra.policy.role_changes`). Role ``rollout``
serves with an engine, ``train`` computes slices with a replica for the core's pool
(`libra.train.hybrid_pool`), ``lent`` does nothing. A replica that loses the core reconnects to the
same pool if only the connection was lost, or else to the next pool.

Invariants
----------
1. Stages run one at a time, in order of arrival. A stage of an outdated switch does not start, and
   a running drain of one ends early; any other running stage is finished first.
2. Every error is reported as a failure of the stage; a stream handler never raises.
3. Engine and replica are never in memory together: one is released before the other starts.
4. A reconnecting worker starts no role before the scheduler's message.
5. The scheduler withdraws slots before a drain; the worker sets its own slots to zero when no task
   holds one, and restores them before it reports its new role.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from libra import keys
from libra.errors import LibraError, TransferError
from libra.facts import RoleMemberJoined, RoleStage, RoleStageFailed
from libra.policy.role_changes import Assignment, Role, Stage
from libra.worker.context import WorkerContext
from libra.worker.dask_worker import set_supply, takes
from libra.worker.engine.engine_factory import EngineKind, Share, check_parallel, make_engine
from libra.worker.engine.worker_engine import WorkerEngine
from libra.worker.model_files import ONE_MODEL_AT_A_TIME, collect_frozen
from libra.worker.training.worker_trainer import make_replica, pool_token

if TYPE_CHECKING:
    from libra.train import Replica
    from libra.train.hybrid_replica import HybridReplica

logger = logging.getLogger(__name__)

LOOKS_EVERY_S = 0.005
"""Seconds between checks of a drain for the last task."""


Pool = tuple[int, str, int]
"""Number of the gang whose core opened it (0 if it is alone), host and port."""


class RoleMember:
    """Role switches of one worker in a run; created before ``engine`` starts."""

    def __init__(self, context: WorkerContext, engine: WorkerEngine) -> None:
        self.context, self.engine = context, engine
        self.base, self.share = engine.kind, Share.of_worker()
        self.training = HybridTraining(
            context,
            lambda *stage: self._stage_done(self.number, *stage),
            lambda error: self._failed(self.number, error),
        )
        self.has: Assignment | None = Assignment(Role.ROLLOUT, self.base.tp)
        """Its present or last role; None if nothing is in memory."""
        self.number = -1
        """Generation of the newest change that a message named."""
        self.leaving = False
        """Whether it must not begin another generation or slice."""
        self._built = self.base  # of the engine that Serving builds
        self._stages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._worker_task: asyncio.Task[None] | None = None

    # ---------------------------------------------------------------- lifecycle

    async def came_back(self) -> bool:
        """Whether the scheduler already knows this worker, which then awaits a role message."""
        spec, worker = self.context.spec, self.context.worker
        known: bool = await worker.scheduler.libra_role_known(run=spec.run, epoch=spec.epoch, worker=self.context.name)
        if known:
            self.has = None
            set_supply(worker, keys.ROLLOUT, 0)
        return known

    def announce(self) -> None:
        """Subscribe to the scheduler's messages, and report this worker and its initial role."""
        self.context.listen("libra-role", lambda **message: self.heard(message))
        self._worker_task = asyncio.ensure_future(self._work())
        share = asdict(self.share)
        self.context.report(RoleMemberJoined(self.context.name, self.base.tp, self.base.slots, share))

    def heard(self, message: dict[str, Any]) -> None:
        """Handle a message of the scheduler, on the event loop; must not wait or raise."""
        if message["pool"] is not None:
            self.training.pool_opened(tuple(message["pool"]))
        if message["stage"] is not None and message["generation"] >= self.number:
            self.number = message["generation"]
            self._stages.put_nowait(message)

    def close(self) -> None:
        """Stop, and restore the initial number of slots."""
        self.leaving = True
        if self._worker_task is not None:
            self._worker_task.cancel()
        self.training.close()
        set_supply(self.context.worker, keys.ROLLOUT, self.base.slots)

    # ---------------------------------------------------------------- stages

    async def _work(self) -> None:
        while True:
            message = await self._stages.get()
            if message["generation"] < self.number:
                continue
            stage, number, started_s = Stage(message["stage"]), message["generation"], time.perf_counter()
            target = Assignment(Role(message["role"]), message["tp"])
            try:
                match stage:
                    case Stage.DRAINING:
                        check_parallel(self.base.engine, target.tp)  # before anything is released
                        await self._drain(number)
                    case Stage.SLEEPING:
                        await self._sleep()
                    case Stage.TAKING_UP:
                        await self._take_up(target, message["slots"], [Share(**share) for share in message["shares"]])
            except Exception as error:  # noqa: BLE001 the boundary of this task, whose exceptions are shown to no one
                self._failed(number, error)
            else:
                self._stage_done(number, str(stage), started_s)

    def _stage_done(self, generation: int, stage: str, started_s: float) -> None:
        seconds = round(time.perf_counter() - started_s, 6)
        self.context.report(RoleStage(self.context.name, generation, stage, seconds))

    def _failed(self, generation: int, error: Exception) -> None:
        known, name = isinstance(error, LibraError), self.context.name
        detail = str(error) if known else f"{type(error).__name__}: {error}"
        logger.warning("role change %d of %s failed: %s", generation, name, detail, exc_info=None if known else error)
        self.context.report(RoleStageFailed(name, generation, detail[:1000]))

    async def _drain(self, number: int) -> None:
        self.leaving = True
        timeout_s = self.context.spec.config.cluster.drain_timeout_s
        if self.training.in_pool:
            await self.training.leave(timeout_s)
        elif self.has is not None and self.has.role is Role.ROLLOUT:
            await self._idle(number, None if timeout_s is None else time.monotonic() + timeout_s)

    async def _idle(self, number: int, until_s: float | None = None) -> None:
        while takes(self.context.worker, keys.ROLLOUT) and number == self.number:
            if until_s is not None and time.monotonic() > until_s:
                await self.engine.serving.sleep(abort=True)  # running turns return to the scheduler
                until_s = None
            await asyncio.sleep(LOOKS_EVERY_S)

    async def _sleep(self) -> None:
        if self.training.in_pool:  # a newer switch ended the drain
            self.leaving = True
            await self.training.leave(None)
        await self.engine.serving.sleep()
        set_supply(self.context.worker, keys.ROLLOUT, 0)
        await self.training.drop_replica()
        self.has = None

    async def _take_up(self, target: Assignment, slots: int, shares: list[Share]) -> None:
        if target.role is Role.ROLLOUT:
            share = Share.joined(shares) if len(shares) > 1 else None
            await self._generate_again(replace(self.base, tp=target.tp, slots=slots, share=share))
        elif target.role is Role.TRAIN:
            await self.training.start()
        self.has = target
        self.leaving = False

    async def _generate_again(self, kind: EngineKind) -> None:
        engine = self.engine
        if engine.serving.asleep:
            build = None if kind == self._built else partial(make_engine, self.context.spec.config, kind)
            before, engine.kind = engine.kind, kind
            try:
                await engine.serving.wake(build)
            except BaseException:
                engine.kind = before
                raise
            self._built = kind
        else:  # after an early end of a drain: all slots must be free before the worker offers them again
            await self._idle(self.number)
        set_supply(self.context.worker, keys.ROLLOUT, kind.slots)


class HybridTraining:
    """The replica of a worker that can switch roles, and the replica's service in the pool.

    Callbacks: ``stage_done(stage, start in perf_counter seconds)`` and ``failed(error)``.
    """

    def __init__(
        self, context: WorkerContext, stage_done: Callable[[str, float], None], failed: Callable[[Exception], None]
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
        """Whether the replica serves the pool, or has yet to leave a broken service."""
        return self._service is not None

    def pool_opened(self, pool: Pool) -> None:
        self._pool = pool
        self._pool_changed.set()

    async def start(self) -> None:
        """Build a replica if there is none, and join the core's pool."""
        if self._service is not None and not self._service.done():
            return  # the drain had not started
        if self._pool is None:
            raise TransferError("no core replica accepts hybrid replicas now; request the change again later")
        if self._replica is None:
            async with ONE_MODEL_AT_A_TIME:
                self._replica = await self._in_thread(make_replica, self.context.spec, self.context.model_dir, None)
        self._leaving = False
        self._hybrid = await self._in_thread(self._connect, self._pool)
        self._service = asyncio.ensure_future(self._serve(self._hybrid))

    async def leave(self, timeout_s: float | None) -> None:
        """End the service after the current slice; after ``timeout_s`` the core takes the slice."""
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
        if self._replica is not None:
            self._replica = None
            await asyncio.to_thread(collect_frozen)

    def close(self) -> None:
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
        except Exception as error:  # noqa: BLE001 the boundary of this task, whose exceptions are not reported
            if not self._leaving:
                self._failed(error)

    async def _reconnect(self, used: Pool | None) -> HybridReplica | None:
        while not self._leaving:
            pool = self._pool
            self._pool_changed.clear()
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

"""A worker that can change roles: carries out each stage that the scheduler sends, and reports its end and its seconds.

`libra.scheduler.worker_roles` sends the stages (`libra.policy.role_changes`). Here ``rollout`` is an engine that serves,
``train`` a replica in the service of the core's pool (`libra.train.hybrid_pool`), ``lent`` nothing.

Invariants
----------
1. One stage at a time, in the order they came. A stage of a change older than the newest one known is not begun, and a drain
   under way ends; any other stage is finished first.
2. Every error is reported as a failure of the stage; a handler of the stream never raises.
3. Engine and replica are never in memory together: one is released before the other starts.
4. A worker that returns during the run starts no role without a message.
5. The scheduler withdraws slots before a drain; here they are zeroed when no task that takes one is left, and restored before
   the worker reports that it has its new role.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from libra import keys
from libra.errors import LibraError
from libra.facts import RoleMemberJoined, RoleStage, RoleStageFailed
from libra.policy.role_changes import Assignment, Role, Stage
from libra.worker.context import WorkerContext
from libra.worker.dask_internals import set_supply, takes
from libra.worker.engine_factory import EngineKind, Share, check_parallel, make_engine
from libra.worker.hybrid_training import HybridTraining
from libra.worker.worker_engine import WorkerEngine

logger = logging.getLogger(__name__)

LOOKS_EVERY_S = 0.005
"""Seconds between checks of a drain for the last task."""


class RoleMember:
    """One per host whose worker can change roles; created before its ``engine`` starts."""

    def __init__(self, context: WorkerContext, engine: WorkerEngine) -> None:
        self.context, self.engine = context, engine
        self.base, self.share = engine.kind, Share.of_worker()
        self.training = HybridTraining(
            context, lambda *stage: self._stage_done(self.number, *stage), self._training_failed
        )
        self.has: Assignment | None = Assignment(Role.ROLLOUT, self.base.tp)
        """Its present role, or the last one; None: nothing is in memory."""
        self.number = -1
        """Generation of the newest change that a message named."""
        self.leaving = False
        """Whether it must not begin another generation or slice."""
        self._built = self.base  # of the engine that Serving builds
        self._stages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._worker_task: asyncio.Task[None] | None = None

    # ---------------------------------------------------------------- lifecycle

    async def came_back(self) -> bool:
        """Whether the scheduler had this worker before; then it waits for a message before it starts a role."""
        spec, worker = self.context.spec, self.context.worker
        known: bool = await worker.scheduler.libra_role_known(run=spec.run, epoch=spec.epoch, worker=self.context.name)
        if known:
            self.has = None
            set_supply(worker, keys.ROLLOUT, 0)
        return known

    def announce(self) -> None:
        """Register for the scheduler's messages, and report this worker and the role it was started for."""
        self.context.listen("libra-role", lambda **message: self.heard(message))
        self._worker_task = asyncio.ensure_future(self._work())
        share = asdict(self.share)
        self.context.report(RoleMemberJoined(self.context.name, self.base.tp, self.base.slots, share))

    def heard(self, message: dict[str, Any]) -> None:
        """Handle a message of the scheduler; called on the event loop, so it must not wait or raise."""
        if message["pool"] is not None:
            self.training.pool_opened(tuple(message["pool"]))
        if message["stage"] is not None and message["generation"] >= self.number:
            self.number = message["generation"]
            self._stages.put_nowait(message)

    def close(self) -> None:
        """Stop; the worker supplies what it was started with."""
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
            except LibraError as error:
                self._failed(number, str(error))
            except Exception as error:  # the boundary of this task, whose exceptions are shown to no one
                logger.exception("role change %d: %s", number, stage)
                self._failed(number, f"{type(error).__name__}: {error}")
            else:
                self._stage_done(number, str(stage), started_s)

    def _stage_done(self, generation: int, stage: str, started_s: float) -> None:
        seconds = round(time.perf_counter() - started_s, 6)
        self.context.report(RoleStage(self.context.name, generation, stage, seconds))

    def _failed(self, generation: int, detail: str) -> None:
        logger.warning("role change %d of %s failed: %s", generation, self.context.name, detail)
        self.context.report(RoleStageFailed(self.context.name, generation, detail[:1000]))

    def _training_failed(self, detail: str) -> None:
        self._failed(self.number, detail)

    async def _drain(self, number: int) -> None:
        """Let running work end, or abort it after ``cluster.drain_timeout_s``; a newer change ends the wait."""
        self.leaving = True
        timeout_s = self.context.spec.config.cluster.drain_timeout_s
        until_s = None if timeout_s is None else time.monotonic() + timeout_s
        if self.training.in_pool:
            await self.training.leave(timeout_s)
        elif self.has is not None and self.has.role is Role.ROLLOUT:
            await self._idle(number, until_s)

    async def _idle(self, number: int, until_s: float | None = None) -> None:
        """Wait until no generation runs on this worker."""
        while takes(self.context.worker, keys.ROLLOUT) and number == self.number:
            if until_s is not None and time.monotonic() > until_s:
                await self.engine.serving.sleep(abort=True)  # turns under way are returned to the scheduler
                until_s = None
            await asyncio.sleep(LOOKS_EVERY_S)

    async def _sleep(self) -> None:
        if self.training.in_pool:  # a newer change ended its drain
            self.leaving = True
            await self.training.leave(None)
        await self.engine.serving.sleep()
        set_supply(self.context.worker, keys.ROLLOUT, 0)
        await self.training.drop_replica()
        self.has = None

    async def _take_up(self, target: Assignment, slots: int, shares: list[Share]) -> None:
        """``slots`` and ``shares`` are of all workers whose GPUs its engine has, its own first."""
        match target.role:
            case Role.ROLLOUT:
                share = Share.joined(shares) if len(shares) > 1 else None
                await self._generate_again(replace(self.base, tp=target.tp, slots=slots, share=share))
            case Role.TRAIN:
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
        else:  # a drain that was ended early: all slots must be free before the worker supplies them again
            await self._idle(self.number)
        set_supply(self.context.worker, keys.ROLLOUT, kind.slots)

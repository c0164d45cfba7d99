"""A worker that can change roles: does what the scheduler says of each stage, and says when it is done and how long it took.

`libra.scheduler.role_plugin` sends the stages (`libra.policy.role_changes`). Here ``rollout`` is an engine that serves,
``train`` a replica in the service of the core's pool (`libra.train.hybrid_pool`), ``lent`` nothing at all.

Invariants
----------
1. One stage at a time, in the order they came. One that is older than the newest heard of is not begun, and a drain is ended;
   any other is finished first, so that nothing is left half way.
2. Whatever goes wrong is reported as a failure of the stage; a handler of the stream never raises.
3. Engine and replica are never in memory together: what is taken up was preceded by the sleep of what was there.
4. A worker that comes back in mid-run takes nothing up by itself.
5. The scheduler withdraws slots before a drain; here they are zeroed when no task that takes one is left, and given back before
   the worker says that it has taken the role up.
"""

from __future__ import annotations

import asyncio
import gc
import hashlib
import hmac
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from distributed.comm import get_address_host

from libra import keys
from libra.errors import LibraError, TransferError
from libra.policy.role_messages import Assignment, Role, Stage
from libra.worker.dask_internals import set_supply, takes
from libra.worker.engine_factory import EngineKind, Share, check_parallel, make_engine
from libra.worker.replica_factory import make_replica
from libra.worker.reports import report
from libra.worker.run_spec import RunSpec

if TYPE_CHECKING:
    from libra.train import Replica
    from libra.train.hybrid_replica import HybridReplica
    from libra.worker.host import LibraHost

logger = logging.getLogger(__name__)

LOOKS_EVERY_S = 0.005
"""How often a drain looks whether the last task has left the worker."""

Pool = tuple[int, str, int]
"""Number of the gang whose core opened it (0 where it is alone), host and port."""


def pool_token(spec: RunSpec, gang: int) -> str:
    """What a hybrid replica has to know to join the core of this gang in this start of the run."""
    return hmac.new(spec.secret.encode(), f"hybrid/{spec.epoch}/{gang}".encode(), hashlib.sha256).hexdigest()


def open_pool(host: LibraHost, gang: int) -> None:
    """On rank 0 of the core: from now on hybrid replicas may join; says where. Nothing in a run that has none."""
    if not host.spec.config.cluster.hybrid_workers:
        return
    replica = host.replica
    assert replica is not None, "only a core replica opens a pool"
    if replica.hybrids is not None:
        replica.hybrids.close()
    where = get_address_host(host.worker.address)
    pool = replica.admit_hybrids(pool_token(host.spec, gang), host=where)
    report(host.worker, host.spec, "hybrid_pool", gang=gang, host=where, port=pool.address[1])


class RoleMember:
    """One per host whose worker can change roles."""

    def __init__(self, host: LibraHost, kind: EngineKind) -> None:
        self.host, self.base, self.share = host, kind, Share.of_worker()
        self.has: Assignment | None = Assignment(Role.ROLLOUT, kind.tp)
        """What it does, or did last; None: nothing is in memory."""
        self.number = -1
        """Of the last change heard of."""
        self.leaving = False
        """Whether it is to take no further generation, nor slice."""
        self.pool: Pool | None = None
        self._built = kind  # of the engine that Serving makes
        self._pool_changed = asyncio.Event()
        self._stages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._tasks: set[asyncio.Future[None]] = set()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="libra-hybrid")
        self._replica: Replica | None = None
        self._hybrid: HybridReplica | None = None
        self._service: asyncio.Future[None] | None = None  # in the pool

    # ---------------------------------------------------------------- life

    async def came_back(self) -> bool:
        """Whether the scheduler knew this worker before; then it takes nothing up before it is told to."""
        spec, worker = self.host.spec, self.host.worker
        known: bool = await worker.scheduler.libra_role_known(run=spec.run, epoch=spec.epoch, worker=str(worker.name))
        if known:
            self.has = None
            set_supply(worker, keys.ROLLOUT, 0)
        return known

    def announce(self) -> None:
        """Listen, and tell the scheduler who is here and what it was started for."""
        worker, kind = self.host.worker, self.base
        worker.stream_handlers.setdefault("libra-role", lambda **message: _heard(worker, message))
        self._start(self._work())
        said: dict[str, Any] = {"name": str(worker.name), "address": worker.address, "tp": kind.tp, "slots": kind.slots}
        said["share"] = asdict(self.share)
        report(worker, self.host.spec, "role_member", **said)

    def heard(self, message: dict[str, Any]) -> None:
        """What the scheduler wants; called on the event loop, where nothing may wait or raise."""
        if message["pool"] is not None:
            self.pool = tuple(message["pool"])
            self._pool_changed.set()
        if message["stage"] is not None and message["generation"] >= self.number:
            self.number = message["generation"]
            self._stages.put_nowait(message)

    async def close(self) -> None:
        """Hang up; the worker is as it was started for whoever comes next."""
        self.leaving = True
        for task in self._tasks:
            task.cancel()
        if self._hybrid is not None:
            self._hybrid.abandon()
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._replica = None
        set_supply(self.host.worker, keys.ROLLOUT, self.base.slots)

    def _start(self, work: Any) -> asyncio.Future[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

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
                        check_parallel(self.base.engine, target.tp)  # said before anything is given up
                        await self._drain(number)
                    case Stage.SLEEPING:
                        await self._sleep()
                    case Stage.TAKING_UP:
                        await self._take_up(target, message["slots"], [Share(**share) for share in message["shares"]])
            except LibraError as error:
                self._failed(number, str(error))
            except Exception as error:  # the boundary of this task: nobody else would ever hear of it
                logger.exception("role change %d: %s", number, stage)
                self._failed(number, f"{type(error).__name__}: {error}")
            else:
                self._tell("role_stage", number, stage=str(stage), seconds=round(time.perf_counter() - started_s, 6))

    def _tell(self, kind: str, generation: int, **fields: Any) -> None:
        report(self.host.worker, self.host.spec, kind, name=str(self.host.worker.name), generation=generation, **fields)

    def _failed(self, generation: int, detail: str) -> None:
        logger.warning("role change %d of %s failed: %s", generation, self.host.worker.name, detail)
        self._tell("role_failed", generation, detail=detail[:1000])

    async def _drain(self, number: int) -> None:
        """Let what runs end, or after ``cluster.drain_timeout_s`` abort it; a newer change ends the wait."""
        self.leaving = True
        timeout_s = self.host.spec.config.cluster.drain_timeout_s
        until_s = None if timeout_s is None else time.monotonic() + timeout_s
        if self._service is not None:
            await self._leave_pool(timeout_s)
        elif self.has is not None and self.has.role is Role.ROLLOUT:
            await self._idle(number, until_s)

    async def _idle(self, number: int, until_s: float | None = None) -> None:
        """Wait until no generation is left on this worker."""
        serving = self.host.serving
        assert serving is not None, "who rolls out has an engine"
        while takes(self.host.worker, keys.ROLLOUT) and number == self.number:
            if until_s is not None and time.monotonic() > until_s:
                await serving.sleep(abort=True)  # turns under way are given back to the scheduler
                until_s = None
            await asyncio.sleep(LOOKS_EVERY_S)

    async def _sleep(self) -> None:
        serving = self.host.serving
        assert serving is not None, "who can change roles was started with an engine"
        if self._service is not None:  # its drain was ended by a newer change
            await self._leave_pool(None)
        await serving.sleep()
        set_supply(self.host.worker, keys.ROLLOUT, 0)
        if self._replica is not None:
            self._replica = None
            await asyncio.to_thread(_collect)
        self.has = None

    async def _take_up(self, target: Assignment, slots: int, shares: list[Share]) -> None:
        """``slots`` and ``shares`` are of all workers whose GPUs its engine has, its own first."""
        match target.role:
            case Role.ROLLOUT:
                share = Share.joined(shares) if len(shares) > 1 else None
                await self._generate_again(replace(self.base, tp=target.tp, slots=slots, share=share))
            case Role.TRAIN:
                await self._train()
        self.has = target
        self.leaving = False

    async def _generate_again(self, kind: EngineKind) -> None:
        serving = self.host.serving
        assert serving is not None, "who can change roles was started with an engine"
        if serving.asleep:
            build = None if kind == self._built else partial(make_engine, self.host.spec.config, kind)
            before, self.host.kind = self.host.kind, kind
            try:
                await serving.wake(build)
            except BaseException:
                self.host.kind = before
                raise
            self._built = kind
        else:  # a drain that was ended early: who supplies slots again must have none taken
            await self._idle(self.number)
        set_supply(self.host.worker, keys.ROLLOUT, kind.slots)

    # ---------------------------------------------------------------- training

    async def _train(self) -> None:
        """Make a replica, unless one is there, and join the core; its weights come while the core goes on."""
        from libra.worker.host import ONE_MODEL_AT_A_TIME

        if self._service is not None and not self._service.done():
            return  # its drain had not begun
        if self.pool is None:
            raise TransferError("no core replica is open for hybrid replicas now; ask again when one is there")
        if self._replica is None:
            async with ONE_MODEL_AT_A_TIME:
                self._replica = await self._in_thread(make_replica, self.host.spec, self.host.model_dir, None)
        self.leaving = False
        self._hybrid = await self._in_thread(self._connect, self.pool)
        self._service = self._start(self._serve_pool(self._hybrid))

    def _connect(self, pool: Pool) -> HybridReplica:
        from libra.train.hybrid_replica import HybridReplica

        gang, host, port = pool
        worker, spec = self.host.worker, self.host.spec
        assert self._replica is not None
        began_s = time.perf_counter()
        worker_loop = worker.loop

        def has_state() -> None:
            seconds = round(time.perf_counter() - began_s, 6)
            worker_loop.add_callback(self._tell, "role_stage", self.number, stage="state", seconds=seconds)

        hybrid = HybridReplica(self._replica, (host, port), pool_token(spec, gang), name=str(worker.name))
        hybrid.on_state = has_state
        return hybrid

    async def _serve_pool(self, hybrid: HybridReplica) -> None:
        """Compute slices until it leaves, or its core refuses it. One that is lost is looked for."""
        try:
            while True:
                used = self.pool
                await self._in_thread(hybrid.run)
                if self.leaving:
                    return
                lost_s = time.perf_counter()
                logger.warning("%s: the core's pool %s is gone; it is looked for", self.host.worker.name, used)
                if (found := await self._found_again(used)) is None:
                    return
                self._hybrid = hybrid = found
                seconds = round(time.perf_counter() - lost_s, 6)
                self._tell("role_stage", self.number, stage="reconnected", seconds=seconds)
        except LibraError as error:
            if not self.leaving:
                self._failed(self.number, str(error))
        except Exception as error:  # the boundary of this task: nobody else would ever hear of it
            logger.exception("%s: training broke", self.host.worker.name)
            if not self.leaving:
                self._failed(self.number, f"{type(error).__name__}: {error}")

    async def _found_again(self, used: Pool | None) -> HybridReplica | None:
        """The same pool, which had only given this replica up, or the next one that is opened; None: it has to leave first."""
        while not self.leaving:
            pool = self.pool
            self._pool_changed.clear()
            assert pool is not None
            try:
                return await self._in_thread(self._connect, pool)
            except TransferError:
                if pool != used:
                    raise
            while self.pool == used and not self.leaving:
                await self._pool_changed.wait()
                self._pool_changed.clear()
        return None

    async def _leave_pool(self, timeout_s: float | None) -> None:
        """End the service of the replica: the slice under way is finished, or goes to the core after ``timeout_s``."""
        self.leaving = True
        self._pool_changed.set()
        assert self._service is not None
        if self._hybrid is not None:
            try:
                self._hybrid.leave()
            except TransferError as error:
                logger.info("%s: the core was gone already: %s", self.host.worker.name, error)
        _, late = await asyncio.wait([self._service], timeout=timeout_s)
        if late and self._hybrid is not None:
            self._hybrid.abandon()
            await asyncio.wait([self._service])
        self._service = self._hybrid = None

    async def _in_thread(self, function: Any, *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)


def _heard(worker: Any, message: dict[str, Any]) -> None:
    """A message for one of the hosts of this worker. Runs on the worker's stream, where an exception would close the worker."""
    from libra.worker.host import LibraHost, host_name

    host = worker.plugins.get(host_name(message["run"]))
    if isinstance(host, LibraHost) and host.spec.epoch == message["epoch"] and host.roles is not None:
        host.roles.heard(message)


def _collect() -> None:
    """Free a replica's modules: they lie in cycles, and what a host froze is not looked at by collections."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()

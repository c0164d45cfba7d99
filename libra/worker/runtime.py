"""The lifecycle of a run's objects on a worker: engine, replica, environment, trajectory states.

A WorkerPlugin, so that a nanny that restarts a worker installs it again. The worker's resources
decide what is built: ROLLOUT an engine, TRAIN a replica, COMMIT the zarr store, GRADE the rows of
graded groups, TEACHER the teacher. Dask logs a setup error only on the worker and still calls the
worker running, so the runtime reports the error (`libra.scheduler.worker_watch`).
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import logging
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from distributed import Worker, get_worker
from distributed.diagnostics.plugin import WorkerPlugin

from libra import keys
from libra.cluster.device_lock import GpuTurns
from libra.cluster.hardware_inventory import gpus_here, tool_gpus, tool_supply
from libra.cluster.worker_process import install_stacks
from libra.envs.action_process import ActionProcesses
from libra.envs.asked_services import services_here
from libra.envs.tool_calls import processes_for
from libra.errors import EnvironmentFault, StoreError
from libra.facts import SetupFailed, WorkerReady
from libra.keys import host_name
from libra.store.run_records import run_here
from libra.store.start_records import Epoch
from libra.store.trajectory_journal import Journal
from libra.worker.context import FactSender, WorkerContext
from libra.worker.dask_worker import cheap_reschedule, heartbeat_during_setup
from libra.worker.engine.engine_factory import EngineKind
from libra.worker.engine.worker_engine import WorkerEngine
from libra.worker.model_files import ONE_MODEL_AT_A_TIME, WorkerWeights, local_model
from libra.worker.role_member import RoleMember
from libra.worker.run_spec import RunSpec, with_secret
from libra.worker.services.service_host import RunServices, open_services
from libra.worker.services.service_models import load_teacher
from libra.worker.training.batch_rows import RowKeeper, keeper_of
from libra.worker.training.gang_member import GangMember
from libra.worker.training.worker_trainer import Trainer
from libra.worker.trajectory.quanta import QuantumRunner

if TYPE_CHECKING:
    from libra.envs import Environment
    from libra.store.trajectory_store import TrajectoryStore
    from libra.train.teacher_model import TeacherModel

logger = logging.getLogger(__name__)

STORE_WAIT_S = 20.0
"""Seconds that a resumed run waits for the earlier start's committer to close the store."""
CLEAR_WAIT_S = 120.0
"""Seconds that a run waits until the previous one is cleared from a worker."""
MAX_DETAIL_CHARS = 1000
_CLEARING: WeakKeyDictionary[Worker, set[asyncio.Event]] = WeakKeyDictionary()
"""Runs that are being cleared, by worker."""


class WorkerRuntime(WorkerPlugin):
    """One worker's part of a run; ``secret_file`` holds the run's secret if ``spec`` does not."""

    idempotent = False
    context: WorkerContext
    quanta: QuantumRunner

    def __init__(self, spec: RunSpec, secret_file: Path | None = None) -> None:
        self.spec, self.secret_file = spec, secret_file
        self.name = host_name(spec.run)
        self.engine: WorkerEngine | None = None
        self.roles: RoleMember | None = None
        self.trainer: Trainer | None = None
        self.gang: GangMember | None = None
        self.store: TrajectoryStore | None = None
        self.rows: RowKeeper | None = None
        self.teacher: TeacherModel | None = None
        self.services: RunServices | None = None
        self.setup_error = ""

    @property
    def training(self) -> Trainer:
        """The trainer; asserts that this worker trains."""
        assert self.trainer is not None, f"{self.context.name} was given a task of training and supplies no TRAIN"
        return self.trainer

    async def setup(self, worker: Worker) -> None:
        """Build what this worker's resources require; reports and raises any error."""
        self._parts = AsyncExitStack()
        with heartbeat_during_setup(worker):
            await _cleared(worker)
            try:
                self.spec = with_secret(self.spec, self.secret_file)
                await self._build(worker, worker.state.total_resources)
            except Exception as error:
                self.setup_error = f"{type(error).__name__}: {error}"[:MAX_DETAIL_CHARS]
                FactSender(worker, self.spec.run, self.spec.epoch).send(SetupFailed(str(worker.name), self.setup_error))
                raise
        self.context.report(WorkerReady(self.context.name))

    async def teardown(self, worker: Worker) -> None:
        """Close everything in reverse order of its construction."""
        done = asyncio.Event()
        _CLEARING.setdefault(worker, set()).add(done)
        try:
            await self._parts.aclose()
        finally:
            _CLEARING[worker].discard(done)
            done.set()

    async def _build(self, worker: Worker, supply: Mapping[str, float]) -> None:
        cheap_reschedule()
        install_stacks(worker)
        await self._build_context(worker)
        parts, config, environment = self._parts, self.spec.config, self.context.environment
        processes = await self._tool_processes(worker) if supply.get(keys.TOOL) else None
        async with ONE_MODEL_AT_A_TIME:
            if supply.get(keys.ROLLOUT):
                await self._build_engine(supply)
            if supply.get(keys.TRAIN):
                await self._build_trainer()
            if supply.get(keys.TEACHER) and config.distil.teacher is not None and config.distil.service is None:
                self.teacher = await asyncio.to_thread(load_teacher, config, self.context.model_dir)
            if config.services.named and any(map(supply.get, (keys.TOOL, keys.GRADE, keys.TEACHER))):
                self.services = await open_services(self.context)
                parts.push_async_callback(self.services.close)
                parts.enter_context(services_here(self.services))
        self.quanta = QuantumRunner(
            self.context, self.engine, lambda: self.roles is not None and self.roles.leaving, processes
        )
        self.context.listen("libra-revoke", self.quanta.stoppable.revoke)
        if self.quanta.sessions is not None:
            parts.push_async_callback(self.quanta.sessions.close)
        parts.callback(self.quanta.close)
        if self.engine is not None:
            await self.engine.load_newest()
        if supply.get(keys.COMMIT):
            self.store = await asyncio.to_thread(_open_store, self.spec)
            parts.push_async_callback(asyncio.to_thread, self.store.close)  # which waits for an append
            if environment.isolation:
                await asyncio.to_thread(self.store.note_isolation, environment.isolation)
        # Import here what the first task would import: that takes seconds and blocks the event loop while tasks wait.
        await asyncio.to_thread(importlib.import_module, "libra.graph.iteration")
        runs_agents = bool(supply.get(keys.TOOL)) and config.agent.given
        if runs_agents or self.engine is not None or (supply.get(keys.TOOL) and environment.tools):
            await asyncio.to_thread(lambda: self.quanta.chat)
        if runs_agents:
            from libra.worker.trajectory.agent_quanta import Agents  # needs the extra `agents`

            self.quanta.agents = Agents(self.context, lambda: self.quanta.chat)
            parts.push_async_callback(self.quanta.agents.close)
            await self.quanta.agents.start()
        if self.roles is not None:
            self.roles.announce()
        # Every full collection would walk through half a million objects of torch and transformers.
        gc.collect()
        gc.freeze()

    async def _tool_processes(self, worker: Worker) -> ActionProcesses | None:
        environment, config = self.context.environment, self.spec.config
        if not any(tool.declares for tool in environment.tools):
            return None
        number = str(worker.name).rpartition("-")[2]
        index = int(number) if number.isdigit() else 0
        supply = tool_supply(config, index)
        has = {keys.TOOL_CORES: len(supply.core_ids), keys.TOOL_MIB: supply.mib, keys.TOOL_GPUS: supply.gpus}
        await worker.set_resources(**{name: amount for name, amount in has.items() if amount})
        gpus = GpuTurns(tool_gpus(config, index, gpus_here(supply.gpus))) if supply.gpus else None
        processes = processes_for(environment, supply.core_ids, gpus)
        if processes is not None:
            self._parts.callback(processes.close)
            if gpus is not None:
                processes.begin()  # CUDA cannot be used in a process that is forked from one that has used it
        return processes

    async def _build_context(self, worker: Worker) -> None:
        spec, parts = self.spec, self._parts
        model_dir = await asyncio.to_thread(local_model, spec.model_dir)
        environment = spec.make_environment()
        parts.push_async_callback(self._close_environment, environment)
        await environment.setup()
        epoch = Epoch(spec.epochs_dir, spec.epoch)
        epoch.check()
        journal = Journal(spec.journal_dir, one_machine=spec.config.cluster.scheduler is None)
        parts.callback(journal.close)
        weights = WorkerWeights(worker, spec)
        parts.push_async_callback(asyncio.to_thread, weights.close)
        self.rows = keeper_of(worker, spec)
        if self.rows is not None:
            parts.push_async_callback(asyncio.to_thread, self.rows.close)
        parts.enter_context(run_here(spec.directory))
        self.context = WorkerContext(worker, spec, model_dir, epoch, environment, journal, weights)
        parts.callback(self.context.stop_listening)

    async def _build_engine(self, supply: Mapping[str, float]) -> None:
        self.engine = WorkerEngine(self.context, EngineKind.of(self.spec.config, supply))
        self._parts.push_async_callback(self.engine.close)
        asleep = False
        if supply.get(keys.HYBRID) and self.spec.config.cluster.hybrid_workers:
            self.roles = RoleMember(self.context, self.engine)
            self._parts.callback(self.roles.close)
            asleep = await self.roles.came_back()
        await self.engine.start(asleep=asleep)

    async def _build_trainer(self) -> None:
        in_group = self.spec.config.cluster.train_workers > 1
        self.trainer = Trainer(self.context)
        self._parts.callback(self.trainer.close)
        if not in_group or self.spec.config.trainer.layout == "ddp":
            await asyncio.to_thread(self.trainer.make_replica)
        if in_group:
            self.gang = GangMember(self.context, self.trainer)
            self._parts.callback(self.gang.close)
            self.gang.announce()
        else:
            self.trainer.open_pool(gang=0)

    async def _close_environment(self, environment: Environment) -> None:
        try:
            await environment.close()
        except Exception as error:  # the boundary to the user's environment, which was perhaps never set up
            if not self.setup_error:
                raise
            logger.info("run %s: an environment that was not set up did not close: %s", self.spec.run, error)


def runtime_here(run: str) -> WorkerRuntime:
    """`runtime_of` for tasks that write. Also raises FencedOff after a newer start of the run."""
    host = runtime_of(run)
    host.context.epoch.check()
    return host


def runtime_of(run: str) -> WorkerRuntime:
    """A run's runtime on this task's worker. Raises EnvironmentFault if missing or failed."""
    worker = get_worker()
    host = worker.plugins.get(host_name(run))
    if not isinstance(host, WorkerRuntime):
        raise EnvironmentFault(
            f"worker {worker.name}: it has no part of run {run!r}; workers get it when the run starts "
            f"(is another cluster answering? has the run ended?)"
        )
    if host.setup_error:
        raise EnvironmentFault(f"worker {worker.name}: its part of run {run!r} could not be set up: {host.setup_error}")
    return host


async def _cleared(worker: Worker) -> None:
    try:
        async with asyncio.timeout(CLEAR_WAIT_S):
            while waiting := list(_CLEARING.get(worker, ())):
                await waiting[0].wait()
    except TimeoutError:
        logger.warning(
            "worker %s: a run that has ended is not cleared after %g s; the next one starts anyway",
            worker.name,
            CLEAR_WAIT_S,
        )


def _open_store(spec: RunSpec) -> TrajectoryStore:
    from libra.store.trajectory_store import TrajectoryStore  # imports zarr, which only the committer needs

    until_s = time.monotonic() + STORE_WAIT_S
    while True:
        try:
            return TrajectoryStore.open(spec.store_path, mode="a")
        except StoreError:
            if time.monotonic() > until_s or spec.epoch == 0:
                raise
            time.sleep(0.2)

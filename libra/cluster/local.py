"""A cluster of local processes, one per worker, on one machine."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import dask
from distributed import Nanny, Scheduler, SpecCluster
from distributed.core import Status
from distributed.deploy.cluster import Cluster
from tornado.ioloop import PeriodicCallback

from libra import keys
from libra.cluster import page_names
from libra.cluster.connection import new_security
from libra.cluster.hardware_inventory import this_machine, usable_cores
from libra.cluster.settings import DASK_SETTINGS, GUARD
from libra.cluster.worker_process import LOG_VARIABLE, begin_forking, inherited_environment, worker_environment
from libra.config import RunConfig
from libra.config.service_devices import Place, place_of_services, service_models
from libra.errors import ClusterError
from libra.policy.liveness import Backoff
from libra.processes.fork_server import sigint_blocked, take_over

logger = logging.getLogger(__name__)

SPARE_THREADS = 8
"""Threads of a worker beside its slots, for graders, steps and control tasks."""
LOOPBACK = "127.0.0.1"
NANNY_CHECK_S = 0.5
TOOLS_CHECK_S = 1.0
RENEW_AFTER_S = (0.0, 1.0, 5.0, 30.0)
"""Delay before a nanny is replaced: after the first, second, third end in a row, and any later
end."""
WORKER_START = "libra.cluster.worker_process"
ENDED = (Status.closed, Status.failed)


class ElasticTools:
    """Tool workers from ``least`` to ``cluster.tool_workers_most``, started and ended on demand.

    ``cluster`` is a `distributed.SpecCluster` in the scheduler's process: adding a worker's
    description to it starts the worker. Descriptions beyond ``least`` are removed from ``specs``.
    `libra.scheduler.worker_supply` decides.
    """

    def __init__(self, cluster: Any, specs: dict[str, Any], least: int) -> None:
        self._cluster, self._least = cluster, least
        self._reserve = {name: specs.pop(name) for name in self._tools(specs)[least:]}
        self._most = least + len(self._reserve)

    @staticmethod
    def _tools(names: Iterable[str]) -> list[str]:
        tools = [name for name in names if name.startswith("tool-")]
        return sorted(tools, key=lambda name: int(name.removeprefix("tool-")))

    async def look(self) -> bool:
        """Follow the scheduler's order; returns whether descriptions of workers have changed."""
        plugin = self._cluster.scheduler.plugins.get("libra")
        if plugin is None or self._most == self._least:  # no run has come yet, or none may be added
            return False
        order = plugin.trajectories.tool_workers.look(self._least, self._most)
        if order is None:
            return False
        specs: dict[str, Any] = self._cluster.worker_spec
        if order.give_up and order.give_up in specs:
            self._reserve[order.give_up] = specs.pop(order.give_up)  # first: nothing may start it again
            await self._cluster.scheduler.retire_workers(names=[order.give_up], close_workers=True, remove=True)
            return True
        for name in self._tools(self._reserve)[: max(0, order.ordered - len(self._tools(specs)))]:
            specs[name] = self._reserve.pop(name)
        return True


def most_tools(config: RunConfig) -> int:
    """Largest number of tool workers of a local cluster, or of Slurm."""
    return config.cluster.tool_workers_most or config.cluster.tool_workers


class LocalWorkers(SpecCluster):
    """Worker processes that nannies always restart, and nannies that are restarted themselves.

    Dask closes a nanny permanently if it has no worker ``distributed.deploy.lost-worker-timeout``
    after a loss. A nanny also ends if it cannot start its worker (full disk, no free process), or
    if the worker ends by itself, as after the scheduler has removed it.
    """

    def __init__(self, least: int, workers: dict[str, Any], **options: Any) -> None:
        """``least`` tool workers start at once, the further tool workers in ``workers`` on
        demand."""
        self._elastic = ElasticTools(self, workers, least)
        with sigint_blocked():  # starts what unblocks it, before a thread relies on that
            pass
        try:
            super().__init__(workers=workers, **options)
        except KeyboardInterrupt:
            self.kill()
            raise

    def kill(self) -> None:
        """Kill every worker process at once; close in the background, since closing waits."""
        SpecCluster._instances.discard(self)
        for nanny in list(self._created):
            nanny.auto_restart = False
            if pid := nanny.pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        if self.loop is not None:
            self.loop.add_callback(self._close)

    def _update_worker_status(self, op: str, msg: Any) -> None:
        Cluster._update_worker_status(self, op, msg)

    async def _start(self) -> None:
        if threading.current_thread() is not threading.main_thread():  # also for processes that this thread starts
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        await super()._start()
        self._backoff = Backoff()
        self._due_s: dict[str, float] = {}  # monotonic, by name
        for name, call, every_s in (
            ("libra-nannies", self._renew, NANNY_CHECK_S),
            ("libra-tools", self._look_at_tools, TOOLS_CHECK_S),
        ):
            self.periodic_callbacks[name] = PeriodicCallback(call, every_s * 1000)
            self.periodic_callbacks[name].start()

    async def _look_at_tools(self) -> None:
        if await self._elastic.look():
            await self._correct("tool workers could not be changed")

    async def _renew(self) -> None:
        now_s, removed = time.monotonic(), False
        for name, nanny in list(self.workers.items()):
            if name not in self.worker_spec:  # the cluster is closed
                continue
            if nanny.status not in ENDED:
                if nanny.status is Status.running:
                    self._backoff.worked(name)
                continue
            if name not in self._due_s:
                wait_s = self._backoff.failed(name, RENEW_AFTER_S, forever=True) or 0.0
                self._due_s[name] = now_s + wait_s
                logger.warning("the nanny of worker %s has ended; another is started in %g s", name, wait_s)
            elif now_s >= self._due_s[name]:
                del self._due_s[name], self.workers[name]
                removed = True
        if removed:
            await self._correct("a worker could not be started")

    async def _correct(self, otherwise: str) -> None:
        try:
            await self._correct_state()
        except Exception as error:  # noqa: BLE001  the boundary to Dask: anything may keep a worker from starting
            logger.warning("%s: %s: %s", otherwise, type(error).__name__, error)


def check_port(port: int) -> None:
    """ClusterError if the dashboard's port is taken; port 0 means any free port."""
    try:
        socket.create_server((LOOPBACK, port)).close()
    except OSError as error:
        raise ClusterError(
            f"cluster.dashboard_port: port {port} on {LOOPBACK} is taken ({error.strerror}); "
            "type cluster.dashboard_port=0 for any free port"
        ) from error


def number_of_workers(config: RunConfig) -> dict[str, int]:
    """Number of workers of each role in section ``cluster``."""
    cluster = config.cluster
    engines = sum(group.count for group in cluster.engines) or cluster.rollout_workers
    return {"rollout": engines, "train": cluster.train_workers, "tool": cluster.tool_workers}


def most_workers(config: RunConfig) -> dict[str, int] | None:
    """`number_of_workers` with the most tool workers; None if no tool worker may be added."""
    most = most_tools(config)
    return None if most == config.cluster.tool_workers else number_of_workers(config) | {"tool": most}


def worker_resources(config: RunConfig, number: Mapping[str, int] | None = None) -> dict[str, dict[str, int]]:
    """Resources of each worker by its name, ``ROLE-NUMBER``.

    ``number`` gives the workers of each role, by default `number_of_workers`. The first rollout
    workers are the hybrid workers, and the first tool worker is the committer. A teacher has its
    own worker ``teacher-0``; if it is a service, or ``number`` is given, the first tool worker has
    it.
    """
    teacher = "teacher-0" if number is None else "tool-0"
    number, engines = number or number_of_workers(config), engine_resources(config)
    supplies = {
        "rollout": engines if config.cluster.engines else engines[:1] * number["rollout"],
        "train": [{keys.TRAIN: 1}] * number["train"],
        "tool": [{keys.TOOL: config.cluster.tool_slots, keys.GRADE: 4}] * number["tool"],
    }
    workers = {f"{role}-{i}": dict(supply) for role, every in supplies.items() for i, supply in enumerate(every)}
    for name in [f"rollout-{i}" for i in range(config.cluster.hybrid_workers)]:
        if name in workers:
            workers[name][keys.HYBRID] = 1
    if "tool-0" in workers:
        workers["tool-0"][keys.COMMIT] = 1
    if config.distil.service is not None and "tool-0" in workers:
        workers["tool-0"][keys.TEACHER] = config.services.named[config.distil.service].max_batch
    elif config.distil.teacher is not None:
        workers.setdefault(teacher, {})[keys.TEACHER] = 1
    return workers


def num_threads(resources: Mapping[str, int]) -> int:
    """Threads of a worker: one per quantum and per scored group, plus `SPARE_THREADS`."""
    scored = resources.get(keys.TEACHER, 0) if keys.TOOL in resources else 0
    return max(resources.get(keys.ROLLOUT, 0), resources.get(keys.TOOL, 0)) + scored + SPARE_THREADS


def engine_resources(config: RunConfig) -> list[dict[str, int]]:
    """Resources of each rollout worker, which describe its engine if `cluster.engines` is given."""
    cluster, rollout = config.cluster, config.rollout
    found = []
    for group in cluster.engines:
        resources = {keys.ROLLOUT: group.slots or rollout.slots, keys.TP: group.tp}
        threads = group.threads or cluster.threads
        if group.min_pass_s is not None:
            resources[keys.PASS_US] = round(1e6 * group.min_pass_s)
        found += [resources | ({keys.THREADS: threads} if threads else {})] * group.count
    return found or [{keys.ROLLOUT: rollout.slots}] * cluster.rollout_workers


def thread_bindings(config: RunConfig, cores: list[int]) -> dict[str, str]:
    """Cores of each vLLM engine by worker, a list per rank; empty if there are too few cores for
    all. Without a binding the kernel places the threads."""
    kinds = [
        (resources.get(keys.TP, config.rollout.tp), resources.get(keys.THREADS, config.cluster.threads))
        for resources in engine_resources(config)
    ]
    if config.rollout.engine != "vllm" or sum(tp * (threads or len(cores) + 1) for tp, threads in kinds) > len(cores):
        return {}
    free = iter(cores)
    return {
        f"rollout-{i}": "|".join(",".join(str(next(free)) for _ in range(threads or 1)) for _ in range(tp))
        for i, (tp, threads) in enumerate(kinds)
    }


def device_bindings(config: RunConfig, num_gpus: int) -> dict[str, str]:
    """GPUs of each worker (CUDA_VISIBLE_DEVICES); a worker without an entry sees all.

    With enough GPUs, every engine has as many GPUs as its tensor-parallel degree, and every
    training worker and a teacher's own worker has one GPU. Tool workers whose services have models,
    a teacher's included, share one further GPU, or the last training worker's GPU if only the
    further GPU is missing. With fewer GPUs, workers share GPUs, except training workers of a group:
    ClusterError if there are too few for them.
    """
    workers, on_cores = worker_resources(config, most_workers(config)), config.cluster.device == "cpu"
    wanted = {
        name: resources.get(keys.TP, config.rollout.tp) if keys.ROLLOUT in resources else 1
        for name, resources in workers.items()
        if resources.keys() & {keys.ROLLOUT, keys.TRAIN, keys.TEACHER} and keys.TOOL not in resources
    }
    trainers, others = config.cluster.train_workers, sum(wanted.values())
    if others > num_gpus:
        if not num_gpus or trainers == 1 or on_cores:
            return {}
        if trainers > num_gpus:
            raise ClusterError(
                f"cluster.train_workers: {trainers} replicas need a GPU each to form a group, this machine has {num_gpus}; type "
                f"cluster.train_workers={num_gpus}, or cluster.device=cpu"
            )
        return {f"train-{rank}": str(num_gpus - 1 - rank) for rank in range(trainers)}
    free = iter(range(num_gpus))
    found = {name: ",".join(str(next(free)) for _ in range(number)) for name, number in wanted.items()}
    place = place_of_services(num_gpus, others, on_cores=on_cores)
    if place in (Place.TOOLS, Place.TRAINING):
        gpu = str(others) if place is Place.TOOLS else found[f"train-{trainers - 1}"]
        asked_by = keys.TOOL if service_models(config) else keys.TEACHER  # a teacher may be the only service
        found |= {name: gpu for name, held in workers.items() if keys.TOOL in held and asked_by in held}
    return found


def preloads(process: str) -> list[str]:
    """Modules that a ``worker`` or ``scheduler`` loads at start: Libra's and the user's own."""
    configured = dask.config.get(f"distributed.{process}.preload") or []
    own = [configured] if isinstance(configured, str) else list(configured)
    return [GUARD, *(name for name in own if name != GUARD)]


def local_cluster(config: RunConfig, logs: Path | None = None) -> SpecCluster:
    """Start the scheduler (in this process) and workers (a process each), bound to loopback.

    Only processes with the cluster's key, which exists only in memory, can connect; other users of
    the machine cannot. Workers write errors to ``WORKER.log`` in ``logs``, by default to the
    driver's standard error.
    """
    port = config.cluster.dashboard_port
    try:
        check_port(port)
    except ClusterError as error:
        logger.warning("%s; the page is at another port", str(error).partition("; ")[0])
        port = 0
    logging.getLogger("distributed").setLevel(logging.WARNING)  # it logs a line per connection and worker
    inherited = inherited_environment(config)
    if forked := begin_forking(config):
        take_over()
    # Before the process is spawned: glibc and OpenMP read their variables once, when they are loaded.
    dask.config.set(
        {
            **DASK_SETTINGS,
            "distributed.nanny.pre-spawn-environ": worker_environment(config),
            "distributed.worker.multiprocessing-method": "forkserver" if forked else "spawn",
            page_names.SETTING: list(config.cluster.dashboard_names),
        }
    )
    bindings = thread_bindings(config, usable_cores())
    devices = device_bindings(config, this_machine().num_gpus)
    security = new_security()
    common: dict[str, Any] = {"host": LOOPBACK, "protocol": "tls://", "security": security}
    workers: dict[str, Any] = {}
    for name, resources in worker_resources(config, most_workers(config)).items():
        env = dict(inherited) if forked else {}
        if logs is not None:
            env[LOG_VARIABLE] = str(logs / f"{name}.log")
        if name in bindings:
            env["VLLM_CPU_OMP_THREADS_BIND"] = bindings[name]
        if name in devices:
            env["CUDA_VISIBLE_DEVICES"] = devices[name]
        own = {
            "nthreads": num_threads(resources),
            "resources": resources,
            "memory_limit": 0,
            "preload": [WORKER_START, *preloads("worker")],
            "dashboard": False,
            "env": env,
        }
        workers[name] = {"cls": Nanny, "options": common | own}
    page = {"preload": preloads("scheduler"), "dashboard_address": f"{LOOPBACK}:{port}"}
    scheduler = {"cls": Scheduler, "options": common | page}
    least = config.cluster.tool_workers
    return LocalWorkers(least, workers, scheduler=scheduler, security=security, name="libra", silence_logs=False)

"""A cluster of local processes with a role each: the laptop's stand-in for a Slurm or Kubernetes deployment."""

from __future__ import annotations

import logging
import os
import socket
from typing import Any

import dask
from distributed import Nanny, Scheduler, SpecCluster
from distributed.deploy.cluster import Cluster

from libra import keys
from libra.cluster.hardware_inventory import this_machine
from libra.cluster.settings import DASK_SETTINGS
from libra.config import RunConfig
from libra.errors import ClusterError

SPARE_THREADS = 8
"""Threads beside the slots of a worker, for graders, steps and control tasks."""
LOOPBACK = "127.0.0.1"
WORKER_ENVIRONMENT = {
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "DASK_LOGGING__DISTRIBUTED": "warning",
    # Dask's nanny has glibc give memory back after every large tensor, which costs training two fifths of its CPU time.
    "MALLOC_TRIM_THRESHOLD_": str(2**30),
    "MALLOC_MMAP_THRESHOLD_": str(
        2**25
    ),  # the most glibc accepts; a larger one is ignored, and every tensor is mapped anew
    "MALLOC_ARENA_MAX": "1",  # steps come on any thread of a pool, and each would keep and fault in memory of its own
    # Threads of torch that wait for each other must leave the cores to scheduler and engine soon; never spinning costs an
    # engine's small products a third of their speed.
    "GOMP_SPINCOUNT": "20000",
}
"""Environment of every local worker process, set before torch is loaded."""


class LocalWorkers(SpecCluster):
    """Worker processes that are never given up: whoever dies is started again by its nanny, however long that takes.

    ``distributed.deploy.lost-worker-timeout`` after a worker was lost, Dask closes the nanny of that name for good if no worker
    of it is there just then. It asks for the name only, so a worker that is lost twice, that long apart, never comes back.
    """

    def _update_worker_status(self, op: str, msg: Any) -> None:
        Cluster._update_worker_status(self, op, msg)


def check_port(port: int) -> None:
    """ClusterError where the dashboard's port is taken; 0 asks for any free one and is always right."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError as error:
            raise ClusterError(
                f"cluster.dashboard_port: port {port} on {LOOPBACK} is taken ({error.strerror}); "
                "type cluster.dashboard_port=0 for any free port"
            ) from error


def worker_resources(config: RunConfig) -> dict[str, dict[str, int]]:
    """Resources of each local worker, by name."""
    cluster = config.cluster
    workers = {f"rollout-{i}": resources for i, resources in enumerate(engine_resources(config))}
    for i in range(cluster.hybrid_workers):
        workers[f"rollout-{i}"] = {**workers[f"rollout-{i}"], keys.HYBRID: 1}
    for i in range(cluster.tool_workers):
        workers[f"tool-{i}"] = {keys.TOOL: cluster.tool_slots, keys.GRADE: 4}
    workers["tool-0"][keys.COMMIT] = 1
    workers |= {f"train-{i}": {keys.TRAIN: 1} for i in range(cluster.train_workers)}
    return workers


def engine_resources(config: RunConfig) -> list[dict[str, int]]:
    """Resources of each rollout worker; those of `cluster.engines` say what their engine is like."""
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
    """Cores of each vLLM engine by worker, a list per rank, where there are enough for all; else none, and the kernel decides."""
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
    """GPUs of each worker (CUDA_VISIBLE_DEVICES); a worker that is not there sees them all.

    Where there are enough for all, training workers and engines have GPUs of their own, an engine as many as its tensor-parallel
    degree, the engines first. Else workers share, but for training workers that form a group: each of those has one of its own.

    Raises
    ------
    ClusterError
        There are fewer GPUs than training workers that form a group on GPUs.
    """
    wanted = {
        name: resources.get(keys.TP, config.rollout.tp) if keys.ROLLOUT in resources else 1
        for name, resources in worker_resources(config).items()
        if keys.ROLLOUT in resources or keys.TRAIN in resources
    }
    if sum(wanted.values()) > num_gpus:
        trainers = config.cluster.train_workers
        if not num_gpus or trainers == 1 or config.cluster.device == "cpu":
            return {}
        if trainers > num_gpus:
            raise ClusterError(
                f"cluster.train_workers: {trainers} replicas need a GPU each to form a group, this machine has {num_gpus}; type "
                f"cluster.train_workers={num_gpus}, or cluster.device=cpu"
            )
        return {f"train-{rank}": str(num_gpus - 1 - rank) for rank in range(trainers)}
    free = iter(range(num_gpus))
    return {name: ",".join(str(next(free)) for _ in range(number)) for name, number in wanted.items()}


def local_cluster(config: RunConfig) -> SpecCluster:
    """Start scheduler (in this process) and workers (a process each), bound to loopback."""
    check_port(config.cluster.dashboard_port)
    logging.getLogger("distributed").setLevel(logging.WARNING)  # a line per connection and worker is of no use to a run
    threads = config.cluster.threads or os.cpu_count() or 1
    environment = {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")} | WORKER_ENVIRONMENT
    # Before the process is spawned: glibc and OpenMP read their variables once, when they are loaded.
    dask.config.set(
        {
            **DASK_SETTINGS,
            "distributed.nanny.pre-spawn-environ": environment,
        }
    )
    bindings = thread_bindings(config, sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [])
    devices = device_bindings(config, this_machine().num_gpus)
    spec: dict[str, Any] = {
        name: {
            "cls": Nanny,
            "options": {
                "nthreads": max(resources.get(keys.ROLLOUT, 0), resources.get(keys.TOOL, 0)) + SPARE_THREADS,
                "resources": resources,
                "memory_limit": 0,
                "host": LOOPBACK,
                "dashboard": False,
                "env": ({"VLLM_CPU_OMP_THREADS_BIND": bindings[name]} if name in bindings else {})
                | ({"CUDA_VISIBLE_DEVICES": devices[name]} if name in devices else {}),
            },
        }
        for name, resources in worker_resources(config).items()
    }
    scheduler = {
        "cls": Scheduler,
        "options": {"host": LOOPBACK, "dashboard_address": f"{LOOPBACK}:{config.cluster.dashboard_port}"},
    }
    return LocalWorkers(workers=spec, scheduler=scheduler, name="libra", silence_logs=False)

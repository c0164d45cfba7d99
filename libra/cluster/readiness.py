"""Parts that a connected cluster lacks for a run, found before anything is submitted."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import dask

from libra import keys
from libra.cluster.connection import present_workers
from libra.cluster.settings import check_settings
from libra.config import RunConfig
from libra.errors import ClusterError

if TYPE_CHECKING:
    from distributed import Client, Scheduler

logger = logging.getLogger(__name__)

NEEDED = {
    keys.ROLLOUT: ("an engine's slots", "--nthreads 72 --resources ROLLOUT=64"),
    keys.TOOL: ("actions at once", "--nthreads 72 --resources TOOL=64,GRADE=4,COMMIT=1"),
    keys.TRAIN: ("a training replica", "--nthreads 9 --resources TRAIN=1"),
    keys.HYBRID: ("a rollout worker that can change roles", "--nthreads 72 --resources ROLLOUT=64,HYBRID=1"),
    keys.GRADE: ("graders at once", "--nthreads 72 --resources TOOL=64,GRADE=4,COMMIT=1"),
    keys.COMMIT: ("the one committer", "--nthreads 72 --resources TOOL=64,GRADE=4,COMMIT=1"),
    keys.TEACHER: ("the teacher of distil.teacher", "--nthreads 9 --resources TEACHER=1"),
}
"""Meaning of each resource, and options of ``dask worker`` that supply it."""
RETURN_WAIT_S = 30.0
"""Seconds that a starting run waits for a worker that has just left: a nanny starts it again soon."""
RETURN_LOOK_S = 0.5


def resource_problems(
    workers: Mapping[str, Mapping[str, Any]], address: str, *, train_workers: int = 1, hybrid_workers: int = 0,
    teacher: bool = False,
) -> list[str]:  # fmt: skip
    """Resources that the workers of a cluster lack, each with the line to type.

    ``workers``: `libra.cluster.connection.present_workers`. Training workers beyond
    ``train_workers`` stand by for a loss. ``teacher``: whether the run needs a teacher.
    """
    problems = []
    for resource, (meaning, options) in NEEDED.items():
        supply = [float(w.get("resources", {}).get(resource, 0)) for w in workers.values()]
        total, holders = sum(supply), sum(units > 0 for units in supply)
        start = f"dask worker {address} {options}"
        match resource:
            case keys.TEACHER if not teacher:
                pass
            case keys.HYBRID:
                if holders < hybrid_workers:
                    problems.append(
                        f"{holders} workers supply HYBRID ({meaning}), cluster.hybrid_workers={hybrid_workers} are needed; "
                        f"type for each that is missing: {start}"
                    )
            case _ if total <= 0:
                problems.append(f"no worker supplies {resource} ({meaning}); type: {start}")
            case keys.COMMIT if total != 1:
                problems.append(
                    f"{total:g} units of COMMIT are supplied; exactly one process may write the store: "
                    "give COMMIT=1 to one worker only"
                )
            case keys.TRAIN if train_workers == 1 and total != 1:
                problems.append(
                    f"{total:g} units of TRAIN are supplied; training runs on one replica: give TRAIN=1 to one worker only, "
                    f"or type cluster.train_workers={total:g}"
                )
            case keys.TRAIN if holders < train_workers or max(supply) > 1:
                problems.append(
                    f"{total:g} units of TRAIN on {holders} workers are supplied, cluster.train_workers={train_workers} are "
                    f"needed, one unit each; type for each that is missing: {start}"
                )
    for where, worker in workers.items():
        slots = max(float(worker.get("resources", {}).get(r, 0)) for r in (keys.ROLLOUT, keys.TOOL))
        if slots > worker.get("nthreads", 0):
            problems.append(
                f"worker {worker.get('name', where)}: {slots:g} slots but {worker.get('nthreads')} threads; every slot needs a "
                f"thread: start it with --nthreads {slots + 8:g} or more"
            )
    return problems


def engine_problems(workers: Mapping[str, Mapping[str, Any]], address: str, config: RunConfig) -> list[str]:
    """Differences between the rollout workers and ``cluster.engines``, each with the line to type.

    If ``cluster.engines`` is empty there are none: the run uses the engines that the cluster has.
    """
    cluster, rollout = config.cluster, config.rollout
    listed, found = Counter[tuple[int, int, int]](), Counter[tuple[int, int, int]]()
    for group in cluster.engines:
        listed[group.tp, group.threads or cluster.threads or 0, group.slots or rollout.slots] += group.count
    for has in (worker.get("resources", {}) for worker in workers.values()):
        if has.get(keys.ROLLOUT):
            threads = int(has.get(keys.THREADS, 0)) or cluster.threads or 0
            found[int(has.get(keys.TP, 0)) or rollout.tp, threads, int(has[keys.ROLLOUT])] += 1
    problems = []
    for kind in sorted(listed.keys() | found.keys() if listed else ()):
        tp, threads, slots = kind
        words = f"TP {tp}, {f'{threads} threads' if threads else 'threads as the machine has cores'}, {slots} slots"
        if found[kind] < listed[kind]:
            supply = f"ROLLOUT={slots},TP={tp}" + (f",THREADS={threads}" if threads else "")
            problems.append(
                f"cluster.engines: {listed[kind]} engines of {words} are listed, the cluster has {found[kind]}; type for each "
                f"that is missing: dask worker {address} --nthreads {slots + 8} --resources {supply}, or "
                "cluster.engines=[] for a run on the engines that the cluster has"
            )
        elif found[kind] > listed[kind]:
            problems.append(
                f"cluster.engines: {found[kind]} engines of {words} are running, {listed[kind]} are listed; type "
                "cluster.engines=[] for a run on all of them"
            )
    return problems


def check_cluster(client: Client, config: RunConfig, *, wait_s: float = RETURN_WAIT_S) -> None:
    """ClusterError with everything that is missing or set wrongly on the scheduler and the workers.

    If a worker left less than ``wait_s`` ago, e.g. at the end of an earlier run, this waits that
    long for its return.
    """
    cluster, address = config.cluster, str(client.scheduler_info(n_workers=0)["address"])
    until_s, said = time.monotonic() + wait_s, False
    while True:
        # Before the workers: a worker that is back by then is among them.
        held, returning, in_force = client.run_on_scheduler(_seen_by_scheduler, config.run.name, wait_s)
        workers = present_workers(client)
        for worker in held.keys() & workers.keys():
            workers[worker]["resources"] |= held[worker]
        problems = resource_problems(
            workers, address, train_workers=cluster.train_workers, hybrid_workers=cluster.hybrid_workers,
            teacher=config.distil.teacher is not None,
        )  # fmt: skip
        problems += engine_problems(workers, address, config)
        problems += [p.message for p in check_settings({"distributed": in_force}, "scheduler") if p.setting.breaks]
        if not problems:
            return
        left_s = until_s - time.monotonic()
        if not returning or left_s <= 0:
            raise ClusterError("this cluster cannot run Libra:" + "".join(f"\n  {problem}" for problem in problems))
        if not said:
            said = True
            names = ", ".join(returning)
            logger.warning("the cluster is not complete; waiting for %s to come back, up to %.0f s", names, left_s)
        time.sleep(RETURN_LOOK_S)


def _seen_by_scheduler(
    run: str | None, within_s: float, dask_scheduler: Scheduler
) -> tuple[dict[str, dict[str, int]], list[str], dict[str, Any]]:
    """On the scheduler: resources still to come by address, names of workers that left, Dask's
    settings.

    Resources are still to come from workers in setup, and from workers whose roles an earlier start
    of this run changed. Only workers that left less than ``within_s`` ago are named.
    """
    settings: dict[str, Any] = dask.config.get("distributed")
    plugin: Any = dask_scheduler.plugins.get("libra")
    if plugin is None:
        return {}, [], settings
    held: dict[str, dict[str, int]] = plugin.watch.held()
    for address, supply in plugin.roles.as_started(run).items():
        held[address] = held.get(address, {}) | supply
    return held, plugin.liveness.lost(time.monotonic(), within_s), settings

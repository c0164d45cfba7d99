"""What a connected cluster lacks for a run, told before anything is submitted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from libra import keys
from libra.cluster.settings import check_settings
from libra.config import RunConfig
from libra.errors import ClusterError

if TYPE_CHECKING:
    from distributed import Client, Scheduler

NEEDED = {
    keys.ROLLOUT: ("an engine's slots", "--nthreads 72 --resources ROLLOUT=64"),
    keys.TOOL: ("actions at once", "--nthreads 72 --resources TOOL=64,GRADE=4,COMMIT=1"),
    keys.TRAIN: ("a training replica", "--nthreads 9 --resources TRAIN=1"),
    keys.HYBRID: ("a rollout worker that can change roles", "--nthreads 72 --resources ROLLOUT=64,HYBRID=1"),
    keys.GRADE: ("graders at once", "--nthreads 72 --resources TOOL=64,GRADE=4,COMMIT=1"),
    keys.COMMIT: ("the one committer", "--nthreads 72 --resources TOOL=64,GRADE=4,COMMIT=1"),
}
"""What each resource stands for, and options of ``dask worker`` that supply it."""


def resource_problems(
    workers: Mapping[str, Mapping[str, Any]], address: str, *, train_workers: int = 1, hybrid_workers: int = 0
) -> list[str]:
    """What the workers of a cluster do not supply, each with the line to type.

    ``train_workers`` is ``cluster.train_workers``; workers beyond that many wait to replace one that is lost.
    ``hybrid_workers`` is ``cluster.hybrid_workers``.
    ``workers`` is ``client.scheduler_info(n_workers=-1)["workers"]``: by address, with ``resources`` and ``nthreads``.
    """
    problems = []
    for resource, (meaning, options) in NEEDED.items():
        supply = [float(w.get("resources", {}).get(resource, 0)) for w in workers.values()]
        if resource == keys.HYBRID:
            if (found := sum(units > 0 for units in supply)) < hybrid_workers:
                problems.append(
                    f"{found} workers supply HYBRID ({meaning}), cluster.hybrid_workers={hybrid_workers} are asked for; type for "
                    f"each that is missing: dask worker {address} {options}"
                )
        elif sum(supply) <= 0:
            problems.append(f"no worker supplies {resource} ({meaning}); type: dask worker {address} {options}")
        elif resource == keys.COMMIT and sum(supply) != 1:
            problems.append(
                f"{sum(supply):g} units of COMMIT are supplied; exactly one process may write the store: "
                "give COMMIT=1 to one worker only"
            )
        elif resource == keys.TRAIN and train_workers == 1 and sum(supply) != 1:
            problems.append(
                f"{sum(supply):g} units of TRAIN are supplied; training runs on one replica: give TRAIN=1 to one worker only, "
                f"or type cluster.train_workers={sum(supply):g}"
            )
        elif resource == keys.TRAIN and (len([units for units in supply if units]) < train_workers or max(supply) > 1):
            problems.append(
                f"{sum(supply):g} units of TRAIN on {len([units for units in supply if units])} workers are supplied, "
                f"cluster.train_workers={train_workers} are asked for, one unit each; type for each that is missing: "
                f"dask worker {address} {options}"
            )
    for where, worker in workers.items():
        slots = max(float(worker.get("resources", {}).get(r, 0)) for r in (keys.ROLLOUT, keys.TOOL))
        if slots > worker.get("nthreads", 0):
            problems.append(
                f"worker {worker.get('name', where)}: {slots:g} slots but {worker.get('nthreads')} threads; every slot takes "
                f"a thread's place: start it with --nthreads {slots + 8:g} or more"
            )
    return problems


def engine_problems(workers: Mapping[str, Mapping[str, Any]], address: str, config: RunConfig) -> list[str]:
    """Where the rollout workers of a cluster are not those of ``cluster.engines``, each with the line to type.

    Empty where ``cluster.engines`` is: then whatever engines the workers say they have are used.
    """
    cluster, rollout = config.cluster, config.rollout
    listed: Counter[tuple[int, int, int]] = Counter()
    for group in cluster.engines:
        listed[group.tp, group.threads or cluster.threads or 0, group.slots or rollout.slots] += group.count
    found: Counter[tuple[int, int, int]] = Counter()
    for worker in workers.values():
        has = worker.get("resources", {})
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
                f"cluster.engines: {listed[kind]} engines of {words} are listed, {found[kind]} are there; type for each that is "
                f"missing: dask worker {address} --nthreads {slots + 8} --resources {supply}, or cluster.engines=[] for a run on "
                "the engines that are there"
            )
        elif found[kind] > listed[kind]:
            problems.append(
                f"cluster.engines: {found[kind]} engines of {words} are there, {listed[kind]} are listed; type cluster.engines=[] "
                "for a run on all that are there"
            )
    return problems


def check_cluster(client: Client, config: RunConfig) -> None:
    """ClusterError naming everything that is missing or set wrongly on the scheduler and the workers ``client`` sees."""
    train_workers, hybrid_workers = config.cluster.train_workers, config.cluster.hybrid_workers
    info = client.scheduler_info(n_workers=-1)
    workers, held = info["workers"], client.run_on_scheduler(_held_back)
    for address in held.keys() & workers.keys():  # set up for another run, or for an earlier start of this one
        workers[address]["resources"] = {**workers[address]["resources"], **held[address]}
    problems = resource_problems(workers, info["address"], train_workers=train_workers, hybrid_workers=hybrid_workers)
    problems += engine_problems(workers, info["address"], config)
    in_force = client.run_on_scheduler(_distributed_settings)
    problems += [p.message for p in check_settings({"distributed": in_force}, "scheduler") if p.setting.breaks]
    if problems:
        raise ClusterError("this cluster cannot run Libra:" + "".join(f"\n  {problem}" for problem in problems))


def _held_back(dask_scheduler: Scheduler) -> dict[str, dict[str, int]]:
    """What workers that are being set up will supply; runs on the scheduler."""
    plugin: Any = dask_scheduler.plugins.get("libra")
    held: dict[str, dict[str, int]] = plugin.not_ready.held() if plugin is not None else {}
    return held


def _distributed_settings() -> dict[str, Any]:
    import dask

    settings: dict[str, Any] = dask.config.get("distributed")
    return settings

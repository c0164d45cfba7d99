"""The Slurm jobs of a configuration: name, role, resources and script of each worker.

dask-jobqueue writes the scripts and submits them. Its clusters know one kind of job; here each worker has its own options.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from libra import keys
from libra.cluster.local import SPARE_THREADS, WORKER_ENVIRONMENT, engine_resources
from libra.config import RunConfig
from libra.config.slurm import SlurmJobs
from libra.errors import ClusterError

if TYPE_CHECKING:
    from distributed.security import Security

SETTINGS_FILE, CONTACT_FILE, LOGS, CERTIFICATES = "dask.yaml", "cluster.json", "logs", "tls"
"""What ``slurm.dir`` holds."""
DEATH_TIMEOUT_S = 120
"""A worker that has lost its scheduler for so long ends its job."""


_ENDS = '$(date -d "$(squeue -h -j "$SLURM_JOB_ID" -o %e)" +%s 2>/dev/null || true)'
END_OF_JOB = "export LIBRA_JOB_END_S=${SLURM_JOB_END_TIME:-" + _ENDS + "}"
"""Line of a job's script; Slurm before 23.02 does not tell a job when it ends."""


def role_jobs(config: RunConfig) -> dict[str, SlurmJobs]:
    """The jobs of each role."""
    return {"rollout": config.slurm_rollout, "train": config.slurm_train, "tool": config.slurm_tool}


def role_of(worker: str) -> str:
    """Role of a worker, from its name ``ROLE-NUMBER``."""
    return worker.rpartition("-")[0]


def number_of_jobs(config: RunConfig) -> dict[str, int]:
    """Jobs of each role: as many as its section says, else as section ``cluster`` lists workers."""
    cluster = config.cluster
    listed = {
        "rollout": sum(group.count for group in cluster.engines) or cluster.rollout_workers,
        "train": cluster.train_workers,
        "tool": cluster.tool_workers,
    }
    return {role: listed[role] if jobs.jobs is None else jobs.jobs for role, jobs in role_jobs(config).items()}


def worker_resources(config: RunConfig) -> dict[str, dict[str, int]]:
    """Resources of each worker, by name; the first tool worker is the committer, the first rollout workers may be hybrid."""
    number = number_of_jobs(config)
    engines = engine_resources(config)
    rollout = engines if config.cluster.engines else engines[:1] * number["rollout"]
    workers = {f"rollout-{i}": dict(supply) for i, supply in enumerate(rollout)}
    workers |= {f"train-{i}": {keys.TRAIN: 1} for i in range(number["train"])}
    tool = {keys.TOOL: config.cluster.tool_slots, keys.GRADE: 4}
    workers |= {f"tool-{i}": dict(tool) for i in range(number["tool"])}
    for i in range(config.cluster.hybrid_workers):
        if f"rollout-{i}" in workers:
            workers[f"rollout-{i}"][keys.HYBRID] = 1
    if "tool-0" in workers:
        workers["tool-0"][keys.COMMIT] = 1
    return workers


def check_roles(config: RunConfig) -> None:
    """ClusterError where a role has no job at all, or its jobs are not the workers that section ``cluster`` lists."""
    number, cluster = number_of_jobs(config), config.cluster
    for role in number:
        if number[role] == 0:
            raise ClusterError(
                f"slurm_{role}.jobs: 0 jobs; a run needs one {role} worker at least; type slurm_{role}.jobs=1"
            )
    engines = sum(group.count for group in cluster.engines)
    if engines and number["rollout"] != engines:
        raise ClusterError(
            f"slurm_rollout.jobs: {number['rollout']} jobs, and cluster.engines lists {engines} engines, a job each; type "
            "slurm_rollout.jobs=null, which is as many, or cluster.engines=[]"
        )
    if number["train"] < cluster.train_workers:
        raise ClusterError(
            f"slurm_train.jobs: {number['train']} jobs, and cluster.train_workers={cluster.train_workers} are asked for; type "
            "slurm_train.jobs=null, which is as many"
        )
    if config.planner.layout == "auto":
        raise ClusterError(
            "planner.layout: auto is planned where a run is started, and jobs are submitted before; type libra plan CONFIG --write "
            "FILE, then libra cluster slurm FILE up"
        )


def worker_specs(config: RunConfig, directory: Path, security: Security | None) -> dict[str, dict[str, Any]]:
    """What `distributed.SpecCluster` submits: a ``SLURMJob`` and its options for each worker, by name.

    ``directory`` is the absolute ``slurm.dir``; ``security`` must name files that the jobs can read.
    """
    from dask_jobqueue.slurm import SLURMJob

    check_roles(config)
    jobs = role_jobs(config)
    return {
        name: {"cls": SLURMJob, "options": _options(config, jobs[role_of(name)], name, resources, directory, security)}
        for name, resources in worker_resources(config).items()
    }


def _options(
    config: RunConfig,
    jobs: SlurmJobs,
    name: str,
    resources: Mapping[str, int],
    directory: Path,
    security: Security | None,
) -> dict[str, Any]:
    slots = max(resources.get(keys.ROLLOUT, 0), resources.get(keys.TOOL, 0))
    ranks = resources.get(keys.TP, 1)  # only an entry of cluster.engines says so
    of_engine = keys.TP in resources
    num_gpus = (ranks if jobs.gpus else 0) if of_engine else jobs.gpus
    threads = str(resources.get(keys.THREADS) or config.cluster.threads or jobs.cpus)
    supply = dict(resources) | ({"GPU": num_gpus} if num_gpus else {})
    environment = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads} | WORKER_ENVIRONMENT
    environment["DASK_CONFIG"] = str(directory / SETTINGS_FILE)
    gpus = [f"--gres=gpu:{num_gpus}"] if num_gpus else []
    return {
        "name": name,
        "cores": slots + SPARE_THREADS,
        "memory": times(jobs.memory, ranks),
        "processes": 1,
        "job_cpu": jobs.cpus * ranks,
        "queue": jobs.partition,
        "account": config.slurm.account,
        "walltime": jobs.walltime,
        "job_name": f"libra-{name}",
        "job_extra_directives": [*gpus, *jobs.directives],
        "job_script_prologue": [
            *(f"export {key}={shlex.quote(value)}" for key, value in environment.items()),
            f"export LIBRA_DRAIN_S={config.slurm.drain_s:g}",
            END_OF_JOB,
            *config.slurm.setup,
        ],
        "python": config.slurm.python or sys.executable,
        "nanny": True,
        "death_timeout": DEATH_TIMEOUT_S,
        "local_directory": None,
        "log_directory": str(directory / LOGS),
        "protocol": "tls://" if security is not None else None,
        "security": security,
        "worker_extra_args": [
            "--memory-limit",
            "0",
            "--resources",
            ",".join(f"{resource}={count}" for resource, count in supply.items()),
            "--preload",
            "libra.cluster.time_limit",
            "--no-dashboard",
        ],
        "config_name": "slurm",
    }


def times(memory: str, ranks: int) -> str:
    """An amount of memory for so many ranks, in its unit: ``times("1.5 GiB", 2)`` is "3 GiB"."""
    number, unit = re.fullmatch(r"([\d.]+) ?([A-Za-z]+)", memory).groups()  # type: ignore[union-attr]
    return memory if ranks == 1 else f"{float(number) * ranks:.15g} {unit}"


def scripts(config: RunConfig, directory: Path) -> dict[str, str]:
    """The script of each worker, by name, as it would be submitted; the scheduler's address is not known yet."""
    made = {}
    address = f"tls://{config.slurm.host or 'HOST'}:{config.slurm.port or 'PORT'}"
    for name, spec in worker_specs(config, directory, certificate_files(directory)).items():
        job = spec["cls"](address, **spec["options"])
        made[name] = job.job_script()
    return made


def certificate_files(directory: Path) -> Security:
    """What clients, workers and scheduler present to each other; the files are in ``directory``/tls."""
    from distributed.security import Security

    tls = directory / CERTIFICATES
    files = {f"tls_{who}_cert": str(tls / "cert.pem") for who in ("scheduler", "worker", "client")}
    files |= {f"tls_{who}_key": str(tls / "key.pem") for who in ("scheduler", "worker", "client")}
    return Security(tls_ca_file=str(tls / "ca.pem"), require_encryption=True, **files)

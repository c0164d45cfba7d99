"""The Slurm jobs of a configuration: name, role, resources and script of each worker.

dask-jobqueue writes the scripts and submits them. Its clusters know one kind of job; here each worker has its own options.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from libra import keys
from libra.cluster.local import SPARE_THREADS, WORKER_ENVIRONMENT
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


def worker_resources(config: RunConfig) -> dict[str, dict[str, int]]:
    """Resources of each worker, by name; the first tool worker is the committer, the first rollout workers may be hybrid."""
    supply = {
        "rollout": {keys.ROLLOUT: config.rollout.slots},
        "train": {keys.TRAIN: 1},
        "tool": {keys.TOOL: config.cluster.tool_slots, keys.GRADE: 4},
    }
    workers = {f"{role}-{i}": dict(supply[role]) for role, jobs in role_jobs(config).items() for i in range(jobs.jobs)}
    for i in range(config.cluster.hybrid_workers):
        if f"rollout-{i}" in workers:
            workers[f"rollout-{i}"][keys.HYBRID] = 1
    if "tool-0" in workers:
        workers["tool-0"][keys.COMMIT] = 1
    return workers


def check_roles(config: RunConfig) -> None:
    """ClusterError where a role has no job at all: no run could go on."""
    for role, jobs in role_jobs(config).items():
        if jobs.jobs == 0:
            raise ClusterError(
                f"slurm_{role}.jobs: 0 jobs; a run needs one {role} worker at least; type slurm_{role}.jobs=1"
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
    threads = str(config.cluster.threads or jobs.cpus)
    supply = dict(resources) | ({"GPU": jobs.gpus} if jobs.gpus else {})
    environment = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads} | WORKER_ENVIRONMENT
    environment["DASK_CONFIG"] = str(directory / SETTINGS_FILE)
    gpus = [f"--gres=gpu:{jobs.gpus}"] if jobs.gpus else []
    return {
        "name": name,
        "cores": slots + SPARE_THREADS,
        "memory": jobs.memory,
        "processes": 1,
        "job_cpu": jobs.cpus,
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

"""The Slurm jobs of a configuration: name, role, resources and script of each worker.

dask-jobqueue writes the scripts and submits them. Its own clusters have one kind of job; here each
worker has its own options.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from libra import keys
from libra.cluster.connection import security_in
from libra.cluster.local import num_threads, number_of_workers, worker_resources
from libra.cluster.settings import GUARD
from libra.cluster.worker_process import WORKER_ENVIRONMENT
from libra.config import RunConfig
from libra.config.sections import Role
from libra.errors import ClusterError

if TYPE_CHECKING:
    from distributed.security import Security

SETTINGS_FILE, CONTACT_FILE, LOGS, CERTIFICATES = "dask.yaml", "cluster.json", "logs", "tls"
"""What ``slurm.dir`` holds."""
JOBS_FILE = "jobs.json"
"""Job id of each worker, for ``status``."""
REFUSED = "refused: "
"""How the log's line begins that ``up`` passes on."""
DEATH_TIMEOUT_S = 120
"""Seconds without a scheduler after which a worker ends its job."""
_SHORT = {"--ntasks": "-n ", "--time": "-t "}
"""Options that dask-jobqueue writes in their short form."""

_ENDS = '$(date -d "$(squeue -h -j "$SLURM_JOB_ID" -o %e)" +%s 2>/dev/null || true)'
END_OF_JOB = "export LIBRA_JOB_END_S=${SLURM_JOB_END_TIME:-" + _ENDS + "}"
"""Line of a job's script; Slurm before 23.02 has no SLURM_JOB_END_TIME."""


def role_of(worker: str) -> Role:
    """Role of a worker, from its name ``ROLE-NUMBER``."""
    return cast("Role", worker.rpartition("-")[0])


def check_layout(config: RunConfig) -> None:
    """ClusterError if the workers are not known before a run starts."""
    if config.planner.layout == "auto":
        raise ClusterError(
            "planner.layout: auto plans at the start of a run, and jobs are submitted before that; type libra plan CONFIG --write "
            "FILE, then libra cluster slurm FILE up"
        )


def worker_specs(
    config: RunConfig, directory: Path, security: Security | None, number: Mapping[str, int] | None = None
) -> dict[str, dict[str, Any]]:
    """An `OwnJob` and its options for each worker by name, for `distributed.SpecCluster`;
    ``number`` of each role, by default from section ``cluster``.

    ``directory`` is the absolute ``slurm.dir``; ``security`` must name files that the jobs can
    read.
    """
    from libra.cluster.slurm.own_job import OwnJob

    check_layout(config)
    return {
        name: {"cls": OwnJob, "options": _options(config, name, resources, directory, security)}
        for name, resources in worker_resources(config, number or number_of_workers(config)).items()
    }


def _options(
    config: RunConfig, name: str, resources: Mapping[str, int], directory: Path, security: Security | None
) -> dict[str, Any]:
    jobs = config.slurm.of_role(role_of(name))
    ranks = resources.get(keys.TP, 1)  # set by an entry of cluster.engines only
    of_engine = keys.TP in resources
    num_gpus = (ranks if jobs.gpus else 0) if of_engine else jobs.gpus
    threads = str(resources.get(keys.THREADS) or config.cluster.threads or jobs.cpus)
    supply = dict(resources) | ({"GPU": num_gpus} if num_gpus else {})
    environment = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads} | WORKER_ENVIRONMENT
    environment["DASK_CONFIG"] = str(directory / SETTINGS_FILE)
    gpus = [f"--gres=gpu:{num_gpus}"] if num_gpus and "--gres" not in jobs.skip else []
    return {
        "name": name,
        "cores": num_threads(resources),
        "memory": times(jobs.memory, ranks),
        "processes": 1,
        "job_cpu": jobs.cpus * ranks,
        "queue": jobs.partition,
        "walltime": jobs.walltime,
        "job_name": f"libra-{name}",
        "job_extra_directives": [*gpus, *jobs.directives],
        "job_directives_skip": [f"#SBATCH {_SHORT.get(option, option)}" for option in jobs.skip],
        "job_script_prologue": [
            *(f"export {key}={shlex.quote(value)}" for key, value in environment.items()),
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
            *("--memory-limit", "0", "--resources", ",".join(f"{name}={count}" for name, count in supply.items())),
            *(
                "--preload",
                "libra.cluster.worker_process",
                "--preload",
                GUARD,
                "--preload-nanny",
                GUARD,
                "--no-dashboard",
            ),
        ],
        "config_name": "slurm",
    }


def times(memory: str, ranks: int) -> str:
    """``memory`` times ``ranks`` in its unit: ``times("1.5 GiB", 2)`` is "3 GiB"."""
    number, unit = re.fullmatch(r"([\d.]+) ?([A-Za-z]+)", memory).groups()  # type: ignore[union-attr]
    return memory if ranks == 1 else f"{float(number) * ranks:.15g} {unit}"


def scripts(config: RunConfig, directory: Path) -> dict[str, str]:
    """The script of each worker, by name, as it would be submitted, but for the scheduler's
    address."""
    address = f"tls://{config.slurm.host or 'HOST'}:PORT"
    specs = worker_specs(config, directory, security_in(directory / CERTIFICATES))
    return {name: spec["cls"](address, **spec["options"]).job_script() for name, spec in specs.items()}

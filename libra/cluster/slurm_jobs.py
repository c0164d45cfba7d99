"""The Slurm jobs of a configuration, one Dask worker each: scripts, submission, queue states.

dask-jobqueue writes and submits the scripts. Its own clusters have one kind of job, but here each
worker has its own options.
"""

from __future__ import annotations

import asyncio
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from libra import keys
from libra.cluster.connection import security_in
from libra.cluster.local import num_threads, number_of_workers, worker_resources
from libra.cluster.settings import GUARD
from libra.cluster.worker_process import WORKER_ENVIRONMENT
from libra.config import RunConfig
from libra.config.sections import Role
from libra.errors import ClusterError, pip_install

try:
    from dask_jobqueue.slurm import SLURMJob
except ImportError as missing:  # the extra `slurm`
    raise ClusterError(f"{missing.name} is not installed; type {pip_install('slurm')}") from missing

if TYPE_CHECKING:
    from distributed.security import Security

SETTINGS_FILE, CONTACT_FILE, JOBS_FILE = "dask.yaml", "cluster.json", "jobs.json"
LOGS, CERTIFICATES = "logs", "tls"
"""Files and directories in ``slurm.dir``. `JOBS_FILE` has the job id of each worker."""
DEATH_TIMEOUT_S = 120
"""Seconds without a scheduler after which a worker ends its job."""
ALIVE = {"PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "REQUEUED", "RESIZING", "STOPPED"}
"""States of a job that has not ended."""
_SHORT = {"--ntasks": "-n ", "--time": "-t "}
"""Options that dask-jobqueue writes in their short form."""
_NUMBER = re.compile(r"^\s*(?:Submitted batch job )?(\d+)(?:;\S+| on cluster \S+)?\s*$", re.MULTILINE)
"""A line of sbatch's answer with a job's number: with ``--parsable``, or from a wrapper without it."""
_ENDS = '$(date -d "$(squeue -h -j "$SLURM_JOB_ID" -o %e)" +%s 2>/dev/null || true)'
END_OF_JOB = "export LIBRA_JOB_END_S=${SLURM_JOB_END_TIME:-" + _ENDS + "}"
"""Line of a job's script; Slurm before 23.02 has no SLURM_JOB_END_TIME."""


class OwnJob(SLURMJob):  # type: ignore[misc]
    """A job that is cancelled only under its own name; a failed submission shows sbatch's words."""

    submit_command = "sbatch --parsable"

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.cancel_command = f"scancel --name={self.job_name}"  # the number may be another job's by then

    async def _submit_job(self, script_filename: str) -> str:
        process = await asyncio.create_subprocess_exec(
            *self.submit_command.split(), script_filename, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        out, err = (text.decode(errors="replace") for text in await process.communicate())
        words = " ".join((err.strip() or out).split())[-300:] or "no message"
        if process.returncode != 0:
            role = role_of(str(self.name))
            raise ClusterError(
                f"sbatch refused the job of worker {self.name}: {words}; libra cluster slurm CONFIG --print shows its script. To "
                f"leave an option of it out, type e.g. slurm.jobs.{role}.skip=[--mem]"
            )
        numbers: list[str] = _NUMBER.findall(out)
        if not numbers:
            raise ClusterError(
                f"sbatch's answer for worker {self.name} has no line with the number of job {self.job_name}: {words!r}; "
                "squeue --me shows whether it was submitted"
            )
        return numbers[-1]


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
    config: RunConfig, directory: Path, security: Security, number: Mapping[str, int] | None = None
) -> dict[str, dict[str, Any]]:
    """An `OwnJob` and its options for each worker by name, for `distributed.SpecCluster`.

    ``directory`` is the absolute ``slurm.dir``; ``security`` names files that the jobs can read;
    ``number`` gives the workers of each role, by default from section ``cluster``.
    """
    check_layout(config)
    return {
        name: {"cls": OwnJob, "options": _options(config, name, resources, directory, security)}
        for name, resources in worker_resources(config, number or number_of_workers(config)).items()
    }


def _options(
    config: RunConfig, name: str, resources: Mapping[str, int], directory: Path, security: Security
) -> dict[str, Any]:
    jobs = config.slurm.of_role(role_of(name))
    ranks = resources.get(keys.TP, 1)  # an entry of cluster.engines sets it
    num_gpus = ranks if jobs.gpus and keys.TP in resources else jobs.gpus
    threads = str(resources.get(keys.THREADS) or config.cluster.threads or jobs.cpus)
    supply = dict(resources) | ({"GPU": num_gpus} if num_gpus else {})
    environment = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads} | WORKER_ENVIRONMENT
    environment["DASK_CONFIG"] = str(directory / SETTINGS_FILE)
    gpus = [f"--gres=gpu:{num_gpus}"] if num_gpus and "--gres" not in jobs.skip else []
    exports = [f"export {key}={shlex.quote(value)}" for key, value in environment.items()]
    worker_options = (
        f"--memory-limit 0 --resources {','.join(f'{name}={count}' for name, count in supply.items())} "
        f"--preload libra.cluster.worker_process --preload {GUARD} --preload-nanny {GUARD} --no-dashboard"
    )
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
        "job_script_prologue": [*exports, END_OF_JOB, *config.slurm.setup],
        "python": config.slurm.python or sys.executable,
        "nanny": True,
        "death_timeout": DEATH_TIMEOUT_S,
        "local_directory": None,
        "log_directory": str(directory / LOGS),
        "protocol": "tls://",
        "security": security,
        "worker_extra_args": worker_options.split(" "),
        "config_name": "slurm",
    }


def times(memory: str, ranks: int) -> str:
    """``memory`` times ``ranks`` in its unit: ``times("1.5 GiB", 2)`` is "3 GiB"."""
    number, unit = re.fullmatch(r"([\d.]+) ?([A-Za-z]+)", memory).groups()  # type: ignore[union-attr]
    return f"{float(number) * ranks:.15g} {unit}"


def scripts(config: RunConfig, directory: Path) -> dict[str, str]:
    """The script of each worker by name, as submitted, but without the scheduler's address."""
    address = f"tls://{config.slurm.host or 'HOST'}:PORT"
    specs = worker_specs(config, directory, security_in(directory / CERTIFICATES))
    return {name: spec["cls"](address, **spec["options"]).job_script() for name, spec in specs.items()}


def job_states(job_ids: Iterable[str]) -> dict[str, tuple[str, str]]:
    """State and reason (or node) of each job in this user's queue; ClusterError if squeue fails."""
    ids = set(job_ids)
    command = ["squeue", "--noheader", "--me", "--states=all", "--format=%i|%T|%R"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout if ids else ""
    except (OSError, subprocess.SubprocessError) as error:
        words = str(getattr(error, "stderr", None) or error).strip()
        raise ClusterError(f"squeue failed: {words}; type sinfo to see whether Slurm's controller answers") from error
    rows = (line.split("|", 2) for line in answer.splitlines() if line.count("|") >= 2)
    return {job: (state, reason) for job, state, reason in rows if job in ids}


def lost(states: Mapping[str, tuple[str, str]], job_ids: Iterable[str]) -> list[str]:
    """Jobs that have ended, or are no longer in the queue."""
    return [job for job in job_ids if states.get(job, ("GONE", ""))[0] not in ALIVE]

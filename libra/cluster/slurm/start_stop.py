"""``up``, ``status`` and ``down`` of a cluster of Slurm jobs: start, query and stop the process
that keeps it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from libra.cluster.connection import Contact, connect, present_workers
from libra.cluster.slurm.jobs import CONTACT_FILE, JOBS_FILE, LOGS, REFUSED, check_layout, role_of
from libra.cluster.slurm.queue import job_states
from libra.config import RunConfig
from libra.errors import ClusterError, pip_install

START_S, STOP_S = 90.0, 60.0
SERVICE_LOG = "scheduler.log"


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """One configured worker.

    Attributes
    ----------
    job_id : str
        "" if none is submitted.
    state, reason : str
        Slurm's, e.g. PENDING and (Resources), or RUNNING and the node.
    connected : bool
        Whether the scheduler has the worker.
    """

    name: str
    role: str
    job_id: str
    state: str
    reason: str
    connected: bool


def up(config: RunConfig) -> Contact:
    """Start the cluster that ``config`` describes; returns as soon as its jobs are submitted.

    ClusterError where Slurm or dask-jobqueue is missing, a cluster is already up in ``slurm.dir``,
    or it does not start.
    """
    check_layout(config)
    check_installed()
    directory = config.slurm.dir.absolute()
    path = directory / CONTACT_FILE
    if path.exists():
        contact = Contact.read(path)
        if answers(path):
            raise ClusterError(
                f"slurm.dir: a cluster is already up at {contact.address}; type libra run CONFIG --scheduler {path}, or "
                "stop it: libra cluster slurm CONFIG down"
            )
        path.unlink()
    (directory / LOGS).mkdir(parents=True, exist_ok=True)
    directory.chmod(0o700)
    (directory / JOBS_FILE).unlink(missing_ok=True)  # of a process that was killed
    settings = directory / "config.json"
    settings.write_text(json.dumps(config.model_dump(mode="json")))
    log = directory / LOGS / SERVICE_LOG
    command = [sys.executable, "-m", "libra.cluster.slurm.service_process", str(settings), str(directory)]
    with log.open("ab") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, stdin=subprocess.DEVNULL, start_new_session=True)
    until_s = time.monotonic() + START_S
    while not (directory / JOBS_FILE).exists() or not path.exists():
        if process.poll() is not None or time.monotonic() > until_s:
            process.kill()
            lines = log.read_text(errors="replace").splitlines()
            for line in reversed(lines[-8:]):
                if line.startswith(REFUSED):
                    raise ClusterError(line.removeprefix(REFUSED))
            tail = "\n  ".join(lines[-8:])
            raise ClusterError(f"the cluster did not start; the end of {log}:\n  {tail}")
        time.sleep(0.1)
    return Contact.read(path)


def submitted(config: RunConfig) -> dict[str, str]:
    """Job id of each worker."""
    jobs: dict[str, str] = json.loads((config.slurm.dir / JOBS_FILE).read_text())
    return jobs


def status(config: RunConfig) -> tuple[Contact, list[WorkerStatus]]:
    """Contact of the cluster, and the state of each worker; ClusterError if none is up or it does
    not answer."""
    directory = config.slurm.dir.absolute()
    contact = Contact.read(directory / CONTACT_FILE)
    jobs = submitted(config)
    states = job_states(jobs.values())
    try:
        with connect(str(directory / CONTACT_FILE), set_as_default=False) as client:
            there = {str(worker["name"]) for worker in present_workers(client).values()}
    except (OSError, TimeoutError) as error:
        raise ClusterError(
            f"{contact.address}: the scheduler of process {contact.pid} on {contact.host} does not answer ({error}); "
            "type libra cluster slurm CONFIG down, then up"
        ) from error
    return contact, [
        WorkerStatus(name, role_of(name), job, *states.get(job, ("GONE", "")), name in there)
        for name, job in sorted(jobs.items())
    ]


def down(config: RunConfig) -> Contact:
    """Cancel all jobs and stop the scheduler; returns its contact. ClusterError if none was up."""
    path = config.slurm.dir.absolute() / CONTACT_FILE
    contact = Contact.read(path)
    if contact.host == socket.gethostname() and is_ours(contact.pid):
        os.kill(contact.pid, signal.SIGTERM)
    elif answers(path):
        with connect(str(path), set_as_default=False) as client:
            client.shutdown()
    else:
        path.unlink(missing_ok=True)
        raise ClusterError(
            f"{contact.address} does not answer and process {contact.pid} on {contact.host} has ended; {path} is removed. "
            "Its jobs end by themselves within two minutes; squeue --me shows them, scancel -n libra-NAME cancels one"
        )
    until_s = time.monotonic() + STOP_S
    while path.exists():
        if time.monotonic() > until_s:
            raise ClusterError(
                f"the cluster did not stop within {STOP_S:.0f} s; see {path.parent / LOGS / SERVICE_LOG}"
            )
        time.sleep(0.1)
    return contact


def check_installed() -> None:
    """ClusterError naming what is missing here and what to type."""
    for command in ("sbatch", "squeue", "scancel"):
        if shutil.which(command) is None:
            raise ClusterError(
                f"{command}: there is no Slurm on this machine; type this on a login node of the cluster"
            )
    try:
        import dask_jobqueue  # noqa: F401
    except ImportError as error:
        raise ClusterError(f"{error.name} is not installed; type {pip_install('slurm')}") from error


def answers(path: Path) -> bool:
    """Whether the scheduler of a ``cluster.json`` can be reached."""
    try:
        with connect(str(path), set_as_default=False):
            return True
    except (OSError, TimeoutError):
        return False


def is_ours(pid: int) -> bool:
    """Whether a process of this machine keeps a cluster of Libra."""
    try:
        return b"libra.cluster.slurm.service_process" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False

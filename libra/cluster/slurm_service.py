"""A cluster of Slurm jobs: the process that maintains it, and ``up``, ``status`` and ``down``.

``python -m libra.cluster.slurm_service CONFIG DIRECTORY`` runs Dask's scheduler, and submits lost
jobs again, until it gets SIGTERM or a client shuts the scheduler down.

Invariants
----------
1. At most one job of a worker's name is in the queue: a new job is submitted after the old one was
   cancelled or had ended.
2. ``cluster.json`` exists exactly while the scheduler answers.
3. When the process ends normally, it has no job left in the queue. After it was killed, its jobs
   end ``DEATH_TIMEOUT_S`` after they lost the scheduler.
4. All traffic is encrypted, and only processes with the key of ``slurm.dir`` can connect.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import dask
from distributed import Scheduler, SpecCluster
from distributed.core import Status
from distributed.utils import get_ip

from libra.cluster import page_names
from libra.cluster.connection import (
    CERTIFICATE_FILE,
    KEY_FILE,
    Contact,
    connect,
    make_files,
    present_workers,
    security_in,
    write_private,
)
from libra.cluster.local import ElasticTools, most_tools, number_of_workers
from libra.cluster.settings import DASK_SETTINGS, GUARD, settings_yaml
from libra.cluster.slurm_jobs import (
    CERTIFICATES,
    CONTACT_FILE,
    JOBS_FILE,
    LOGS,
    SETTINGS_FILE,
    check_layout,
    job_states,
    lost,
    role_of,
    worker_specs,
)
from libra.config import RunConfig, config_from_dict
from libra.errors import ClusterError

logger = logging.getLogger(__name__)

RECONCILE_S = 15.0
"""Seconds between two queries of Slurm's queue for lost jobs."""
START_S, STOP_S = 90.0, 60.0
SERVICE_LOG = "scheduler.log"
REFUSED = "refused: "
"""Start of the log's line that `up` raises."""


# ---------------------------------------------------------------- in the process


class SlurmPools:
    """Scheduler and jobs of one configuration."""

    def __init__(self, config: RunConfig, directory: Path) -> None:
        self.config, self.directory = config, directory
        self.security = security_in(directory / CERTIFICATES)

    async def start(self) -> None:
        """Start the scheduler and submit a job for every worker."""
        options = {
            "host": self.config.slurm.host or get_ip(),
            "protocol": "tls://",
            "security": self.security,
            "preload": [GUARD],
            "dashboard_address": f"127.0.0.1:{self.config.cluster.dashboard_port}",
        }
        scheduler = {"cls": Scheduler, "options": options}
        self.cluster = SpecCluster(
            workers={}, scheduler=scheduler, security=self.security, asynchronous=True, name="libra", silence_logs=False
        )
        await self.cluster
        assert self.cluster.scheduler is not None
        most = number_of_workers(self.config) | {"tool": most_tools(self.config)}
        specs = worker_specs(self.config, self.directory, self.security, most)
        least = self.config.cluster.tool_workers
        self.elastic = ElasticTools(self.cluster, specs, least)
        self.cluster.worker_spec.update(specs)
        dashboard = self.cluster.scheduler.services.get("dashboard")
        contact = Contact(
            address=self.cluster.scheduler.address,
            dashboard=f"http://127.0.0.1:{dashboard.port}/libra" if dashboard else "",
            cert_file=str(self.directory / CERTIFICATES / CERTIFICATE_FILE),
            key_file=str(self.directory / CERTIFICATES / KEY_FILE),
            host=socket.gethostname(),
            pid=os.getpid(),
            started_s=time.time(),
        )
        contact.write(self.directory / CONTACT_FILE)
        refused = await self.reconcile()
        if refused is not None and {role_of(name) for name in specs} - set(map(role_of, self.cluster.workers)):
            await self.close()
            raise refused
        self._write_jobs()  # last: `up` waits for it

    async def reconcile(self) -> ClusterError | None:
        """Submit a job for every worker without a job; returns sbatch's refusal, to be retried."""
        held: dict[str, Any] = self.cluster.workers
        by_job = {job.job_id: name for name, job in held.items()}
        for job_id in lost(await asyncio.to_thread(job_states, by_job), by_job):
            name = by_job[job_id]
            logger.warning("job %s of worker %s has ended: submitting another one", job_id, name)
            await held.pop(name).close()
        refused = None
        try:
            await self.cluster._correct_state()  # type: ignore[misc]
        except ClusterError as error:
            logger.error("submitting failed, will retry: %s", error)
            refused = error
        for name in [name for name, job in held.items() if job.job_id is None]:
            del held[name]
        return refused

    def _write_jobs(self) -> None:
        jobs = {str(name): job.job_id for name, job in self.cluster.workers.items()}
        write_private(self.directory / JOBS_FILE, json.dumps(jobs) + "\n")

    async def run(self, stop: asyncio.Event) -> None:
        """Keep the jobs running until ``stop`` is set or the scheduler is shut down."""
        assert self.cluster.scheduler is not None
        ends = [asyncio.ensure_future(each) for each in (self.cluster.scheduler.finished(), stop.wait())]
        while not (await asyncio.wait(ends, timeout=RECONCILE_S, return_when=asyncio.FIRST_COMPLETED))[0]:
            try:
                await self.elastic.look()
                await self.reconcile()
                self._write_jobs()
            except ClusterError as error:  # Slurm's controller does not answer: its jobs continue
                logger.error("reading the queue failed, will retry: %s", error)
        for each in ends:
            each.cancel()

    async def close(self) -> None:
        """Cancel every job and stop the scheduler."""
        await asyncio.gather(*(job.close() for job in self.cluster.workers.values()))
        for job in self.cluster._created:  # dask-jobqueue leaves them "running", which SpecCluster refuses
            job.status = Status.closed
        self.cluster.workers.clear()
        self.cluster.worker_spec.clear()
        for name in (CONTACT_FILE, JOBS_FILE):
            (self.directory / name).unlink(missing_ok=True)
        await self.cluster.close()  # type: ignore[misc]


async def serve(config: RunConfig, directory: Path) -> None:
    """Run a cluster until a signal stops it."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    make_files(directory / CERTIFICATES)
    (directory / LOGS).mkdir(exist_ok=True)
    (directory / SETTINGS_FILE).write_text(settings_yaml())
    pools = SlurmPools(config, directory)
    await pools.start()
    try:
        await pools.run(stop)
    finally:
        await pools.close()


def main() -> None:
    """Entry point of the process."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s: %(message)s")
    logging.getLogger("distributed").setLevel(logging.WARNING)
    config = config_from_dict(json.loads(Path(sys.argv[1]).read_text()))
    names = {page_names.SETTING: list(config.cluster.dashboard_names)}
    dask.config.set({**DASK_SETTINGS, "distributed.deploy.lost-worker-timeout": "60s", **names})
    try:
        asyncio.run(serve(config, Path(sys.argv[2])))
    except ClusterError as error:
        sys.exit(f"{REFUSED}{error}")


# ---------------------------------------------------------------- for the commands


class WorkerStatus(NamedTuple):
    """A configured worker."""

    name: str
    role: str
    job_id: str  # "" if none is submitted
    state: str  # Slurm's, e.g. PENDING and (Resources), or RUNNING and the node
    reason: str
    connected: bool  # whether the scheduler has the worker


def up(config: RunConfig) -> Contact:
    """Start the configured cluster; returns once its jobs are submitted. ClusterError if Slurm is
    missing, a cluster is already up in ``slurm.dir``, or the start fails."""
    check_layout(config)
    for program in ("sbatch", "squeue", "scancel"):
        if shutil.which(program) is None:
            raise ClusterError(
                f"{program}: there is no Slurm on this machine; type this on a login node of the cluster"
            )
    directory = config.slurm.dir.absolute()
    path = directory / CONTACT_FILE
    if path.exists():
        with contextlib.suppress(OSError), connect(str(path), set_as_default=False):  # TimeoutError is one
            raise ClusterError(
                f"slurm.dir: a cluster is already up at {Contact.read(path).address}; type libra run CONFIG --scheduler {path}, "
                "or stop it: libra cluster slurm CONFIG down"
            )
        path.unlink()
    (directory / LOGS).mkdir(parents=True, exist_ok=True)
    directory.chmod(0o700)
    (directory / JOBS_FILE).unlink(missing_ok=True)  # of a process that was killed
    settings = directory / "config.json"
    settings.write_text(json.dumps(config.model_dump(mode="json")))
    log = directory / LOGS / SERVICE_LOG
    command = [sys.executable, "-m", "libra.cluster.slurm_service", str(settings), str(directory)]
    with log.open("ab") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, stdin=subprocess.DEVNULL, start_new_session=True)
    until_s = time.monotonic() + START_S
    while not (directory / JOBS_FILE).exists():
        if process.poll() is not None or time.monotonic() > until_s:
            process.kill()
            lines = log.read_text(errors="replace").splitlines()[-8:]
            refused = [line.removeprefix(REFUSED) for line in lines if line.startswith(REFUSED)]
            raise ClusterError(
                refused[-1] if refused else "\n  ".join([f"the cluster did not start; the end of {log}:", *lines])
            )
        time.sleep(0.1)
    return Contact.read(path)


def submitted(config: RunConfig) -> dict[str, str]:
    """Job id of each worker."""
    jobs: dict[str, str] = json.loads((config.slurm.dir / JOBS_FILE).read_text())
    return jobs


def status(config: RunConfig) -> tuple[Contact, list[WorkerStatus]]:
    """Contact of the cluster, and the state of each worker; ClusterError if no cluster answers."""
    path = config.slurm.dir.absolute() / CONTACT_FILE
    contact = Contact.read(path)
    jobs = submitted(config)
    states = job_states(jobs.values())
    try:
        with connect(str(path), set_as_default=False) as client:
            there = {str(worker["name"]) for worker in present_workers(client).values()}
    except OSError as error:
        raise ClusterError(
            f"{contact.address}: the scheduler of process {contact.pid} on {contact.host} does not answer ({error}); "
            "type libra cluster slurm CONFIG down, then up"
        ) from error
    return contact, [
        WorkerStatus(name, role_of(name), job, *states.get(job, ("GONE", "")), name in there)
        for name, job in sorted(jobs.items())
    ]


def down(config: RunConfig) -> Contact:
    """Cancel all jobs and stop the scheduler; returns its contact. ClusterError if none is up."""
    path = config.slurm.dir.absolute() / CONTACT_FILE
    contact = Contact.read(path)
    try:
        client = connect(str(path), set_as_default=False)
    except OSError:
        path.unlink(missing_ok=True)
        raise ClusterError(
            f"{contact.address} does not answer: {path} is removed; on {contact.host} type kill {contact.pid} if that process "
            "of libra cluster slurm still runs. Its jobs end by themselves within two minutes; squeue --me shows them"
        ) from None
    with client:
        client.shutdown()
    until_s = time.monotonic() + STOP_S
    while path.exists():
        if time.monotonic() > until_s:
            raise ClusterError(
                f"the cluster did not stop within {STOP_S:.0f} s; see {path.parent / LOGS / SERVICE_LOG}"
            )
        time.sleep(0.1)
    return contact


if __name__ == "__main__":
    main()

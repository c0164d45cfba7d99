"""The process behind ``libra cluster slurm CONFIG up``: Dask's scheduler, and the loop that keeps
its jobs running.

``python -m libra.cluster.slurm.service_process CONFIG DIRECTORY`` runs until it gets SIGTERM or a
client shuts the scheduler down.

Invariants
----------
1. At most one job of a worker's name is in the queue: a new one is submitted after the old one was cancelled or had ended.
2. ``cluster.json`` exists exactly while the scheduler answers.
3. When the process ends normally, it has no job left in the queue. After it was killed, its jobs end ``DEATH_TIMEOUT_S`` after
   they lost the scheduler.
4. All traffic is encrypted, and only processes with the key of ``slurm.dir`` can connect.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import dask
from distributed import Scheduler, SpecCluster
from distributed.core import Status
from distributed.utils import get_ip

from libra.cluster import page_names
from libra.cluster.connection import CERTIFICATE_FILE, KEY_FILE, Contact, make_files, security_in, write_private
from libra.cluster.local import ElasticTools, most_tools, number_of_workers, split_off
from libra.cluster.settings import DASK_SETTINGS, GUARD, settings_yaml
from libra.cluster.slurm.jobs import (
    CERTIFICATES,
    CONTACT_FILE,
    JOBS_FILE,
    LOGS,
    REFUSED,
    SETTINGS_FILE,
    role_of,
    worker_specs,
)
from libra.cluster.slurm.queue import job_states, lost
from libra.config import RunConfig, config_from_dict
from libra.errors import ClusterError

logger = logging.getLogger(__name__)

RECONCILE_S = 15.0
"""Seconds between two queries of Slurm's queue for lost jobs."""


class SlurmPools:
    """Scheduler and jobs of one configuration."""

    def __init__(self, config: RunConfig, directory: Path) -> None:
        self.config, self.directory = config, directory
        self.security = security_in(directory / CERTIFICATES)

    async def start(self) -> None:
        """Start the scheduler and submit a job for every worker."""
        host = self.config.slurm.host or get_ip()
        scheduler = {
            "cls": Scheduler,
            "options": {
                "host": host,
                "protocol": "tls://",
                "security": self.security,
                "preload": [GUARD],
                "dashboard_address": f"127.0.0.1:{self.config.cluster.dashboard_port}",
            },
        }
        self.cluster = SpecCluster(
            workers={}, scheduler=scheduler, security=self.security, asynchronous=True, name="libra", silence_logs=False
        )
        await self.cluster
        assert self.cluster.scheduler is not None
        specs = worker_specs(
            self.config,
            self.directory,
            self.security,
            number_of_workers(self.config) | {"tool": most_tools(self.config)},
        )
        least = self.config.cluster.tool_workers
        reserve = split_off(specs, least)
        self.elastic = ElasticTools(self.cluster, reserve, least) if reserve else None
        self.cluster.worker_spec.update(specs)
        services = self.cluster.scheduler.services
        port = services["dashboard"].port if "dashboard" in services else None
        tls = self.directory / CERTIFICATES
        contact = Contact(
            address=self.cluster.scheduler.address,
            dashboard=f"http://127.0.0.1:{port}/libra" if port else "",
            cert_file=str(tls / CERTIFICATE_FILE),
            key_file=str(tls / KEY_FILE),
            host=socket.gethostname(),
            pid=os.getpid(),
            started_s=time.time(),
        )
        contact.write(self.directory / CONTACT_FILE)
        refused = await self.reconcile()
        if refused is not None and {role_of(name) for name in specs} - set(map(role_of, self.cluster.workers)):
            await self.close()
            raise refused
        self._tell_jobs()

    async def reconcile(self) -> ClusterError | None:
        """Submit a job for every worker without one: not yet submitted, cancelled, failed, or at
        its time limit.

        Returns what sbatch said of one that it refused, e.g. a limit on jobs; it is tried again
        next time.
        """
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

    def _tell_jobs(self) -> None:
        jobs = {str(name): job.job_id for name, job in self.cluster.workers.items()}
        write_private(self.directory / JOBS_FILE, json.dumps(jobs) + "\n")

    async def run(self, stop: asyncio.Event) -> None:
        """Keep the jobs running until ``stop`` is set or the scheduler is shut down."""
        assert self.cluster.scheduler is not None
        closed = asyncio.ensure_future(self.cluster.scheduler.finished())
        stopped = asyncio.ensure_future(stop.wait())
        while not (closed.done() or stopped.done()):
            await asyncio.wait((closed, stopped), timeout=RECONCILE_S, return_when=asyncio.FIRST_COMPLETED)
            if not (closed.done() or stopped.done()):
                try:
                    if self.elastic is not None:
                        await self.elastic.look()
                    await self.reconcile()
                    self._tell_jobs()
                except ClusterError as error:  # Slurm's controller does not answer: its jobs continue
                    logger.error("reading the queue failed, will retry: %s", error)
        stopped.cancel()
        closed.cancel()

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
    dask.config.set(
        {
            **DASK_SETTINGS,
            "distributed.deploy.lost-worker-timeout": "60s",
            page_names.SETTING: list(config.cluster.dashboard_names),
        }
    )
    try:
        asyncio.run(serve(config, Path(sys.argv[2])))
    except ClusterError as error:
        sys.exit(f"{REFUSED}{error}")


if __name__ == "__main__":
    main()

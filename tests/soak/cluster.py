"""The process that has the scheduler of a soak; prints the path of its cluster.json and waits to be killed.

``python tests/soak/cluster.py CONFIG DIRECTORY [NAME ...]``: the nanny of each named worker is a process of its own, a ``dask
worker`` as a user starts one by hand; the others are in this process, as they are in `libra run`'s, and their workers are forked
from a process that has the large modules, because a soak starts many.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import dask
from distributed import Nanny
from distributed.core import Status
from distributed.deploy.spec import ProcessInterface
from distributed.utils import get_mp_context

from libra.cluster import local
from libra.cluster.certificates import CERTIFICATE_FILE, KEY_FILE, shown_by, write_private
from libra.cluster.scheduler_address import Contact
from libra.cluster.settings import settings_yaml
from libra.config import load_config

FAULTS = Path(__file__).with_name("faults.py")


PRELOADED = (
    "libra.driver.session",
    "libra.rollout.transformers_engine",
    "libra.train.replica",
    "libra.worker.host",
    "transformers.models.qwen3.modeling_qwen3",
    "zarr",
)


class NannyProcess(ProcessInterface):
    """One ``dask worker``; where it ends, `LocalWorkers` starts another, as it does with a nanny in its own process."""

    def __init__(self, scheduler: str, name: str, **options: Any) -> None:
        super().__init__(scheduler=scheduler, name=name)
        self.scheduler, self.name, self.options = scheduler, name, options

    async def start(self) -> None:
        directory = Path(sys.argv[2])
        certificate, key = write_keys(directory, self.options["security"])
        settings = directory / "dask.yaml"
        write_private(settings, settings_yaml(certificate, key))
        resources = ",".join(f"{name}={number}" for name, number in self.options["resources"].items())
        command = [sys.executable, "-m", "distributed.cli.dask_worker", self.scheduler, "--name", str(self.name)]
        command += ["--host", local.LOOPBACK, "--nthreads", str(self.options["nthreads"]), "--resources", resources]
        command += ["--memory-limit", "0", "--no-dashboard"]
        for module in self.options["preload"]:
            command += ["--preload", module]
        environment = {**os.environ, **local.WORKER_ENVIRONMENT, "DASK_CONFIG": str(settings), "OMP_NUM_THREADS": "1"}
        self.process = await asyncio.create_subprocess_exec(*command, env=environment)
        self.watcher = asyncio.create_task(self._watch())
        await super().start()

    async def _watch(self) -> None:
        await self.process.wait()
        self.status = Status.closed

    async def close(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await super().close()


def write_keys(directory: Path, security: Any) -> tuple[Path, Path]:
    """Certificate and key of a cluster as files."""
    certificate, key = directory / CERTIFICATE_FILE, directory / KEY_FILE
    for file, text in zip((certificate, key), shown_by(security), strict=False):
        write_private(file, text)
    return certificate, key


def main() -> None:
    """Start scheduler and workers."""
    config, directory, apart = load_config(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
    local.WORKER_ENVIRONMENT["PYTHONHASHSEED"] = os.environ["PYTHONHASHSEED"]
    dask.config.set({"distributed.worker.multiprocessing-method": "forkserver"})
    get_mp_context().set_forkserver_preload([*PRELOADED])
    local.Nanny = lambda scheduler, name, **options: (NannyProcess if name in apart else Nanny)(
        scheduler, name=name, **options
    )
    with local.local_cluster(config) as cluster:
        certificate, key = write_keys(directory, cluster.security)
        address, process, path = cluster.scheduler_address, os.getpid(), directory / "cluster.json"
        Contact(address, "", str(certificate), str(key), socket.gethostname(), process, time.time()).write(path)
        cluster.wait_for_workers(len(cluster.worker_spec))
        print(path, flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main()

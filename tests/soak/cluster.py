"""The process that has the scheduler of a soak; prints the path of its cluster.json and waits to be killed.

``python tests/soak/cluster.py CONFIG DIRECTORY [NAME ...]``: the nanny of each named worker is a process of its own, as that of a
``dask worker`` is; the others are in this process, as they are in `libra run`'s.
"""

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
from libra.cluster.connection import CERTIFICATE_FILE, KEY_FILE, Contact, shown_by, write_private
from libra.config import load_config
from libra.policy import tail

METHOD = "distributed.worker.multiprocessing-method"


class NannyProcess(ProcessInterface):
    """A nanny in a process of its own; where it ends, `LocalWorkers` starts another, as it does with one in its own process."""

    def __init__(self, scheduler: str, name: str, **options: Any) -> None:
        super().__init__(scheduler=scheduler, name=name)
        self.name, self.pid, settings = name, 0, dask.config.config
        self.process = get_mp_context().Process(target=serve_nanny, args=(scheduler, name, options, settings))

    async def start(self) -> None:
        await asyncio.to_thread(self.process.start)
        self.pid = self.process.pid or 0
        (Path(sys.argv[2]) / f"nanny of {self.name}.pid").write_text(str(self.pid))
        self.watcher = asyncio.create_task(self._watch())
        await super().start()

    async def _watch(self) -> None:
        await asyncio.to_thread(self.process.join)
        self.status = Status.closed

    async def close(self) -> None:
        self.process.kill()
        await super().close()


def serve_nanny(scheduler: str, name: str, options: dict[str, Any], settings: dict[str, Any]) -> None:
    """Keep a worker alive; the body of such a process."""

    async def serve() -> None:
        async with Nanny(scheduler, name=name, **options) as nanny:
            await nanny.finished()

    dask.config.set({**settings, METHOD: "fork"})
    asyncio.run(serve())


def main() -> None:
    config, directory, apart = load_config(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
    tail.price_s = lambda stage_s: 0.0  # where engines turn they do so in every tail, whatever a change costs
    kind = lambda name: NannyProcess if name in apart else Nanny  # noqa: E731
    local.Nanny = lambda scheduler, name, **options: kind(name)(scheduler, name=name, **options)
    with local.local_cluster(config) as cluster:
        certificate, key = directory / CERTIFICATE_FILE, directory / KEY_FILE
        for file, text in zip((certificate, key), shown_by(cluster.security), strict=False):
            write_private(file, text)
        address, process, path = cluster.scheduler_address, os.getpid(), directory / "cluster.json"
        Contact(address, "", str(certificate), str(key), socket.gethostname(), process, time.time()).write(path)
        cluster.wait_for_workers(len(cluster.worker_spec))
        print(path, flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main()

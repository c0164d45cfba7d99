"""A worker whose part of a run cannot be made says so; and what tasks find where it was made.

Dask writes such an error into the log of that worker, and calls the worker running all the same.
`libra.scheduler.unready_workers` is told here, so that a worker that joins in mid-run is not idle without anybody knowing.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from distributed import get_worker

from libra.errors import EnvironmentFault
from libra.worker.reports import report

if TYPE_CHECKING:
    from libra.worker.host import LibraHost

logger = logging.getLogger(__name__)

MAX_DETAIL_CHARS = 1000


@contextmanager
def report_setup_failure(host: LibraHost) -> Iterator[None]:
    """The scheduler hears of an error of the setup; Dask gets it too."""
    try:
        yield
    except Exception as error:
        host.unfit = f"{type(error).__name__}: {error}"[:MAX_DETAIL_CHARS]
        worker = host.worker
        report(worker, host.spec, "not_ready", name=str(worker.name), address=worker.address, detail=host.unfit)
        raise


async def close_environment(host: LibraHost) -> None:
    """Close the environment of a worker; where its setup failed, as far as it can be closed."""
    if not host.unfit:
        await host.environment.close()
    elif hasattr(host, "environment"):
        try:
            await host.environment.close()
        except Exception as error:  # noqa: BLE001 - the boundary to the user's environment, which was never set up
            logger.info("worker %s: an environment that was not set up did not close: %s", host.worker.name, error)


def host_here(run: str) -> LibraHost:
    """The host of a run on this task's worker, of a start of the run that is not fenced off.

    Raises
    ------
    EnvironmentFault
        Where the worker never got one, or it could not be set up.
    FencedOff
    """
    from libra.worker.host import LibraHost, host_name

    worker = get_worker()
    host = worker.plugins.get(host_name(run))
    if not isinstance(host, LibraHost):
        raise EnvironmentFault(
            f"worker {worker.name}: it has no part of run {run!r}; workers get it when the run starts "
            f"(is another cluster answering? is the run over?)"
        )
    if host.unfit:
        raise EnvironmentFault(f"worker {worker.name}: its part of run {run!r} could not be set up: {host.unfit}")
    host.epoch.check()
    return host

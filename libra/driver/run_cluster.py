"""The cluster of a run: given or started for it, the registration of the run on it, and the error if its scheduler is lost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from distributed import Client
from distributed.client import FutureCancelledError
from distributed.comm import CommClosedError

from libra.cluster.connection import RunContact, connect, forget, shown_by
from libra.cluster.local import local_cluster
from libra.cluster.readiness import check_cluster
from libra.config import RunConfig
from libra.driver.early_checks import no_scheduler
from libra.driver.launch_layout import check_workers, layout_fact
from libra.driver.part_checks import check_loadable
from libra.driver.run_client import RunClient, notices_logged
from libra.driver.run_start import RunStart
from libra.errors import ClusterError, LibraError, shell_path
from libra.keys import host_name
from libra.scheduler.run_state import process_name
from libra.worker.run_spec import forget_secret, sendable_spec
from libra.worker.runtime import WorkerRuntime

if TYPE_CHECKING:
    from distributed import Client, SpecCluster

logger = logging.getLogger(__name__)


def connect_run(
    config: RunConfig, given: Client | None, logs: Path, exits: ExitStack
) -> tuple[Client, SpecCluster | None]:
    """A client of a cluster that fits the run, and the cluster if it was started for the run.

    Workers started here log to ``logs``. ``exits`` closes all that is opened here; a ``given`` client stays connected.
    """
    client, cluster = (given, None) if given is not None else _connected(config, logs, exits)
    check_cluster(client, config)
    if cluster is None:
        check_workers(config, client)
    return client, cluster


def _connected(config: RunConfig, logs: Path, exits: ExitStack) -> tuple[Client, SpecCluster | None]:
    address = config.cluster.scheduler
    if address is None:
        cluster = local_cluster(config, logs)
        exits.callback(cluster.close)
        client = Client(cluster)
    else:
        cluster = None
        try:
            client = connect(address)
        except ClusterError as error:
            raise ClusterError(f"cluster.scheduler: {error}") from error
        except (OSError, TimeoutError, ValueError) as error:
            raise no_scheduler(address, error) from error
    exits.callback(_close, client)
    return client, cluster


def _close(client: Client) -> None:
    """Close a client, also one that tries to reconnect, of which tornado 6.6.1 raises ValueError."""
    with suppress(ValueError):
        client.close()


def register_run(scheduler: RunClient, start: RunStart, cluster: SpecCluster | None, exits: ExitStack) -> None:
    """Register the run with the scheduler and build its part on every worker; ``exits`` ends both."""
    client, spec, config = scheduler.client, start.spec, start.config
    hosted = False

    def end() -> None:
        if client.status != "running":
            return
        forget(spec.directory)
        forget_secret(spec.directory)
        scheduler.end()
        if hosted and cluster is None:  # a cluster of the run's own stops with its workers
            try:
                client.unregister_worker_plugin(host_name(spec.run))
            except (KeyError, ValueError) as error:  # its setup had failed there, or the scheduler had removed it
                logger.debug("there was no part of the run to remove: %s", error)

    process = scheduler.register(start, local=cluster is not None)
    exits.callback(end)
    if process != process_name():
        exits.enter_context(notices_logged(client, spec))
    if config.cluster.train_workers > 1:
        scheduler.register_group(config.cluster.train_workers)
    if config.cluster.hybrid_workers:
        scheduler.register_roles()
    check_loadable(client, spec)
    hosted = True
    client.register_plugin(WorkerRuntime(*sendable_spec(spec, str(client.scheduler.address))))  # type: ignore[union-attr]
    shown = shown_by(client.security)
    address = _address(client, config)
    RunContact(spec.run, spec.epoch, address, config.cluster.hybrid_workers, *shown).write(spec.directory)
    if config.planner.planned is not None:
        scheduler.tell(layout_fact(config.planner.planned))


def _address(client: Client, config: RunConfig) -> str:
    typed = config.cluster.scheduler
    if typed is not None and "://" not in typed and Path(typed).is_file():
        return str(Path(typed).absolute())
    return typed or str(client.scheduler_info(n_workers=0)["address"])


@contextmanager
def scheduler_loss_named(client: Callable[[], Client | None], directory: Path, address: str | None) -> Iterator[None]:
    """Context manager: ClusterError if the scheduler is lost.

    ``client`` gives the client at the time of an error, None before it is connected. ``address``: ``cluster.scheduler``.
    """
    try:
        yield
    except LibraError:
        raise
    except (OSError, CancelledError) as error:
        connected = client()
        lost = isinstance(error, CommClosedError)
        lost |= isinstance(error, FutureCancelledError) and error.reason == "scheduler-connection-lost"
        if connected is None or (connected.status == "running" and not lost):
            raise
        logging.getLogger("distributed.client").addFilter(_is_no_cancellation)
        raise ClusterError(lost_scheduler_text(directory, address)) from error


def _is_no_cancellation(record: logging.LogRecord) -> bool:
    """Drops what Dask logs if a client is closed while it still tries to reconnect: a traceback, and a wrong number of seconds."""
    cancelled = record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError)
    return not cancelled and not record.getMessage().startswith("Failed to reconnect to scheduler")


def lost_scheduler_text(directory: Path, address: str | None) -> str:
    """The message: what happened, what is kept, and what to type."""
    at, option = ("", "") if address is None else (f" at {address}", f" --scheduler {address}")
    return (
        f"the connection to the scheduler{at} is lost, and with it the tasks that ran; what is committed is kept. Start scheduler "
        f"and workers again where they are gone, then type libra resume {shell_path(directory)}{option}"
    )

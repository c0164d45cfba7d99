"""The cluster of a run: the one that its configuration names, or a local one started for it; and the run's registration
on it."""

from __future__ import annotations

import logging
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from distributed import Client

from libra.cluster.connection import RunContact, connect, forget, shown_by
from libra.cluster.local import local_cluster
from libra.cluster.readiness import check_cluster
from libra.config import RunConfig
from libra.driver.launch_layout import check_workers, layout_fact
from libra.driver.notice_reader import NoticeReader
from libra.driver.run_start import RunStart
from libra.driver.scheduler_calls import SchedulerCalls
from libra.driver.worker_imports import check_loadable
from libra.errors import ClusterError
from libra.keys import host_name
from libra.scheduler.run_state import process_name
from libra.worker import run_secret
from libra.worker.host import LibraHost

if TYPE_CHECKING:
    from distributed import SpecCluster

logger = logging.getLogger(__name__)


def connect_run(
    config: RunConfig, given: Client | None, logs: Path, exits: ExitStack
) -> tuple[Client, SpecCluster | None]:
    """A client of a cluster that has what the run needs, and the cluster where it was started for the run.

    Workers that are started here log to the directory ``logs``. ``exits`` closes what was started or connected here; a ``given``
    client stays connected.
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
            raise ClusterError(
                f"cluster.scheduler: no Dask scheduler answers at {address!r} ({error}); start one: libra "
                "cluster tls DIR says how, or leave --scheduler out for a local cluster"
            ) from error
    exits.callback(_close, client)
    return client, cluster


def _close(client: Client) -> None:
    """Close a client, also one that tries to reconnect, of which tornado 6.6.1 raises ValueError."""
    with suppress(ValueError):
        client.close()


def register_run(calls: SchedulerCalls, start: RunStart, cluster: SpecCluster | None, exits: ExitStack) -> None:
    """Register the run with the scheduler and build its part on every worker; ``exits`` ends both."""
    client, spec, config = calls.client, start.spec, start.config
    hosted = False

    def end() -> None:
        if client.status != "running":
            return
        forget(spec.directory)
        run_secret.forget(spec.directory)
        calls.end()
        if hosted and cluster is None:  # a cluster of the run's own stops with its workers
            try:
                client.unregister_worker_plugin(host_name(spec.run))
            except (KeyError, ValueError) as error:  # its setup had failed there, or the scheduler had removed it
                logger.debug("there was no part of the run to remove: %s", error)

    process = calls.register(start, local=cluster is not None)
    exits.callback(end)
    if process != process_name():
        reader = NoticeReader(client, spec)
        reader.start()
        exits.callback(reader.stop)
    calls.register_gang_and_roles()
    check_loadable(client, spec)
    hosted = True
    address = _address(client, config)
    client.register_plugin(LibraHost(*run_secret.sendable(spec, str(client.scheduler.address))))  # type: ignore[union-attr]
    shown = shown_by(client.security)
    RunContact(spec.run, spec.epoch, address, config.cluster.hybrid_workers, *shown).write(spec.directory)
    if config.planner.planned is not None:
        calls.tell(layout_fact(config.planner.planned))


def _address(client: Client, config: RunConfig) -> str:
    """The scheduler of a run, as ``--scheduler`` takes it from any directory: a file, or an address."""
    typed = config.cluster.scheduler
    if typed is not None and "://" not in typed and Path(typed).is_file():
        return str(Path(typed).absolute())
    return typed or str(client.scheduler_info(n_workers=0)["address"])

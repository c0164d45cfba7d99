"""The cluster of a run: the one that its configuration names, or a local one that is started for it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from distributed import Client

from libra.cluster.scheduler_address import connect
from libra.config import RunConfig
from libra.errors import ClusterError

if TYPE_CHECKING:
    from distributed import SpecCluster


def connected(config: RunConfig) -> tuple[Client, SpecCluster | None]:
    """A client, and the cluster where it was started for the run; ClusterError where the scheduler does not answer."""
    address = config.cluster.scheduler
    if address is None:
        from libra.cluster.local import local_cluster

        cluster = local_cluster(config)
        return Client(cluster), cluster  # type: ignore[no-untyped-call]
    try:
        return connect(address), None
    except (OSError, TimeoutError, ValueError) as error:
        raise ClusterError(
            f"cluster.scheduler: no Dask scheduler answers at {address!r} ({error}); start one with "
            "'dask scheduler --host HOST', or leave --scheduler out for a local cluster"
        ) from error


def address_of(client: Client, config: RunConfig) -> str:
    """Where the scheduler of a run is, as ``--scheduler`` takes it from any directory: a file, or an address."""
    typed = config.cluster.scheduler
    if typed is not None and "://" not in typed and Path(typed).is_file():
        return str(Path(typed).absolute())
    return typed or str(client.scheduler_info(n_workers=0)["address"])

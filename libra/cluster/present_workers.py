"""The workers that a scheduler has at this moment."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distributed import Client


def present_workers(client: Client) -> dict[str, dict[str, Any]]:
    """Facts of every worker by address: ``name``, ``nthreads``, ``resources``, ``host``, ``nanny`` and more.

    Not ``Client.scheduler_info``: that keeps its answer in an attribute, which Dask overwrites every 2 s with an answer without
    workers. On a busy machine the caller may read that answer, and see an empty cluster.
    """
    rpc: Any = client.scheduler
    identity: dict[str, Any] = client.sync(rpc.identity, n_workers=-1)
    workers: dict[str, dict[str, Any]] = identity["workers"]
    return workers

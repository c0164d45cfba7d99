"""Scheduler plugins beside `LibraPlugin` that only some runs need: registered when a run starts, told when it is over."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from libra.errors import ClusterError
from libra.worker.run_spec import RunSpec

if TYPE_CHECKING:
    from distributed import Client


def register_beside(client: Client, spec: RunSpec) -> None:
    """Make the run known to the plugins of training groups and of changing roles, where it has some; ClusterError where refused."""
    cluster, rpc = spec.config.cluster, _rpc(client)
    if cluster.train_workers > 1:
        from libra.scheduler.gang_plugin import GangPlugin

        client.register_plugin(GangPlugin())
        answer = client.sync(rpc.libra_register_gang, run=spec.run, epoch=spec.epoch, size=cluster.train_workers)
        if "error" in answer:
            raise ClusterError(
                f"cluster.train_workers: {answer['error']}; wait for it, or type cluster.train_workers=1"
            )
    if cluster.hybrid_workers:
        from libra.scheduler.role_plugin import RolePlugin

        client.register_plugin(RolePlugin())
        answer = client.sync(rpc.libra_register_roles, run=spec.run, epoch=spec.epoch)
        if "error" in answer:
            raise ClusterError(
                f"cluster.hybrid_workers: {answer['error']}; wait for it, or type cluster.hybrid_workers=0"
            )


def end_beside(client: Client, spec: RunSpec) -> None:
    """The run is over."""
    cluster, rpc = spec.config.cluster, _rpc(client)
    if cluster.train_workers > 1:
        client.sync(rpc.libra_end_gang, run=spec.run)
    if cluster.hybrid_workers:
        client.sync(rpc.libra_end_roles, run=spec.run)


def _rpc(client: Client) -> Any:
    """Calls to the handlers that plugins add to the scheduler."""
    return client.scheduler

"""How a program asks for other roles of a run's workers; `libra.scheduler.role_plugin` answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from libra.errors import ClusterError
from libra.worker.run_spec import RunSpec

if TYPE_CHECKING:
    from distributed import Client


class RoleClient:
    """The roles of one run's workers.

    Parameters
    ----------
    client : distributed.Client
    spec : RunSpec

    Raises
    ------
    ClusterError
        Where no worker of the run can change its role.
    """

    def __init__(self, client: Client, spec: RunSpec) -> None:
        if not spec.config.cluster.hybrid_workers:
            raise ClusterError(
                f"roles: no worker of run {spec.run!r} can change its role; type cluster.hybrid_workers=1 or more"
            )
        self._client, self._of = client, {"run": spec.run, "epoch": spec.epoch}

    @classmethod
    def of_run(cls, client: Client, run: str, epoch: int) -> RoleClient:
        """The roles of a run that somebody else started with workers that can change, on the scheduler of ``client``."""
        control = cls.__new__(cls)
        control._client, control._of = client, {"run": run, "epoch": epoch}
        return control

    def rows(self) -> list[dict[str, Any]]:
        """Each worker that can change, with ``role``, ``tp``, ``stage``, ``generation`` and more: see `RolePlugin.roles` of
        `libra.scheduler.role_plugin`."""
        return list(self._call("libra_roles"))

    def change(self, assignments: Mapping[str, str | Mapping[str, Any]]) -> int:
        """Begin one change of the workers named, to ``"rollout"``, ``"train"`` or ``{"role": ..., "tp": ...}``; its generation.

        Raises
        ------
        ClusterError
            Where it cannot be had; the message says why.
        """
        wanted = {name: {"role": has} if isinstance(has, str) else dict(has) for name, has in assignments.items()}
        return int(self._answered("libra_set_roles", assignments=wanted)["generation"])

    def cancel(self, generation: int) -> int:
        """Have a change undone that has not ended; the generation of the way back. ClusterError where it has."""
        return int(self._answered("libra_cancel_roles", generation=generation)["generation"])

    def wait(self, generation: int) -> bool:
        """Wait until a change has ended; whether it did what it was asked for, and was not undone."""
        return bool(self._answered("libra_wait_roles", generation=generation)["changed"])

    def _answered(self, name: str, **arguments: Any) -> Any:
        answer = self._call(name, **arguments)
        if "error" in answer:
            raise ClusterError(f"roles: {answer['error']}")
        return answer

    def _call(self, name: str, **arguments: Any) -> Any:
        rpc: Any = self._client.scheduler
        return self._client.sync(getattr(rpc, name), **self._of, **arguments)

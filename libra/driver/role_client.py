"""The client of a run's changing roles; `libra.scheduler.worker_roles` answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from libra.errors import ClusterError

if TYPE_CHECKING:
    from distributed import Client


class RoleClient:
    """The roles of the workers of one start of a run, which has ``cluster.hybrid_workers``.

    Parameters
    ----------
    client : distributed.Client
        Of the run's scheduler.
    run : str
    epoch : int
    """

    def __init__(self, client: Client, run: str, epoch: int) -> None:
        self._client, self._run = client, {"run": run, "epoch": epoch}

    def rows(self) -> list[dict[str, Any]]:
        """Each hybrid worker's role, TP degree, stage and last change; see `libra.scheduler.worker_roles.WorkerRoles.roles`."""
        return list(self._call("libra_roles"))

    def change(self, assignments: Mapping[str, str | Mapping[str, Any]]) -> int:
        """Begin one change of the workers named, to ``"rollout"``, ``"train"`` or ``{"role": ..., "tp": ...}``; its generation.

        ClusterError if it is refused; the message has the reason.
        """
        wanted = {name: {"role": has} if isinstance(has, str) else dict(has) for name, has in assignments.items()}
        return int(self._answered("libra_set_roles", assignments=wanted)["generation"])

    def cancel(self, generation: int) -> int:
        """Undo a change that has not ended; the generation of the change back. ClusterError if it has ended."""
        return int(self._answered("libra_cancel_roles", generation=generation)["generation"])

    def wait(self, generation: int) -> bool:
        """Wait until a change has ended; True if it was carried out, False if it was undone."""
        return bool(self._answered("libra_wait_roles", generation=generation)["changed"])

    def _answered(self, name: str, **arguments: Any) -> Any:
        answer = self._call(name, **arguments)
        if "error" in answer:
            raise ClusterError(f"roles: {answer['error']}")
        return answer

    def _call(self, name: str, **arguments: Any) -> Any:
        return self._client.sync(getattr(self._client.scheduler, name), **self._run, **arguments)

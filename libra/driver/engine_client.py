"""The client of a run's engines: their slots, and bucket boundaries. `libra.scheduler.plugin` answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from libra.errors import ClusterError
from libra.facts import BoundariesSet, boundaries_of, pack

if TYPE_CHECKING:
    from distributed import Client


class EngineClient:
    """The engines of one start of a run.

    Parameters
    ----------
    client : distributed.Client
    run : str
    epoch : int
    """

    def __init__(self, client: Client, run: str, epoch: int) -> None:
        self._client = client
        self._run: dict[str, Any] = {"run": run, "epoch": epoch}

    def rows(self) -> list[dict[str, Any]]:
        """Each engine's worker, slots and declared capacity; see `libra.scheduler.worker_supply.Concurrency.rows`."""
        return list(self._call("libra_engines", **self._run))

    def limit_slots(self, slots: Mapping[str, int | Mapping[str, int]], reason: str = "requested") -> None:
        """Limit how many trajectories engines generate for at once, by worker, without a restart.

        ``{"rollout-0": 4}``, or ``{"rollout-0": {"tp": 2, "slots": 4}}`` for an engine that a role change is to build. Where
        fewer slots remain than trajectories generate, these end their turns first.

        Raises
        ------
        ClusterError
            More slots than an engine was started with, fewer than 1, or a worker without an engine; nothing changes then.
        """
        wanted = {worker: {"slots": has} if isinstance(has, int) else dict(has) for worker, has in slots.items()}
        answer = self._call("libra_set_slots", **self._run, slots=wanted, reason=reason)
        if "error" in answer:
            raise ClusterError(f"slots: {answer['error']}")

    def set_boundaries(self, tokens: Mapping[str, float], reason: str = "requested") -> None:
        """Set the bucket boundaries: the token counts up to which each degree's engines are preferred (as
        `policy.boundaries_tokens`); empty: none."""
        self._call("libra_told", **self._run, packed=pack([BoundariesSet(boundaries_of(tokens), reason)]))

    def _call(self, name: str, **arguments: Any) -> Any:
        return self._client.sync(getattr(self._client.scheduler, name), **arguments)

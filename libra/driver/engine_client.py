"""How a program asks for other slots of a run's engines, and other bucket boundaries; `libra.scheduler.plugin` answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from libra.errors import ClusterError
from libra.worker.reports import TOPIC
from libra.worker.run_spec import RunSpec

if TYPE_CHECKING:
    from distributed import Client


class EngineControl:
    """The engines of one run.

    Parameters
    ----------
    client : distributed.Client
    spec : RunSpec
    """

    def __init__(self, client: Client, spec: RunSpec) -> None:
        self._client, self._of = client, {"run": spec.run, "epoch": spec.epoch}

    def rows(self) -> list[dict[str, Any]]:
        """Each engine: what it is, may use and has declared; see `libra.scheduler.slot_limits.Concurrency.rows`."""
        return list(self._call("libra_engines", **self._of))

    def limit_slots(self, slots: Mapping[str, int | Mapping[str, int]], reason: str = "asked for") -> None:
        """Let engines generate for at most so many trajectories at once from now on, by worker; nothing is restarted.

        ``{"rollout-0": 4}``, or ``{"rollout-0": {"tp": 2, "slots": 4}}`` of an engine that a change of roles is to make. Who
        generates when there are fewer slots than before ends its turn first.

        Raises
        ------
        ClusterError
            More than an engine was started with, fewer than 1, or a worker that has no engine; nothing is changed then.
        """
        wanted = {worker: {"slots": has} if isinstance(has, int) else dict(has) for worker, has in slots.items()}
        answer = self._call("libra_set_slots", **self._of, slots=wanted, reason=reason)
        if "error" in answer:
            raise ClusterError(f"slots: {answer['error']}")

    def set_boundaries(self, tokens: Mapping[str, float], reason: str = "asked for") -> None:
        """Mean trajectories of up to so many tokens for engines of a degree, as `policy.boundaries_tokens`; empty: none."""
        told = {"kind": "boundaries", **self._of, "tokens": dict(tokens), "reason": reason}
        self._call("log_event", topic=TOPIC, msg=told)

    def _call(self, name: str, **arguments: Any) -> Any:
        rpc: Any = self._client.scheduler
        return self._client.sync(getattr(rpc, name), **arguments)

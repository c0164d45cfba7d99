"""What replanning asks of a run's scheduler: other roles where workers can change them, other slots, other boundaries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from libra.driver.engine_client import EngineControl
from libra.driver.role_client import RoleClient
from libra.driver.worker_seats import seats_of
from libra.errors import ClusterError
from libra.planner.arrangements import Assignments, Seat
from libra.worker.run_spec import RunSpec

if TYPE_CHECKING:
    from distributed import Client


class AskingRun:
    """The `libra.driver.replanning.RunCalls` of a run that is started.

    Parameters
    ----------
    client : distributed.Client
    spec : RunSpec
    """

    def __init__(self, client: Client, spec: RunSpec) -> None:
        self._engines = EngineControl(client, spec)
        self._roles = RoleClient(client, spec) if spec.config.cluster.hybrid_workers else None

    def seats(self) -> list[Seat]:
        """The rollout workers that are there."""
        return seats_of(self._engines.rows(), self.role_rows())

    def role_rows(self) -> list[dict[str, Any]]:
        """Workers that can change roles; none where the run has none."""
        return [] if self._roles is None else self._roles.rows()

    def change(self, assignments: Assignments) -> int:
        """Begin a change of roles; its generation, or ClusterError."""
        if self._roles is None:
            raise ClusterError("roles: no worker can change its role; type cluster.hybrid_workers=1 or more")
        return self._roles.change(assignments)

    def limit_slots(self, slots: Mapping[str, Mapping[str, int]], reason: str) -> None:
        """Limit slots of engines, or ClusterError."""
        self._engines.limit_slots(slots, reason)

    def set_boundaries(self, tokens: Mapping[str, float], reason: str) -> None:
        """Mean trajectories for engines by their length."""
        self._engines.set_boundaries(tokens, reason)

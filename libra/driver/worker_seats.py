"""The rollout workers of a run as the planner sees them (`libra.planner.arrangements.Seat`), from what the scheduler says."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import urlsplit

from libra.planner.arrangements import Seat
from libra.types import EngineCapacity

AWAY = ("lost", "failed")
"""Stages of workers that can do nothing now."""


def seats_of(engines: Iterable[Mapping[str, Any]], roles: Iterable[Mapping[str, Any]]) -> list[Seat]:
    """Seats of the workers that are there.

    Parameters
    ----------
    engines : iterable of mapping
        `libra.scheduler.slot_limits.Concurrency.rows`.
    roles : iterable of mapping
        `libra.scheduler.role_plugin.RolePlugin.roles`; empty where no worker can change roles.
    """
    changing = {str(row["worker"]): row for row in roles}
    return [
        seat_of(row, changing.get(str(row["worker"])))
        for row in engines
        if _is_there(row, changing.get(str(row["worker"])))
    ]


def _is_there(row: Mapping[str, Any], role: Mapping[str, Any] | None) -> bool:
    return row["supplies"] > 0 if role is None else role["stage"] not in AWAY


def seat_of(row: Mapping[str, Any], role: Mapping[str, Any] | None) -> Seat:
    """One seat; ``role`` None: the worker stays what it is."""
    return Seat(
        str(row["worker"]),
        urlsplit(row["address"]).hostname or str(row["address"]),
        str(row["engine"]),
        str(row["bucket"]),
        int(row["base_tp"]),
        int(row["base_slots"]),
        role is not None,
        "rollout" if role is None else str(role["role"]),
        frozenset() if role is None else frozenset(role["shares_with"]),
        int(row["residents"]),
        {int(tp): int(slots) for tp, slots in row["limits"].items()},
        {int(tp): EngineCapacity.from_declaration(said) for tp, said in row["declared"].items()},
    )

"""Engines and their trajectories by bucket, as the dashboard shows them."""

from __future__ import annotations

from typing import Any

from libra.policy.engine_loads import Loads
from libra.policy.fleet import Fleet
from libra.policy.phase_queue import PhaseQueue


def bucket_rows(queue: PhaseQueue, fleet: Fleet, loads: Loads) -> list[dict[str, Any]]:
    """A row per bucket: `bucket`, `engines`, `used` and `slots`, `at_home` and `waiting` trajectories, and `left_tokens`, the mean
    forecast of those at home (0: none).

    If trajectories wait without a home, the last row is theirs, with None for its bucket.
    """
    rows, without_home = list[dict[str, Any]](), len(queue.waiting)
    for bucket, names in sorted(fleet.buckets.items()):
        waiting = sum(queue.waiting_at.get(name, 0) for name in names)
        without_home -= waiting
        rows.append(
            {
                "bucket": bucket,
                "engines": len(names),
                "used": sum(queue.taken.get(name, 0) for name in names),
                "slots": sum(queue.slots.get(name, 0) for name in names),
                "at_home": sum(fleet.hosts[name].residents for name in names),
                "waiting": waiting,
                "left_tokens": loads.mean_left(names),
            }
        )
    if without_home > 0:
        empty = dict.fromkeys(("engines", "used", "slots", "at_home"), 0)
        rows.append({"bucket": None, **empty, "waiting": without_home, "left_tokens": 0})
    return rows

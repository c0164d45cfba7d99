"""Rows that snapshots of the page show: a worker that is not ready, and one that changes its role."""

from typing import Any

UNREADY = {"worker": "tool-1", "address": "tcp://h:1", "stage": "failed", "for_s": 3.9, "detail": "OSError: no <disk>",
           "again_in_s": 90.2}  # fmt: skip
BANDS = (0, 1, 0, 0, 0)
"""Trajectories of a sample by level."""
SHOWN_ROWS = ("not-ready-tool-1", "role-rollout-0")
"""Names by which the page marks the two rows."""


def role(**changes: Any) -> dict[str, Any]:
    """A row of a worker on its way from an engine of two GPUs to training; keyword arguments replace entries."""
    return {
        "worker": "rollout-0", "role": "train", "tp": 2, "stage": "taking_up", "generation": 4, "from_role": "rollout",
        "from_tp": 2, "for_s": 3.2, "seconds": 1.25, "reason": "asked for",
    } | changes  # fmt: skip

"""Names of metrics for trackers, by group: ``reward/``, ``train/``, ``time/``, ``lag/``, ``failures/``, ``forecast/``, ``plan/``,
``late/``, ``sessions/``.

``metrics.jsonl`` keeps the names without groups.
"""

from __future__ import annotations

from typing import Final

_RENAMED: Final = {
    "reward": "reward/mean", "frac_reward_zero_std": "reward/frac_zero_std",
    "groups_without_signal": "reward/groups_without_signal",
    "evaluation/reward": "reward/held_out", "evaluation/wall_s": "time/evaluation_s", "lag": "lag/mean", "version": "lag/version",
    "failures": "failures/all", "left_out": "failures/left_out", "resampled": "failures/tried_again",
}  # fmt: skip
_PREFIXES: Final = (
    ("evaluation/reward/", "reward/held_out_by/"), ("evaluation/", "reward/held_out_"), ("reward_", "reward/"), ("lag_", "lag/"),
    ("mismatch_", "lag/mismatch_"), ("failures/", "failures/"), ("resampled/", "failures/tried_again_"), ("forecast_", "forecast/"),
    ("plan/", "plan/"), ("late_", "late/"), ("sessions_", "sessions/"),
)  # fmt: skip


def grouped(name: str) -> str:
    """The name of a metric of ``metrics.jsonl`` in its group; seconds are in ``time/``, and what has no group in ``train/``."""
    if name in _RENAMED:
        return _RENAMED[name]
    for prefix, group in _PREFIXES:
        if name.startswith(prefix):
            return group + name.removeprefix(prefix)
    return f"time/{name}" if name.endswith("_s") else f"train/{name}"

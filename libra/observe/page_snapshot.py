"""What the Libra page shows: snapshots of runs, the feed that reads them, and their figures as text.

A snapshot is one dict per run:

- ``run`` str, ``epoch`` int, ``uptime_s`` float, ``eta`` int (staleness bound), ``iterations`` int
- ``iteration`` int: newest whose gate opened, -1 before the first
- ``versions``: {"published": int, "served": {worker: int}}
- ``slots``: {phase: {"used": int, "total": int}}; ``queue``: {phase: {level: parked tasks}}
- ``buckets``: one row per rollout capacity class, see `libra.policy.Dispatcher.buckets`
- ``policy``: {"name", "objective", "skill", "weights": {signal: weight}, "outcomes": [[tokens forecast at first, forecast half way,
  generated], ...]}
- ``roles``: one row per worker that can change its role, see `libra.scheduler.role_plugin.RolePlugin.roles`
- ``not_ready``: one row per worker that the run does not use yet, see `libra.scheduler.unready_workers.NotReady.rows`
- ``time``: what workers did since the run's start, of `time_row`
- ``quanta``: {phase: finished}; ``tokens`` int generated, ``groups`` int committed, ``failures`` {class: count} of
  trajectories that ended so, ``resampled`` int attempts that failed before
- ``rewards``, ``lag``: [[iteration, mean], ...]
- ``history``: [(t_s, queued_rollout, queued_tool, used_rollout, used_tool, tokens), ...], oldest first
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from libra.observe.worker_time import WorkerTimes

Snapshot = dict[str, Any]

RATE_WINDOW_S: Final = 10.0
"""Seconds of history behind the figure of tokens per second."""

BUSY_WINDOW_S: Final = 60.0
"""Seconds of the figure of busy worker time "now"."""


class Feed:
    """The latest snapshots, shared by every open page.

    Parameters
    ----------
    snapshots : callable
        Gives one dict per run.
    max_age_s : float
        Age at which they are read again, so that ``snapshots`` is called at most once per ``max_age_s`` for any number of viewers.
    clock_s : callable
        Monotonic seconds.
    """

    def __init__(
        self,
        snapshots: Callable[[], list[Snapshot]],
        max_age_s: float = 0.4,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.snapshots = snapshots
        self.max_age_s = max_age_s
        self._clock_s = clock_s
        self._read_at_s = -math.inf
        self._latest: list[Snapshot] = []

    def read(self) -> list[Snapshot]:
        """Snapshots at most ``max_age_s`` old; the reader must not change them."""
        now_s = self._clock_s()
        if now_s - self._read_at_s >= self.max_age_s:
            self._latest = self.snapshots()
            self._read_at_s = now_s
        return self._latest

    def follow(self, snapshots: Callable[[], list[Snapshot]]) -> None:
        """Replace the source."""
        self.snapshots = snapshots
        self._read_at_s = -math.inf


def tokens_per_s(history: Sequence[Sequence[float]], window_s: float = RATE_WINDOW_S) -> float:
    """Tokens generated per second over the last ``window_s`` of history, 0.0 if it is shorter than two samples."""
    if len(history) < 2:
        return 0.0
    last = history[-1]
    first = next(row for row in history if row[0] >= last[0] - window_s)
    return (last[5] - first[5]) / (last[0] - first[0]) if last[0] > first[0] else 0.0


def time_row(times: WorkerTimes, now_s: float) -> dict[str, Any]:
    """Where worker time went, JSON-able, over the run and over the last `BUSY_WINDOW_S`.

    ``until_s``, ``busy_frac`` and ``now_busy_frac`` (None: no time yet), ``shares`` and ``now_shares`` {state: share},
    ``workers``: [{"worker", "kind", "busy_frac", "seconds": {state: s}}, ...]; states as in `libra.observe.worker_time`.
    """
    whole, now = times.times(now_s), times.times(now_s, max(now_s - BUSY_WINDOW_S, 1e-9))
    return {
        "until_s": whole.until_s,
        "busy_frac": whole.busy_frac,
        "now_busy_frac": now.busy_frac,
        "shares": whole.shares,
        "now_shares": now.shares,
        "workers": [
            {"worker": each.worker, "kind": each.kind, "busy_frac": each.busy_frac, "seconds": dict(each.seconds)}
            for each in whole.workers
        ],
    }


def _busy(time: Mapping[str, Any]) -> tuple[str, str]:
    """The figure of busy worker time: now, and with causes over the run."""
    busy, now = time.get("busy_frac"), time.get("now_busy_frac")
    if busy is None:
        return "–", "no worker yet"
    causes = sorted(time["shares"].items(), key=lambda pair: -pair[1])[:3]
    split = ", ".join(f"{state} {100 * share:.0f} %" for state, share in causes)
    return f"{100 * busy:.0f} %", f"{100 * (now or 0.0):.0f} % in the last {BUSY_WINDOW_S:.0f} s; {split}"


def numbers(snapshot: Snapshot) -> dict[str, tuple[str, str]]:
    """The figures of one run: name -> (value, remark), both as shown."""
    published, served = snapshot["versions"]["published"], snapshot["versions"]["served"]
    rewards, quanta, failures = snapshot["rewards"], snapshot["quanta"], snapshot["failures"]
    failed = {name: count for name, count in failures.items() if count and name != "none"}
    iteration = snapshot["iteration"]
    behind = sum(version < published for version in served.values())
    return {
        "busy": _busy(snapshot["time"]),
        "iteration": (
            f"{iteration}" if iteration >= 0 else "–",
            f"of 0–{snapshot['iterations'] - 1}, lag bound {snapshot['eta']}",
        ),
        "reward": (
            _reward(rewards[-1][1]) if rewards else "–",
            f"in {rewards[-1][0]}; {_reward(rewards[0][1])} in {rewards[0][0]}" if rewards else "none finished",
        ),
        "tokens_per_s": (f"{tokens_per_s(snapshot['history']):,.0f}", f"last {RATE_WINDOW_S:.0f} s"),
        "tokens": (f"{snapshot['tokens']:,}", "generated"),
        "groups": (f"{snapshot['groups']:,}", "committed"),
        "quanta_rollout": (f"{quanta.get('ROLLOUT', 0):,}", "generations finished"),
        "quanta_tool": (f"{quanta.get('TOOL', 0):,}", "actions finished"),
        "version": (
            f"v{published}",
            f"on {len(served) - behind} of {len(served)} engines" if served else "on no engine yet",
        ),
        "policy": (snapshot["policy"]["name"], _trust(snapshot["policy"])),
        "failures": (
            f"{sum(failed.values()):,}",
            (", ".join(f"{name} {count:,}" for name, count in sorted(failed.items())) or "no trajectory failed")
            + (f"; {snapshot['resampled']:,} tried again" if snapshot.get("resampled") else ""),
        ),
    }


def _trust(policy: Mapping[str, Any]) -> str:
    """Objective of an ordering, and the skill and weights of its forecasts."""
    if policy["skill"] is None:
        return policy["objective"] or "no forecasts"
    if policy["skill"] <= 0:
        return f"{policy['objective']}, forecasts not used yet"
    followed = ", ".join(f"{name} {weight:.2f}" for name, weight in policy["weights"].items() if weight >= 0.005)
    return f"{policy['objective']}, skill {policy['skill']:.2f} ({followed or 'progress'})"


def _reward(mean: float | None) -> str:
    """A mean reward as shown; a dash where no trajectory of the iteration could be graded."""
    return "–" if mean is None or math.isnan(mean) else f"{mean:.3f}"

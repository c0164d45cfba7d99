"""The data of the Libra page: snapshots of runs, the feed that reads them, and figures as text.

A snapshot is one dict per run:

- ``run`` str, ``epoch`` int, ``uptime_s`` float, ``eta`` int (staleness bound), ``iterations`` int
- ``state`` (`libra.observe.run_directory`); ``left_s`` to the end of the last iteration, or None
- ``iteration`` int: newest whose gate opened, -1 before the first
- ``versions``: {"published": int, "served": {worker: int}}
- ``slots``: {phase: {"used": int, "total": int}}; ``queue``: {phase: {level: waiting trajectories}}
- ``buckets``: one row per capacity class (`libra.policy.Dispatcher.buckets`)
- ``policy``: {"name", "objective", "skill", "weights": {signal: weight}, "outcomes": [[first
  forecast, forecast half way, generated], ...] in tokens}
- ``roles``: rows of `libra.scheduler.worker_roles.WorkerRoles.roles`
- ``not_ready``: rows of `libra.policy.liveness.Liveness.rows`
- ``time``: `libra.observe.timeline.timeline.Timeline.worker_time`
- ``quanta``: {phase: finished}, ``parts`` int of them unfinished turns; ``tokens`` int generated,
  ``groups`` int committed, ``failures`` {class: trajectories}, ``resampled`` int failed attempts
- ``rewards``, ``lag``: [[iteration, mean], ...]; ``evaluations``: [[version, mean, questions], ...]
- ``steps``: [[step, {state: seconds of the training worker}], ...], from one version to the next
- ``waves``: `libra.observe.timeline.steps.Steps.open_step`, or None
- ``decisions``: [[t_s, decision, reason], ...], the newest first
- ``history``: rows of `libra.observe.timeline.timeline.Timeline`, the oldest first

The scheduler's snapshots cover this start of a run, those in `libra page` all starts.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from libra.observe.html import duration, number, percent
from libra.observe.timeline.timeline import BUSY_WINDOW_S

Snapshot = dict[str, Any]

RATE_WINDOW_S: Final = 10.0
"""Seconds of history behind the figure of tokens per second."""


class Feed:
    """Latest snapshots, shared by all open pages; ``clock_s`` is monotonic.

    ``snapshots`` is called at most once per ``max_age_s``, for any number of viewers.
    """

    def __init__(
        self,
        snapshots: Callable[[], list[Snapshot]],
        max_age_s: float = 0.4,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.max_age_s, self._clock_s = max_age_s, clock_s
        self._latest: list[Snapshot] = []
        self._read_at_s = -math.inf
        self.snapshots = snapshots

    def read(self) -> list[Snapshot]:
        """Snapshots at most ``max_age_s`` old; callers must not change them."""
        now_s = self._clock_s()
        if now_s - self._read_at_s >= self.max_age_s:
            self._latest, self._read_at_s = self.snapshots(), now_s
        return self._latest

    def follow(self, snapshots: Callable[[], list[Snapshot]]) -> None:
        """Replace the source of snapshots."""
        self.snapshots, self._read_at_s = snapshots, -math.inf


def tokens_per_s(history: Sequence[Sequence[float]], window_s: float = RATE_WINDOW_S) -> float:
    """Tokens per second over the last ``window_s`` or the last row, if longer; 0.0 below two rows."""
    if len(history) < 2:
        return 0.0
    last = history[-1]
    first = next((row for row in reversed(history[:-1]) if row[0] <= last[0] - window_s), history[0])
    return (last[5] - first[5]) / (last[0] - first[0]) if last[0] > first[0] else 0.0


def numbers(snapshot: Snapshot) -> dict[str, tuple[str, str]]:
    """Figures of one run: name -> (value, remark), both as text."""
    running, iteration, lag = snapshot["state"] == "running", snapshot["iteration"], snapshot["lag"]
    versions, quanta, parts = snapshot["versions"], snapshot["quanta"], snapshot["parts"]
    behind, served = sum(v < versions["published"] for v in versions["served"].values()), len(versions["served"])
    waiting = sum(sum(levels.values()) for levels in snapshot["queue"].values())
    return {
        "busy": _busy(snapshot["time"], running),
        "reward": _reward(snapshot["rewards"]),
        "evaluation": _evaluated(snapshot["evaluations"]),
        "iteration": (f"{iteration}" if iteration >= 0 else "–", f"of 0–{snapshot['iterations'] - 1}"),
        "left": _left(snapshot, running),
        "step": _step(snapshot["steps"]),
        "tokens_per_s": _rate(snapshot, running),
        "waiting": (f"{waiting:,}", _queue(snapshot["queue"]) or "no trajectory waits for a slot"),
        "lag": (number(lag[-1][1] if lag else None, ".2f"), f"versions behind, bound {snapshot['eta']}"),
        "version": (
            f"v{versions['published']}", f"on {served - behind} of {served} engines" if served else "on no engine yet"
        ),
        "failures": _failures(snapshot),
        "tokens": (f"{snapshot['tokens']:,}", "generated tokens"),
        "groups": (f"{snapshot['groups']:,}", "committed groups"),
        "quanta_rollout": (
            f"{quanta.get('ROLLOUT', 0):,}", f"generations, {parts:,} of them parts" if parts else "generations"
        ),
        "quanta_tool": (f"{quanta.get('TOOL', 0):,}", "tool calls"),
        "policy": (snapshot["policy"]["name"], _trust(snapshot["policy"])),
    }  # fmt: skip


def _busy(time: Mapping[str, Any], running: bool) -> tuple[str, str]:
    if time["busy_frac"] is None:
        return "–", "no worker yet"
    recently = f"{percent(time['now_busy_frac'], 0)} in the last {BUSY_WINDOW_S:.0f} s"
    return percent(time["busy_frac"], 0), recently if running else "of the whole run"


def _reward(rewards: Sequence[tuple[int, float | None]]) -> tuple[str, str]:
    if not rewards:
        return "–", "no iteration finished"
    (first, at_first), (last, at_last) = rewards[0], rewards[-1]
    return number(at_last), f"iteration {last}; {number(at_first)} in {first}"


def _evaluated(evaluations: Sequence[tuple[int, float | None, int]]) -> tuple[str, str]:
    if not evaluations:
        return "–", "nothing evaluated yet"
    version, mean, prompts = evaluations[-1]
    first = f"; {number(evaluations[0][1])} of v{evaluations[0][0]}" if len(evaluations) > 1 else ""
    return number(mean), f"v{version}, {prompts:,} questions{first}"


def _left(snapshot: Snapshot, running: bool) -> tuple[str, str]:
    took, left_s = duration(snapshot["uptime_s"]), snapshot["left_s"]
    if not running:
        return "done" if snapshot["state"] == "finished" else "stopped", f"after {took}"
    if left_s is None:
        return "–", "known after the first iteration"
    return duration(left_s), f"by the mean of the last iterations; up {took}"


def _step(steps: Sequence[tuple[int, Mapping[str, float]]]) -> tuple[str, str]:
    if not steps:
        return "–", "no step finished"
    step, split = steps[-1]
    parts = sorted(split.items(), key=lambda pair: -pair[1])[:2]
    words = ", ".join(f"{state} {seconds:.1f} s" for state, seconds in parts)
    return f"{sum(split.values()):.1f} s", f"step {step}: {words}"


def _rate(snapshot: Snapshot, running: bool) -> tuple[str, str]:
    mean = f"{snapshot['tokens'] / snapshot['uptime_s'] if snapshot['uptime_s'] > 0 else 0.0:,.0f}"
    if not running:
        return mean, "over the run"
    return f"{tokens_per_s(snapshot['history']):,.0f}", f"last {RATE_WINDOW_S:.0f} s; {mean} over the run"


def _queue(queue: Mapping[str, Mapping[Any, int]]) -> str:
    parts = []
    for phase, words in (("ROLLOUT", "to generate"), ("TOOL", "for tools")):
        if levels := sorted((int(level), n) for level, n in queue.get(phase, {}).items()):
            shown = ", ".join(f"{n:,} at {level}" for level, n in levels[:4])
            parts.append(f"{words}, by level: {shown}{', ...' if len(levels) > 4 else ''}")
    return "; ".join(parts)


def _failures(snapshot: Snapshot) -> tuple[str, str]:
    failed = {name: count for name, count in snapshot["failures"].items() if count and name != "none"}
    words = ", ".join(f"{name} {count:,}" for name, count in sorted(failed.items())) or "no trajectory failed"
    again = f"; {snapshot['resampled']:,} tried again" if snapshot.get("resampled") else ""
    return f"{sum(failed.values()):,}", words + again


def _trust(policy: Mapping[str, Any]) -> str:
    if policy["skill"] is None:
        return policy["objective"] or "no forecasts"
    if policy["skill"] <= 0:
        return f"{policy['objective']}, forecasts not used yet"
    followed = ", ".join(f"{name} {weight:.2f}" for name, weight in policy["weights"].items() if weight >= 0.005)
    return f"{policy['objective']}, skill {policy['skill']:.2f} ({followed or 'progress'})"

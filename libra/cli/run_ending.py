"""The last lines of `libra run`: what changed, where it lies, and how to look at it."""

from __future__ import annotations

import math
import shlex
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from libra.observe.progress import failure_causes

if TYPE_CHECKING:
    from libra.config import RunConfig
    from libra.driver.session import RunSummary


def closing_lines(summary: RunSummary, config: RunConfig) -> list[str]:
    """Lines for the end of a run; rewards are means, and a question without a grade counts in none of them."""
    directory = shlex.quote(_short(summary.directory))
    lines = [f"done          {len(summary.iterations)} iterations in {_duration(summary.wall_s)}"]
    if len(summary.evaluations) >= 2:
        first, last = summary.evaluations[0], summary.evaluations[-1]
        gain = summary.reward_after - summary.reward_before
        lines.append(
            f"held out      mean reward {summary.reward_before:.3f} before, {summary.reward_after:.3f} after ({gain:+.3f}), "
            f"{last['num']} questions each"
        )
        bins = [name for name in last.get("bins", {}) if name in first.get("bins", {})]
        if bins:
            pairs = ", ".join(f"{name}: {first['bins'][name][0]:.2f} -> {last['bins'][name][0]:.2f}" for name in bins)
            lines.append(f"by operations {pairs}")
        failures = int(first.get("failures", 0)) + int(last.get("failures", 0))
        if failures:
            lines.append(
                f"not graded    {failures} questions, for failures that are not the model's; see libra inspect --failed"
            )
    elif summary.iterations:
        rewards = [float(values.get("reward", math.nan)) for values in summary.iterations]
        lines.append(
            f"reward        {rewards[0]:.3f} in the first iteration, {rewards[-1]:.3f} in the last, on training questions"
        )
    lines += _failures(summary)
    lines.append(f"run           {directory}")
    if summary.checkpoint is not None:
        lines.append(f"model         {shlex.quote(_short(summary.checkpoint))}")
    if summary.best is not None and summary.best != summary.checkpoint:
        lines.append(f"best model    {shlex.quote(_short(summary.best))}")
    lines.append(f"look at it    libra inspect {directory}")
    if config.observe.tensorboard:
        lines.append(f"              tensorboard --logdir {directory}")
    return lines


def _failures(summary: RunSummary) -> list[str]:
    """What failed for reasons that are not the model's, where anything did."""
    total: Counter[str] = Counter()
    for values in summary.iterations:
        total.update(
            {
                name: int(count)
                for name, count in values.items()
                if name.startswith(("failures", "resampled", "trajectories"))
            }
        )
    causes = failure_causes(total)
    if not causes:
        return []
    return [
        f"failures      {causes}: {total['resampled']:,} tried again, {total['failures']:,} of "
        f"{total['trajectories']:,} trajectories left out; see docs/failures.md"
    ]


def _short(path: Path) -> str:
    """``path`` from the current directory where it lies in it."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"

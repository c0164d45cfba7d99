"""The last lines of `libra run`: rewards, failures, files, and the commands that show more."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from libra.errors import shell_path
from libra.observe.progress import failure_causes

if TYPE_CHECKING:
    from libra.config import RunConfig
    from libra.driver.run_summary import RunSummary


def closing_lines(summary: RunSummary, config: RunConfig) -> list[str]:
    """The closing lines of a run; rewards are means over graded prompts."""
    directory = shell_path(_short(summary.directory))
    count = len(summary.iterations)
    lines = [f"done          {count} iteration{'s' * (count != 1)} in {_duration(summary.wall_s)}"]
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
            lines.append(f"by bin        {pairs}")
        left_out = int(first.get("left_out", 0)) + int(last.get("left_out", 0))
        if left_out:
            lines.append(
                f"not graded    {left_out} questions, because of failures outside the model; see libra inspect --failed"
            )
    elif summary.iterations:
        rewards = [float(values.get("reward", math.nan)) for values in summary.iterations]
        lines.append(
            f"reward        {rewards[0]:.3f} in the first iteration, {rewards[-1]:.3f} in the last, on training questions"
        )
    lines += _failures(summary)
    lines += _no_signal(summary)
    lines.append(f"run           {directory}")
    if summary.checkpoint is not None:
        lines.append(f"model         {shell_path(_short(summary.checkpoint))}")
    if summary.best is not None and summary.best != summary.checkpoint:
        lines.append(f"best model    {shell_path(_short(summary.best))}")
    lines.append(f"look at it    libra report {directory}")
    lines += [f"              libra {command} {directory}" for command in ("page", "inspect")]
    if config.observe.tensorboard:
        lines.append(f"              tensorboard --logdir {directory}")
    return lines


def _failures(summary: RunSummary) -> list[str]:
    """Failures outside the model, where there were any."""
    total: Counter[str] = Counter()
    for values in summary.iterations:
        total.update(
            {
                name: int(count)
                for name, count in values.items()
                if name.startswith(("failures", "resampled", "trajectories", "left_out"))
            }
        )
    causes = failure_causes(total)
    if not causes:
        return []
    return [
        f"failures      {causes}: {total['resampled']:,} tried again, {total['left_out']:,} of "
        f"{total['trajectories']:,} trajectories left out; see docs/failures.md"
    ]


def _no_signal(summary: RunSummary) -> list[str]:
    """How many iterations had nothing to learn from, where any had."""
    causes = [str(values["no_signal"]) for values in summary.iterations if values.get("no_signal")]
    if not causes:
        return []
    last = f"; the last: {causes[-1]}" if len(causes) > 1 else f": {causes[0]}"
    return [f"no signal     in {len(causes)} of {len(summary.iterations)} iterations there was nothing to learn{last}"]


def _short(path: Path) -> str:
    """``path``, relative where it is inside the current directory."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"

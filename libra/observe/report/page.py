"""The report as one HTML file: head, sections, and Bokeh's scripts inside it."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from bokeh.embed import components
from bokeh.resources import Resources

from libra.errors import ConfigError, disk_refusal
from libra.hardware.prices import Prices
from libra.observe.color_scheme import SCRIPT
from libra.observe.html import STYLE, Html, content_policy, duration, missing, named_number, number, percent, text
from libra.observe.report import curves, records, waves, where_time
from libra.observe.report.reported_run import Cost, ReportedRun
from libra.observe.report.section import Section

SECTIONS: Final[tuple[Callable[[Sequence[ReportedRun]], Section], ...]] = (
    curves.rewards, where_time.worker_time, where_time.gantt, curves.seconds, curves.lengths, curves.forecasts,
    records.decisions, waves.streamed, curves.mismatch, records.failures, records.samples, records.settings,
)  # fmt: skip


def write_report(
    directories: Sequence[Path], output: Path, prices: Prices, *, gpu: str | None = None
) -> list[ReportedRun]:
    """Write the report of these runs to ``output``, replacing it; returns what was read.

    Raises ConfigError if the file cannot be written.
    """
    runs = [
        ReportedRun(directory, prices, name=name, place=place, gpu=gpu)
        for place, (directory, name) in enumerate(zip(directories, _names(directories), strict=True))
    ]
    page = report_html(runs)
    unfinished = output.with_name(f".{output.name}.{os.getpid()}.tmp")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(page, encoding="utf-8")
        unfinished.replace(output)
    except OSError as error:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)
        raise ConfigError(f"-o {output}: {disk_refusal(output, error)}; name another file with -o FILE") from error
    return runs


def _names(directories: Sequence[Path]) -> list[str]:
    """Names of the runs' directories, with a number where several are equal."""
    names = [directory.absolute().name for directory in directories]
    times, seen = Counter(names), Counter[str]()
    result = []
    for name in names:
        seen[name] += 1
        result.append(f"{name} ({seen[name]})" if times[name] > 1 else name)
    return result


def report_html(runs: Sequence[ReportedRun]) -> str:
    """The whole page."""
    plots: dict[str, Any] = {}
    body = [_section(section(runs), plots) for section in SECTIONS]
    script, divs = components(plots) if plots else ("", {})
    for name, div in divs.items():
        body = [piece.replace(f"<!-- {name} -->", div) for piece in body]
    title = " and ".join(run.name for run in runs)
    scripts = (
        f"{Resources(mode='inline', components=['bokeh']).render()}\n{script}\n<script>{SCRIPT}</script>"
        if plots
        else ""
    )
    head = "".join(_head(run, several=len(runs) > 1) for run in runs)
    links = "".join(f'<a href="#{anchor}">{text(name)}</a>' for anchor, name in _anchors(runs))
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f'{content_policy(scripts=True)}<link rel="icon" href="data:,">'
        f"<title>Libra: {text(title)}</title><style>{STYLE}</style></head><body><main>"
        f"<h1>{text(title)}</h1><nav>{links}</nav>{head}{''.join(body)}</main>\n{scripts}</body></html>\n"
    )


def _anchors(runs: Sequence[ReportedRun]) -> list[tuple[str, str]]:
    return [
        ("rewards", "Rewards"), ("time", "Worker time"), ("gantt", "Over time"), ("seconds", "Iterations"), ("lengths", "Lengths"),
        ("forecasts", "Forecasts"), ("decisions", "Decisions"), ("waves", "Waves"), ("mismatch", "Mismatch"),
        ("failures", "Failures"), ("samples", "Samples"), ("settings", "Settings"),
    ]  # fmt: skip


def _section(section: Section, plots: dict[str, Any]) -> str:
    parts = "".join(f"<div>{_part(part, section.anchor, plots)}</div>" for part in section.parts)
    return (
        f'<section id="{section.anchor}"><h2>{text(section.title)}</h2><p class="what">{text(section.what)}</p>'
        f'<div class="side">{parts}</div></section>'
    )


def _part(part: Any, anchor: str, plots: dict[str, Any]) -> str:
    if isinstance(part, Html):
        return part.source
    if isinstance(part, list):
        return "".join(_part(each, anchor, plots) for each in part)
    name = f"plot_{anchor}_{len(plots)}"
    part.name = name
    plots[name] = part
    return f"<!-- {name} -->"


def figures_of(run: ReportedRun) -> dict[str, tuple[str, str, str]]:
    """The figures at the head of a run: name -> (title, value, remark)."""
    _, rewards = run.series("reward")
    held = [result.get("reward") for _, result in sorted(run.evaluations.items())]
    time, cost = run.time, run.cost
    shares = {state: share for state, share in time.shares.items() if share >= 0.005}
    split = ", ".join(
        f"{state} {percent(share)}" for state, share in sorted(shares.items(), key=lambda each: -each[1])[:3]
    )
    failed = records.failure_counts(run)
    wall_s = time.until_s or _wall_s(run)
    rate = run.timeline.tokens / wall_s if wall_s else None
    starts = f"{run.timeline.starts} starts" if run.timeline.starts > 1 else "one start"
    return {
        "reward": ("Reward, training", number(rewards[-1] if rewards else None), _at_first(rewards)),
        "evaluation": ("Reward, held out", number(held[-1] if held else None), _at_first(held)),
        "busy": ("Busy", percent(time.busy_frac), split or "no event log"),
        "iterations": ("Iterations", f"{len(run.rows)}", f"of {run.iterations}, {run.state}"),
        "wall": ("Time", duration(wall_s) if wall_s else "–", starts),
        "tokens": ("Generated tokens", f"{run.timeline.tokens:,}", f"{number(rate, ',.0f')} per second"),
        "cost": ("Cost", "–", cost) if isinstance(cost, str) else _cost_tile(cost),
        "failures": ("Failures", "–" if failed is None else f"{sum(failed.values()):,}", "of training trajectories"),
    }


def _at_first(rewards: Sequence[float | None]) -> str:
    return f"{number(rewards[0])} at first" if rewards else "none yet"


def _cost_tile(cost: Cost) -> tuple[str, str, str]:
    return "Cost", number(cost.total, ",.4f"), f"{cost.currency}, by list price per {cost.unit}-hour"


def _wall_s(run: ReportedRun) -> float:
    times = [float(row["wall_time_s"]) for row in run.metrics if "wall_time_s" in row]
    return max(times) - min(times) if times else 0.0


def _head(run: ReportedRun, *, several: bool) -> str:
    tiles = "".join(
        f'<div class="tile"><h4>{text(title)}</h4>{named_number(name, run.name, value)}<small>{text(remark)}</small></div>'
        for name, (title, value, remark) in figures_of(run).items()
    )
    name = f'<span class="swatch" style="background:{run.color}"></span>{text(run.name)}: ' if several else ""
    notes = [f"The event log ends early: {run.log_error}."] if run.log_error and run.timeline.num_facts else []
    notes += (
        [f"There is no event log to read: {run.log_error}."] if run.log_error and not run.timeline.num_facts else []
    )
    warnings = "".join(missing(note).source for note in notes)
    return f'<p class="soft">{name}{text(run.directory)}</p><div class="tiles">{tiles}</div>{warnings}'

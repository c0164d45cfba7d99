"""`libra report`: one HTML file about one or several runs, which needs only a browser.

1. The file makes no request: it contains scripts and styles.
2. A part without data is a sentence with the reason, never an empty frame.
3. Text of models, tools and users reaches it only through templates of `libra.observe.html`.
4. Worker time is from `libra.observe.timeline.states`, as on the live page.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from bokeh.embed import components
from bokeh.resources import Resources
from markupsafe import Markup

from libra.hardware.gpus import Prices
from libra.observe.html import duration, number, percent, piece, render
from libra.observe.recorded_run import ReportedRun
from libra.observe.report.listings import Section, decisions, failures, samples, settings, streamed
from libra.observe.report.plots import forecasts, gantt, lengths, mismatch, rewards, seconds, worker_time
from libra.observe.run_directory import written

SECTIONS: Final[tuple[Callable[[Sequence[ReportedRun]], Section], ...]] = (
    rewards, worker_time, gantt, seconds, lengths, forecasts, decisions, streamed, mismatch, failures, samples, settings,
)  # fmt: skip


def write_report(
    directories: Sequence[Path], output: Path, prices: Prices, *, gpu: str | None = None
) -> list[ReportedRun]:
    """Write the report of these runs to ``output``, and return them; ConfigError if impossible."""
    runs = [
        ReportedRun(directory, prices, name=name, place=place, gpu=gpu)
        for place, (directory, name) in enumerate(zip(directories, _names(directories), strict=True))
    ]
    page = report_html(runs)
    with written(output, "-o") as path:
        path.write_text(page, encoding="utf-8")
    return runs


def _names(directories: Sequence[Path]) -> list[str]:
    names = [directory.absolute().name for directory in directories]
    return [
        f"{name} ({names[: place + 1].count(name)})" if names.count(name) > 1 else name
        for place, name in enumerate(names)
    ]


def report_html(runs: Sequence[ReportedRun]) -> str:
    """The whole page."""
    sections = [section(runs) for section in SECTIONS]
    plots = [part for section in sections for part in section.parts if not isinstance(part, Markup)]
    script, divs = components(plots) if plots else ("", ())
    embedded = {id(plot): Markup(div) for plot, div in zip(plots, divs, strict=True)}
    sections = [each._replace(parts=[embedded.get(id(part), part) for part in each.parts]) for each in sections]
    inline = Resources(mode="inline", components=["bokeh", "bokeh-widgets"]).render() if plots else ""
    scripts = Markup(inline + script) + render("scheme.html") if plots else ""
    head = Markup().join(_head(run, several=len(runs) > 1) for run in runs)
    title = " and ".join(run.name for run in runs)
    return render("report.html", title=f"Libra: {title}", head=head, sections=sections, scripts=scripts)


def figures_of(run: ReportedRun) -> dict[str, tuple[str, str, str]]:
    """Figures at the head of a run: name -> (title, value, remark)."""
    _, rewards = run.series("reward")
    held = [result.get("reward") for _, result in sorted(run.evaluations.items())]
    seen, shares, failed = run.timeline, Counter(run.time.shares), run.failures
    split = ", ".join(f"{state} {percent(share)}" for state, share in shares.most_common(3) if share >= 0.005)
    wall_s = run.time.until_s or run.wall_s
    starts = f"{seen.starts} starts" if seen.starts > 1 else "one start"
    rate = number(seen.tokens / wall_s if wall_s else None, ",.0f")
    return {
        "reward": ("Reward, training", number(rewards[-1] if rewards else None), _at_first(rewards)),
        "evaluation": ("Reward, held out", number(held[-1] if held else None), _at_first(held)),
        "busy": ("Busy", percent(run.time.busy_frac), split or "no event log"),
        "iterations": ("Iterations", f"{len(run.rows)}", f"of {run.iterations}, {run.state}"),
        "wall": ("Time", duration(wall_s, 1) if wall_s else "–", starts),
        "tokens": ("Generated tokens", f"{seen.tokens:,}", f"{rate} per second"),
        "cost": ("Cost", *_cost(run)),
        "failures": ("Failures", "–" if failed is None else f"{sum(failed.values()):,}", "of training trajectories"),
    }


def _at_first(rewards: Sequence[Any]) -> str:
    return f"{number(rewards[0])} at first" if rewards else "none yet"


def _cost(run: ReportedRun) -> tuple[str, str]:
    if isinstance(run.cost, str):
        return "–", run.cost
    return number(run.cost.total, ",.4f"), f"{run.cost.currency}, by list price per {run.cost.unit}-hour"


def _head(run: ReportedRun, *, several: bool) -> Markup:
    name = piece("swatch", run.color, f"{run.name}: ") if several else Markup()
    why = "The event log ends early" if run.timeline.num_facts else "There is no event log to read"
    return render(
        "report_head.html", name=name, directory=run.directory, run=run.name, figures=figures_of(run),
        warning=f"{why}: {run.log_error}." if run.log_error else "",
    )  # fmt: skip

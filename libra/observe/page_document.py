"""The Bokeh document behind ``/libra``, in the scheduler's dashboard and in `libra page`.

HTML elements have ``data-libra`` attributes: names of `libra.observe.page_snapshots.numbers`,
``share-<state>``, ``now-<state>``, ``waves``, ``wave-<number>``, ``worker-<worker>``,
``role-<worker>``, ``not-ready-<worker>``.

1. An update sends only changes: it streams new samples and replaces other data that differs.
2. A document holds at most ``MAX_SAMPLES`` samples, and only the feed of the scheduler.
3. Showing another run, or a new start of the same run, replaces every source.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from bokeh.core.properties import without_property_validation
from bokeh.document import Document
from bokeh.layouts import column
from bokeh.layouts import row as side_by_side
from bokeh.models.widgets import Div, Select
from jinja2 import Environment

from libra.observe.html import STYLESHEET, duration, render
from libra.observe.page_snapshots import BUSY_WINDOW_S, Feed, Snapshot, numbers
from libra.observe.panels import LagPanel, OutcomePanel, RewardPanel, StepPanel, TimePanels, set_changed
from libra.observe.timeline.states import shares_of
from libra.observe.timeline.steps import groups_text

MAX_WORKERS: Final = 64
"""Maximum rows in the table of workers."""
_TITLES: Final = {
    "reward": "Reward, training", "busy": "Busy", "evaluation": "Reward, held out", "iteration": "Iteration", "left": "To go",
    "step": "Last step", "tokens_per_s": "Tokens/s", "waiting": "Waiting", "lag": "Lag", "version": "Weights",
    "failures": "Failures", "groups": "Groups",
}  # fmt: skip
_TILES: Final = tuple(_TITLES)[2:-1]
_COUNTS: Final = ("tokens", "groups", "quanta_rollout", "quanta_tool", "policy")
_OVERVIEW: Final = ("busy", "iteration", "reward", "tokens_per_s", "groups", "version", "failures")
_EMPTY: Final[Mapping[str, Any]] = {
    "time": {"workers": ()}, "versions": {"served": {}}, "state": "", "buckets": (), "roles": (), "not_ready": (),
}  # fmt: skip


def summary_html(snapshot: Snapshot) -> str:
    """Header, worker time by state, and tiles of one run."""
    failed = any(count for name, count in snapshot["failures"].items() if name not in ("none", "policy"))
    return render(
        "summary.html", **{"note": ""} | snapshot, figures=numbers(snapshot), TITLES=_TITLES, TILES=_TILES, COUNTS=_COUNTS,
        bad=failed, BUSY_WINDOW_S=BUSY_WINDOW_S,
    )  # fmt: skip


def overview_html(snapshots: Sequence[Snapshot], chosen: str) -> str:
    """A table with one row per run, empty for a single run; ``chosen`` is the run drawn below."""
    rows = []
    for each in snapshots:
        figures = numbers(each)
        rows.append((each["run"], *(figures[name][0] for name in _OVERVIEW), duration(each["uptime_s"])))
    names = [("", "shown" * (each["run"] == chosen)) for each in snapshots]
    return render("overview.html", runs=rows, head=("Run", *(_TITLES[name] for name in _OVERVIEW), "Up"), names=names)


def decisions_html(snapshot: Snapshot) -> str:
    """Waves of the open or last step, and the last decisions as text."""
    waves = snapshot.get("waves")
    values = {"waves": waves, "waves_text": waves and _waves_text(waves), "decisions": snapshot["decisions"]}
    return render("decisions.html", **values, groups_text=groups_text)


def _waves_text(step: Mapping[str, Any]) -> str:
    in_wave = f", {step['in_wave']:,} in training now" if step["in_wave"] else ""
    missing = "" if step["taken"] else f", {step['missing']:,} in no wave yet"
    trained = f"{step['trained']:,} of {step['groups']:,} groups are trained{in_wave}{missing}"
    return f"{trained}; the step was taken." if step["taken"] else f"{trained}."


def workers_html(snapshot: Mapping[str, Any]) -> str:
    """Tables of workers, engine buckets, role changes, and workers not yet in use."""
    return render("workers.html", **{**_EMPTY, **snapshot}, MAX_WORKERS=MAX_WORKERS, shares_of=shares_of)


UPDATE_MS: Final = 500
GRID: Final = {
    "display": "grid", "gap": "8px", "margin-top": "8px",
    "grid-template-columns": "repeat(auto-fill, minmax(max(380px, 23%), 1fr))",
}  # fmt: skip
"""Three plots side by side at 1280 pixels, four at 2560."""
TABLES: Final = GRID | {
    "grid-template-columns": "repeat(auto-fit, minmax(min(100%, 760px), 1fr))", "align-items": "start",
}  # fmt: skip

CONTENT: Final = render("live.html")
"""Page content below Dask's links; a Bokeh template."""
ALONE: Final = (
    '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    '<link rel="icon" href="data:,"><title>{{ title }}</title>{{ bokeh_css }}{{ bokeh_js }}'
    f"<style>body {{ margin: 0; padding: 10px 14px; }}</style></head><body>{CONTENT}</body></html>"
)
"""Page of `libra page`, without links."""


def libra_document(feed: Feed, doc: Document) -> None:
    """Fill one visitor's document; Bokeh ends its periodic callback with the session."""
    page = LibraPage(feed)
    page.update()
    doc.add_root(page.root)
    doc.title, doc.template = "Libra", Environment().from_string(ALONE)
    doc.add_periodic_callback(page.update, UPDATE_MS)


def dashboard_document(feed: Feed, extra: dict[str, Any], doc: Document) -> None:
    """The same page in Dask's dashboard; ``extra`` holds template variables."""
    from distributed.dashboard.components.scheduler import env

    libra_document(feed, doc)
    doc.title = "Dask: Libra"
    doc.template = env.from_string(f'{{% extends "simple.html" %}}{{% block content %}}{CONTENT}{{% endblock %}}')
    doc.template_variables.update(extra)


class LibraPage:
    """Models of one visitor's page; ``root`` is added to the document."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed
        self.overview, self.summary, self.decisions, self.workers = (
            Div(name=f"libra_{name}", stylesheets=[STYLESHEET], sizing_mode="stretch_width", margin=0)
            for name in ("overview", "summary", "decisions", "workers")
        )
        self.select = Select(name="libra_run", title="Show", options=[], value="", visible=False, width=240)
        self.select.on_change("value", lambda _attr, _old, _new: self.update())
        self.rewards, self.steps, self.time = RewardPanel(), StepPanel(), TimePanels()
        self.lag, self.outcomes = LagPanel(), OutcomePanel()
        panels = (self.rewards, self.steps, *self.time.panels, self.outcomes, self.lag)
        self.plots = column(*(panel.card for panel in panels), sizing_mode="stretch_width", styles=GRID)
        self.tables = column(self.decisions, self.workers, sizing_mode="stretch_width", styles=TABLES)
        head = side_by_side(self.overview, self.select, sizing_mode="stretch_width")
        self.root = column(head, self.summary, self.plots, self.tables, sizing_mode="stretch_width")

    @without_property_validation  # type: ignore[untyped-decorator]
    def update(self) -> None:
        """Bring every model up to the feed's latest snapshots."""
        snapshots = self._feed.read()
        runs = [snapshot["run"] for snapshot in snapshots]
        set_changed(self.select, "options", runs)
        set_changed(self.select, "visible", len(runs) > 1)
        if runs and self.select.value not in runs:
            self.select.value = runs[-1]
        set_changed(self.overview, "text", overview_html(snapshots, self.select.value))
        set_changed(self.overview, "visible", len(runs) != 1)
        for model in (self.summary, self.plots, self.tables):
            set_changed(model, "visible", bool(runs))
        if runs:
            snapshot = snapshots[runs.index(self.select.value)]
            for model, html in (
                (self.summary, summary_html), (self.decisions, decisions_html), (self.workers, workers_html),
            ):  # fmt: skip
                set_changed(model, "text", html(snapshot))
            for panel in (self.rewards, self.steps, self.time, self.lag, self.outcomes):
                panel.show(snapshot)

"""The Bokeh document behind ``/libra``, of the scheduler's dashboard and of `libra page`: figures, plots and tables of one run.

Invariants
----------
1. An update sends only what changed: new samples are streamed, everything else is replaced when it differs.
2. A document holds at most ``MAX_SAMPLES`` samples, and refers to no object of the scheduler except its feed.
3. Showing another run, or a new start of the same run, replaces every source.
"""

from __future__ import annotations

from typing import Any, Final

from bokeh.core.properties import without_property_validation
from bokeh.document import Document
from bokeh.layouts import column, row
from bokeh.models.widgets import Div, Select
from jinja2 import Environment

from libra.observe.html import render
from libra.observe.page_html import STYLESHEET, decisions_html, overview_html, summary_html, waves_html, workers_html
from libra.observe.page_panels import LagPanel, OutcomePanel, RewardPanel, StepPanel, TimePanels, set_changed
from libra.observe.snapshots import Feed, Snapshot

UPDATE_MS: Final = 500
GRID: Final = {
    "display": "grid", "gap": "8px", "margin-top": "8px",
    "grid-template-columns": "repeat(auto-fill, minmax(max(380px, 23%), 1fr))",
}  # fmt: skip
"""Three plots side by side at 1280 pixels, four at 2560."""
TABLES: Final = GRID | {
    "grid-template-columns": "repeat(auto-fit, minmax(min(100%, 760px), 1fr))",
    "align-items": "start",
}

CONTENT: Final = render("live.html")
"""The page below Dask's links; a template of Bokeh."""
ALONE: Final = (
    '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    '<link rel="icon" href="data:,"><title>{{ title }}</title>{{ bokeh_css }}{{ bokeh_js }}'
    f"<style>body {{ margin: 0; padding: 10px 14px; }}</style></head><body>{CONTENT}</body></html>"
)
"""The page of `libra page`, which has no links."""


def libra_document(feed: Feed, doc: Document) -> None:
    """Fill a document that Bokeh made for one visitor; Bokeh ends its periodic callback with the visitor's session."""
    page = LibraPage(feed)
    page.update()
    doc.add_root(page.root)
    doc.title, doc.template = "Libra", Environment().from_string(ALONE)
    doc.add_periodic_callback(page.update, UPDATE_MS)


def dashboard_document(feed: Feed, extra: dict[str, Any], doc: Document) -> None:
    """The same among the pages of Dask's dashboard; ``extra`` are the variables of its templates."""
    from distributed.dashboard.components.scheduler import env

    libra_document(feed, doc)
    doc.title = "Dask: Libra"
    doc.template = env.from_string(f'{{% extends "simple.html" %}}{{% block content %}}{CONTENT}{{% endblock %}}')
    doc.template_variables.update(extra)


class LibraPage:
    """Models of one visitor's page; ``root`` is the model to add to a document."""

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
        head = row(self.overview, self.select, sizing_mode="stretch_width")
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
            self._show(snapshots[runs.index(self.select.value)])

    def _show(self, snapshot: Snapshot) -> None:
        set_changed(self.summary, "text", summary_html(snapshot))
        set_changed(self.decisions, "text", waves_html(snapshot) + decisions_html(snapshot))
        set_changed(self.workers, "text", workers_html(snapshot))
        for panel in (self.rewards, self.steps, self.time, self.lag, self.outcomes):
            panel.show(snapshot)

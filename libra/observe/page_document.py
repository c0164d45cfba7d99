"""The Bokeh document behind ``/libra``: tiles, tables of workers, and ten plots of one run, which the viewer can choose.

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
from distributed.dashboard.components.scheduler import BOKEH_THEME, env

from libra.observe.page_html import STYLESHEET, overview_html, summary_html, workers_html
from libra.observe.page_panels import (
    BucketPanel,
    IterationPanel,
    LevelPanel,
    OutcomePanel,
    TimePanel,
    VersionPanel,
    WorkerTimePanel,
    set_changed,
)
from libra.observe.page_snapshot import Feed, Snapshot

UPDATE_MS: Final = 500


def libra_document(feed: Feed, extra: dict[str, Any], doc: Document) -> None:
    """Fill a document that Bokeh made for one visitor; Bokeh ends its periodic callback with the visitor's session."""
    page = LibraPage(feed)
    page.update()
    doc.title = "Dask: Libra"
    doc.add_root(page.root)
    doc.template = env.get_template("simple.html")
    doc.template_variables.update(extra)
    doc.theme = BOKEH_THEME
    doc.add_periodic_callback(page.update, UPDATE_MS)


class LibraPage:
    """Models of one visitor's page; ``root`` is the model to add to a document."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed
        self.overview, self.summary, self.workers = (
            Div(name=f"libra_{name}", stylesheets=[STYLESHEET], sizing_mode="stretch_width")
            for name in ("overview", "summary", "workers")
        )
        self.workers.visible = False
        self.select = Select(name="libra_run", title="Show", options=[], value="", visible=False, width=240)
        self.select.on_change("value", lambda _attr, _old, _new: self.update())
        self.levels, self.buckets, self.outcomes = LevelPanel(), BucketPanel(), OutcomePanel()
        self.time, self.iterations, self.versions = TimePanel(), IterationPanel(), VersionPanel()
        self.worker_time = WorkerTimePanel()
        lines = (
            (self.levels.plot, self.buckets.plot, self.outcomes.plot),
            (self.worker_time.plot, self.time.queue_plot, self.time.slot_plot),
            (self.time.token_plot, self.iterations.reward_plot, self.iterations.lag_plot, self.versions.plot),
        )
        self.plots = column(*(row(*line, sizing_mode="stretch_width") for line in lines), sizing_mode="stretch_width")
        head = row(self.overview, self.select, sizing_mode="stretch_width")
        self.root = column(head, self.summary, self.workers, self.plots, sizing_mode="stretch_width")

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
        for model in (self.summary, self.plots):
            set_changed(model, "visible", bool(runs))
        if not runs:
            set_changed(self.workers, "visible", False)
        else:
            self._show(snapshots[runs.index(self.select.value)])

    def _show(self, snapshot: Snapshot) -> None:
        set_changed(self.summary, "text", summary_html(snapshot))
        workers = workers_html(snapshot)
        set_changed(self.workers, "text", workers)
        set_changed(self.workers, "visible", bool(workers))
        for panel in (
            self.worker_time,
            self.time,
            self.levels,
            self.buckets,
            self.outcomes,
            self.versions,
            self.iterations,
        ):
            panel.show(snapshot)

"""The Bokeh document behind ``/libra``, in the scheduler's dashboard and in `libra page`.

HTML elements have ``data-libra`` attributes: the names of `libra.observe.page_snapshots.numbers`,
``share-<state>``, ``now-<state>``, ``waves``, ``wave-<number>``, ``worker-<worker>``,
``role-<worker>`` and ``not-ready-<worker>``.

1. An update sends only changes: it streams new samples and replaces everything else that differs.
2. A document holds at most ``MAX_SAMPLES`` samples, and of the scheduler only its feed.
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
from markupsafe import Markup

from libra.observe.html import STATE_COLORS, STYLESHEET, duration, number, percent, piece, render, table
from libra.observe.page_snapshots import BUSY_WINDOW_S, Feed, Snapshot, numbers
from libra.observe.panels import LagPanel, OutcomePanel, RewardPanel, StepPanel, TimePanels, set_changed
from libra.observe.timeline.steps import groups_text
from libra.untrusted import shown_line

Rows = Sequence[Mapping[str, Any]]

MAX_WORKERS: Final = 64
"""Lines in the table of workers."""
SETTLED: Final = ("resupplied", "lost", "failed")
"""Stages without a change under way."""
_TITLES: Final = {
    "reward": "Reward, training", "busy": "Busy", "evaluation": "Reward, held out", "iteration": "Iteration", "left": "To go",
    "step": "Last step", "tokens_per_s": "Tokens/s", "waiting": "Waiting", "lag": "Lag", "version": "Weights",
    "failures": "Failures", "groups": "Groups",
}  # fmt: skip
_TILES: Final = tuple(_TITLES)[2:-1]
_COUNTS: Final = ("tokens", "groups", "quanta_rollout", "quanta_tool", "policy")
_OVERVIEW: Final = ("busy", "iteration", "reward", "tokens_per_s", "groups", "version", "failures")


def summary_html(snapshot: Snapshot) -> str:
    """Head, where time went, and the tiles of one run."""
    figures, failures = numbers(snapshot), snapshot["failures"]
    return render(
        "summary.html",
        **{name: snapshot[name] for name in ("run", "epoch", "state", "time")}, uptime_s=snapshot["uptime_s"],
        note=snapshot.get("note", ""), figures=figures, TITLES=_TITLES, TILES=_TILES, COUNTS=_COUNTS,
        bad=any(count for name, count in failures.items() if name not in ("none", "policy")), BUSY_WINDOW_S=BUSY_WINDOW_S,
    )  # fmt: skip


def overview_html(snapshots: Sequence[Snapshot], chosen: str) -> str:
    """A table with one line per run, empty for a single run; ``chosen`` is the run drawn below it."""
    figures = [(snapshot, numbers(snapshot)) for snapshot in snapshots]
    rows = [
        (each["run"], *(shown[name][0] for name in _OVERVIEW), duration(each["uptime_s"])) for each, shown in figures
    ]
    head, names = (
        ("Run", *(_TITLES[name] for name in _OVERVIEW), "Up"),
        [("", "shown" * (each["run"] == chosen)) for each in snapshots],
    )
    return render("overview.html", runs=rows, head=head, names=names)


def decisions_html(snapshot: Snapshot) -> str:
    """The last decisions in words."""
    rows = [(duration(t_s), what, why) for t_s, what, why in snapshot["decisions"]]
    if not rows:
        return piece("card", "Last decisions", "Waits for the first trajectory.", "")
    what = "What planner, roles, limits and policy decided last, and why; the newest first."
    return _card("Last decisions", what, ("At", "Decision", "Because"), rows)


def waves_html(snapshot: Snapshot) -> str:
    """The waves of the open step, or of the last one; nothing where steps are not streamed."""
    step = snapshot.get("waves")
    if step is None:
        return ""
    rows = [
        (
            row["wave"], groups_text(row["groups"], row["others"]),
            "in training" if row["train_s"] is None else number(row["train_s"], ",.2f", " s"), row["hybrids"],
        )
        for row in step["waves"]
    ] or [("–",) * 4]  # fmt: skip
    head = ("Wave", "Groups", "Trained in", "Engines that had turned")
    what = piece("figure", "waves", "", waves_text(step))
    return _card(f"Waves of step {step['step']}", what, head, rows, [(f"wave-{row[0]}", "") for row in rows])


def waves_text(step: Mapping[str, Any]) -> str:
    """Progress of a streamed step."""
    in_wave = f", {step['in_wave']:,} in training now" if step["in_wave"] else ""
    missing = "" if step["taken"] else f", {step['missing']:,} in no wave yet"
    trained = f"{step['trained']:,} of {step['groups']:,} groups are trained{in_wave}{missing}"
    return f"{trained}; the step was taken." if step["taken"] else f"{trained}."


def workers_html(snapshot: Mapping[str, Any]) -> str:
    """Tables of workers, of buckets of engines, of role changes, and of workers that are not used
    yet."""
    tables = (
        _workers(snapshot), _buckets(snapshot.get("buckets") or ()), _roles(snapshot.get("roles") or ()),
        _not_ready(snapshot.get("not_ready") or ()),
    )  # fmt: skip
    return Markup().join(tables)


def _workers(snapshot: Mapping[str, Any]) -> Markup:
    found = [row for row in (snapshot.get("time") or {"workers": ()})["workers"] if row["seconds"]]
    served = (snapshot.get("versions") or {"served": {}})["served"]
    rows, running = [], snapshot.get("state") == "running"
    for row in found[:MAX_WORKERS]:
        total, state, slots = sum(row["seconds"].values()), row.get("state", ""), row.get("slots_used_frac")
        shares = {state: seconds / total for state, seconds in row["seconds"].items()} if total else {}
        now = (piece("swatch", STATE_COLORS[state], state) if state else "has left") if running else ""
        rows.append(
            (
                shown_line(row["worker"], 60), {"trainer": "training"}.get(row["kind"], row["kind"]), now,
                percent(row["busy_frac"], 0), piece("bar", shares, "bar slim"), "" if slots is None else percent(slots, 0),
                f"v{served[row['worker']]}" if row["worker"] in served else "",
            )
        )  # fmt: skip
    more = f" The first {MAX_WORKERS} of {len(found)}." if len(found) > MAX_WORKERS else ""
    what = f"Each worker: what it does now, and its share of time by state (colours as above; hover to read).{more}"
    head = ("Worker", "Kind", "Now", "Busy", "Time by state since the start", "Slots used", "Weights")
    return _card("Workers", what, head, rows, [(f"worker-{row['worker']}", "") for row in found])


def _buckets(found: Rows) -> Markup:
    if sum(row["bucket"] is not None for row in found) < 2:
        return Markup()
    rows = [
        (
            "no home yet" if row["bucket"] is None else row["bucket"] or "all engines", row["engines"],
            f"{row['used']:,} of {row['slots']:,}", f"{row['waiting']:,}", f"{row['at_home']:,}", f"{row['left_tokens']:,.0f}",
        )
        for row in found
    ]  # fmt: skip
    what = (
        "Waiting and running trajectories by capacity class of their engines; a trajectory's home holds its KV cache."
    )
    head = ("Bucket", "Engines", "Slots used", "Waiting", "At home", "Forecast: tokens left")
    return _card("Buckets of engines", what, head, rows, [(f"bucket-{row[0]}", "") for row in rows])


def _roles(found: Rows) -> Markup:
    rows = [
        (
            row["worker"], _has(row["role"], row["tp"]), row["stage"], _for(row.get("for_s")), _under_way(row),
            row["generation"], number(row.get("seconds"), ",.2f", " s"), row.get("reason") or "",
        )
        for row in found
    ]  # fmt: skip
    marks = {"lost": "bad", "failed": "bad", "resupplied": ""}
    names = [(f"role-{row['worker']}", marks.get(row["stage"], "shown")) for row in found]
    head = ("Worker", "Role", "Stage", "For", "Under way", "Generation", "Last change took", "Reason")
    what = "Role, and the stage of a change under way."
    return _card("Workers that can change roles", what, head, rows, names)


def _not_ready(found: Rows) -> Markup:
    rows = [
        (
            row["worker"], row["stage"], _for(row.get("for_s")), row.get("detail") or "",
            "" if row.get("again_in_s") is None else f"in {duration(row['again_in_s'])}",
        )
        for row in found
    ]  # fmt: skip
    names = [(f"not-ready-{row['worker']}", "bad" if row["stage"] == "failed" else "") for row in found]
    head = ("Worker", "Not ready", "For", "What failed", "Next attempt")
    return _card("Workers not used by the run", "Their setup is running, or failed.", head, rows, names)


def _under_way(row: Mapping[str, Any]) -> str:
    if row["stage"] in SETTLED:
        return ""
    before, after = _has(row["from_role"], row["from_tp"]), _has(row["role"], row["tp"])
    return f"{before} → {after}" if before != after else f"back to {after}"


def _has(role: str, tp: int) -> str:
    return f"{role} TP {tp}" if role == "rollout" else role


def _for(seconds: float | None) -> str:
    return "–" if number(seconds) == "–" else duration(float(seconds or 0.0))


def _card(
    title: str, what: str, head: Sequence[str], rows: Sequence[Sequence[object]], names: Sequence[tuple[str, str]] = ()
) -> Markup:
    return piece("card", title, what, table(head, rows, (), names)) if rows else Markup()


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
    """Fill the document of one visitor; Bokeh ends its periodic callback with the session."""
    page = LibraPage(feed)
    page.update()
    doc.add_root(page.root)
    doc.title, doc.template = "Libra", Environment().from_string(ALONE)
    doc.add_periodic_callback(page.update, UPDATE_MS)


def dashboard_document(feed: Feed, extra: dict[str, Any], doc: Document) -> None:
    """The same page in Dask's dashboard; ``extra`` are the variables of its templates."""
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
            self._show(snapshots[runs.index(self.select.value)])

    def _show(self, snapshot: Snapshot) -> None:
        set_changed(self.summary, "text", summary_html(snapshot))
        set_changed(self.decisions, "text", waves_html(snapshot) + decisions_html(snapshot))
        set_changed(self.workers, "text", workers_html(snapshot))
        for panel in (self.rewards, self.steps, self.time, self.lag, self.outcomes):
            panel.show(snapshot)

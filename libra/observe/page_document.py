"""The Bokeh document behind ``/libra``: a row of numbers, what single workers do, and nine drawings of one run, chosen where
there are several.

Invariants
----------
1. An update sends only what changed: new samples are streamed, everything else is replaced when it differs.
2. A document holds at most ``MAX_SAMPLES`` samples, and refers to nothing of the scheduler but its feed.
3. Showing another run, or a new start of the same run, replaces every source.
"""

from __future__ import annotations

from typing import Any, Final

from bokeh.core.properties import without_property_validation
from bokeh.document import Document
from bokeh.layouts import column, row
from bokeh.models import ColumnDataSource, HoverTool, NumeralTickFormatter, Range1d
from bokeh.models.annotations import Span
from bokeh.models.widgets import Div, Select
from bokeh.plotting import figure
from bokeh.transform import dodge
from distributed.dashboard.components.scheduler import BOKEH_THEME, env

from libra.observe.page import STYLESHEET, Feed, Snapshot, overview_html, summary_html
from libra.observe.page_workers import workers_html
from libra.observe.task_stream import PHASE_COLORS
from libra.types import Phase

UPDATE_MS: Final = 500
MAX_SAMPLES: Final = 1200
RATE_SAMPLES: Final = 6
"""Samples (of 0.5 s) that one point of the tokens/s curve looks back."""

_ROLLOUT, _TOOL = PHASE_COLORS[Phase.ROLLOUT], PHASE_COLORS[Phase.TOOL]
_CURRENT, _BEHIND = "#2a9d6f", "#e9c46a"
_SAMPLE_COLUMNS: Final = ("t_s", "queued_rollout", "queued_tool", "used_rollout", "used_tool", "tokens_per_s")


_BUCKET_COLUMNS: Final = ("bucket", "engines", "used", "slots", "at_home", "waiting", "left_tokens")
_OUTCOME_COLUMNS: Final = ("first", "half", "tokens")
NO_BUCKET, ONE_BUCKET = "no home yet", "all engines"
"""Shown for trajectories that have generated nothing yet, and for the only bucket of workers that name none."""


NO_NUMBER: Final = float("nan")
"""One object, so that lists which hold it compare as equal; Bokeh leaves a gap there."""
CARD: Final[dict[str, Any]] = {"background": "#fff", "border": "1px solid #e0e4e7", "border-radius": "6px"}


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


def sample_columns(history: list[Any], start: int = 0) -> dict[str, Any]:
    """Samples from index ``start`` on as columns, with tokens/s over the ``RATE_SAMPLES`` before each."""
    columns: dict[str, list[float]] = {name: [] for name in _SAMPLE_COLUMNS}
    for index in range(start, len(history)):
        sample, before = history[index], history[max(0, index - RATE_SAMPLES)]
        elapsed_s = sample[0] - before[0]
        rate = (sample[5] - before[5]) / elapsed_s if elapsed_s > 0 else 0.0
        for name, value in zip(_SAMPLE_COLUMNS, (*sample[:5], rate), strict=True):
            columns[name].append(value)
    return columns


class LibraPage:
    """Models of one visitor's page; ``root`` is the model to add to a document."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed
        self._shown: tuple[str, int] | None = None  # run and epoch the sources hold
        self._last_sample_s = float("-inf")
        self.overview = Div(name="libra_overview", stylesheets=[STYLESHEET], sizing_mode="stretch_width")
        self.summary = Div(name="libra_summary", stylesheets=[STYLESHEET], sizing_mode="stretch_width")
        self.workers = Div(name="libra_workers", stylesheets=[STYLESHEET], sizing_mode="stretch_width", visible=False)
        self.select = Select(name="libra_run", title="Show", options=[], value="", visible=False, width=240)
        self.select.on_change("value", lambda _attr, _old, _new: self.update())
        self.samples = ColumnDataSource({name: [] for name in _SAMPLE_COLUMNS}, name="libra_samples")
        self.levels = ColumnDataSource({"level": [], "ROLLOUT": [], "TOOL": []}, name="libra_levels")
        self.served = ColumnDataSource({"version": [], "workers": [], "names": [], "color": []}, name="libra_served")
        self.rewards = ColumnDataSource({"iteration": [], "reward": []}, name="libra_rewards")
        self.lag = ColumnDataSource({"iteration": [], "lag": []}, name="libra_lag")
        self.buckets = ColumnDataSource({name: [] for name in _BUCKET_COLUMNS}, name="libra_buckets")
        self.outcomes = ColumnDataSource({name: [] for name in _OUTCOME_COLUMNS}, name="libra_outcomes")
        self._build_live()
        self._build_policy()
        self._build_iterations()
        self.plots = column(
            row(self.level_plot, self.bucket_plot, self.outcome_plot, sizing_mode="stretch_width"),
            row(self.queue_plot, self.slot_plot, sizing_mode="stretch_width"),
            row(self.token_plot, self.reward_plot, self.lag_plot, self.version_plot, sizing_mode="stretch_width"),
            sizing_mode="stretch_width",
        )
        head = row(self.overview, self.select, sizing_mode="stretch_width")
        self.root = column(head, self.summary, self.workers, self.plots, sizing_mode="stretch_width")

    def _build_live(self) -> None:
        """Drawings against time: what waits, what runs, what comes out."""
        self.level_plot = _figure("Waiting now, by level", "C-MLFQ level", "trajectories", x_range=[])
        for phase, offset, color in ((Phase.ROLLOUT, -0.19, _ROLLOUT), (Phase.TOOL, 0.19, _TOOL)):
            bars = self.level_plot.vbar(
                dodge("level", offset, range=self.level_plot.x_range), top=str(phase), width=0.34, source=self.levels,
                fill_color=color, line_color=None, legend_label=f"for {phase}",
            )  # fmt: skip
            tips = [("level", "@level"), (f"waiting for {phase}", f"@{phase}{{0,0}}")]
            self.level_plot.add_tools(HoverTool(renderers=[bars], tooltips=tips))
        self.queue_plot = _figure("Waiting", "seconds since the start", "trajectories")
        self._curves(self.queue_plot, "queued")
        self.slot_plot = _figure("Slots in use", "seconds since the start", "slots", x_range=self.queue_plot.x_range)
        self._curves(self.slot_plot, "used")
        self.capacity = {}
        for phase, color in PHASE_COLORS.items():
            span = Span(location=0, dimension="width", line_color=color, line_dash="dashed", line_alpha=0.7)
            self.slot_plot.add_layout(span)
            self.capacity[phase] = span
        self.token_plot = _figure(
            "Tokens generated per second", "seconds since the start", "tokens/s", x_range=self.queue_plot.x_range
        )
        curve = self.token_plot.line("t_s", "tokens_per_s", source=self.samples, color="#5e548e", line_width=2)
        self.token_plot.varea("t_s", 0, "tokens_per_s", source=self.samples, color="#5e548e", alpha=0.12)
        tips = [("time", "@t_s{0.0} s"), ("tokens/s", "@tokens_per_s{0,0}")]
        self.token_plot.add_tools(HoverTool(renderers=[curve], tooltips=tips, mode="vline"))
        for plot in (self.level_plot, self.queue_plot, self.slot_plot, self.token_plot):
            plot.y_range.start = 0
        for plot in (self.level_plot, self.queue_plot, self.slot_plot):
            _quiet_legend(plot.legend)
            plot.yaxis.ticker.min_interval = 1

    def _build_policy(self) -> None:
        """Where trajectories wait and run, and what forecasts were worth."""
        self.bucket_plot = _figure("Waiting and running now, by bucket", "bucket", "trajectories", x_range=[])
        for name, offset, color, label in (
            ("waiting", -0.27, _BEHIND, "waiting"), ("used", 0.0, _ROLLOUT, "slots taken"), ("slots", 0.27, "#c9d1d6", "slots"),
        ):  # fmt: skip
            self.bucket_plot.vbar(
                dodge("bucket", offset, range=self.bucket_plot.x_range), top=name, width=0.25, source=self.buckets,
                fill_color=color, line_color=None, legend_label=label,
            )  # fmt: skip
        tips = [
            ("bucket", "@bucket"),
            ("engines", "@engines"),
            ("waiting", "@waiting{0,0}"),
            ("slots", "@used of @slots"),
        ]
        tips += [("at home", "@at_home{0,0}"), ("believed left, mean tokens", "@left_tokens{0,0}")]
        self.bucket_plot.add_tools(HoverTool(tooltips=tips))
        self.bucket_plot.y_range.start = 0
        _quiet_legend(self.bucket_plot.legend)
        self.outcome_plot = _figure(
            "Forecast against outcome", "tokens in the end", "tokens believed", x_axis_type="log", y_axis_type="log"
        )
        self.outcome_plot.line([1, 1e7], [1, 1e7], color="#b0bec5", line_dash="dashed")
        for name, color, label in (("first", "#b0bec5", "at first"), ("half", _ROLLOUT, "half way")):
            dots = self.outcome_plot.scatter(
                "tokens", name, source=self.outcomes, color=color, size=5, alpha=0.7, legend_label=label
            )
            tips = [("in the end", "@tokens{0,0}"), ("at first", "@first{0,0}"), ("half way", "@half{0,0}")]
            self.outcome_plot.add_tools(HoverTool(renderers=[dots], tooltips=tips))
        for side in (self.outcome_plot.x_range, self.outcome_plot.y_range):
            side.start, side.end = 1, 10
        self.outcome_plot.xaxis.formatter = NumeralTickFormatter(format="0,0")
        _quiet_legend(self.outcome_plot.legend)
        self.outcome_plot.legend.location = "bottom_right"

    def _curves(self, plot: Any, what: str) -> None:
        """One step curve per phase of the columns ``<what>_rollout`` and ``<what>_tool``."""
        for phase, color in PHASE_COLORS.items():
            name = f"{what}_{phase.lower()}"
            curve = plot.step(
                "t_s", name, source=self.samples, color=color, line_width=2, mode="after", legend_label=str(phase)
            )
            if phase is Phase.ROLLOUT:
                tips = [
                    ("time", "@t_s{0.0} s"),
                    ("ROLLOUT", f"@{what}_rollout{{0,0}}"),
                    ("TOOL", f"@{what}_tool{{0,0}}"),
                ]
                plot.add_tools(HoverTool(renderers=[curve], tooltips=tips, mode="vline"))

    def _build_iterations(self) -> None:
        """Drawings against the iteration, and the versions that workers serve."""
        self.reward_plot = _figure("Mean reward of each iteration", "iteration", "reward")
        self.reward_plot.line("iteration", "reward", source=self.rewards, color=_CURRENT, line_width=2)
        dots = self.reward_plot.scatter("iteration", "reward", source=self.rewards, color=_CURRENT, size=6)
        tips = [("iteration", "@iteration"), ("mean reward", "@reward{0.000}")]
        self.reward_plot.add_tools(HoverTool(renderers=[dots], tooltips=tips))
        self.lag_plot = _figure(
            "Mean lag at consumption", "iteration", "versions behind", y_range=Range1d(start=0, end=1)
        )
        bars = self.lag_plot.vbar("iteration", top="lag", width=0.7, source=self.lag, color="#8d99ae")
        self.lag_plot.add_tools(
            HoverTool(renderers=[bars], tooltips=[("iteration", "@iteration"), ("lag", "@lag{0.00}")])
        )
        self.bound = Span(location=0, dimension="width", line_color="#c62828", line_dash="dashed")
        self.lag_plot.add_layout(self.bound)
        self.version_plot = _figure("Weights served", "version", "workers", x_range=[])
        bars = self.version_plot.vbar(
            "version", top="workers", width=0.6, source=self.served, fill_color="color", line_color=None
        )
        self.version_plot.y_range.start = 0
        self.version_plot.yaxis.ticker.min_interval = 1
        for plot in (self.reward_plot, self.lag_plot):
            plot.xaxis.ticker.min_interval = 1
        tips = [("version", "@version"), ("workers", "@workers"), ("names", "@names")]
        self.version_plot.add_tools(HoverTool(renderers=[bars], tooltips=tips))

    @without_property_validation  # type: ignore[untyped-decorator]
    def update(self) -> None:
        """Bring every model up to the feed's latest snapshots."""
        snapshots = self._feed.read()
        runs = [snapshot["run"] for snapshot in snapshots]
        _set(self.select, "options", runs)
        _set(self.select, "visible", len(runs) > 1)
        if runs and self.select.value not in runs:
            self.select.value = runs[-1]
        _set(self.overview, "text", overview_html(snapshots, self.select.value))
        _set(self.overview, "visible", len(runs) != 1)
        for model in (self.summary, self.plots):
            _set(model, "visible", bool(runs))
        if not runs:
            _set(self.workers, "visible", False)
        else:
            self._show(snapshots[runs.index(self.select.value)])

    def _show(self, snapshot: Snapshot) -> None:
        _set(self.summary, "text", summary_html(snapshot))
        workers = workers_html(snapshot)
        _set(self.workers, "text", workers)
        _set(self.workers, "visible", bool(workers))
        self._show_samples(snapshot)
        self._show_queue(snapshot["queue"])
        self._show_buckets(snapshot["buckets"])
        self._show_outcomes(snapshot["policy"])
        self._show_slots(snapshot["slots"])
        self._show_versions(snapshot["versions"])
        self._show_iterations(snapshot)

    def _show_samples(self, snapshot: Snapshot) -> None:
        history = list(snapshot["history"])
        shown = (snapshot["run"], snapshot["epoch"])
        if shown != self._shown:
            self._shown = shown
            self.samples.data = sample_columns(history)
        else:
            first_new = len(history)
            while first_new and history[first_new - 1][0] > self._last_sample_s:
                first_new -= 1
            if first_new < len(history):
                self.samples.stream(sample_columns(history, first_new), MAX_SAMPLES)
        self._last_sample_s = history[-1][0] if history else float("-inf")

    def _show_queue(self, queue: dict[str, dict[int, int]]) -> None:
        numbers = sorted({0}.union(*(map(int, by_level) for by_level in queue.values())))
        waiting = {
            str(phase): [{int(k): v for k, v in queue.get(phase, {}).items()}.get(level, 0) for level in numbers]
            for phase in Phase
        }
        names = [str(level) for level in numbers]
        _set(self.level_plot.x_range, "factors", names)
        _set(self.levels, "data", {"level": names, **waiting})
        _set(self.level_plot.y_range, "end", 1.15 * max(1, *waiting["ROLLOUT"], *waiting["TOOL"]))
        total = {phase: sum(counts) for phase, counts in waiting.items()}
        _set(self.queue_plot.title, "text", f"Waiting: {total['ROLLOUT']:,} for ROLLOUT, {total['TOOL']:,} for TOOL")

    def _show_buckets(self, buckets: list[dict[str, Any]]) -> None:
        names = [NO_BUCKET if line["bucket"] is None else line["bucket"] or ONE_BUCKET for line in buckets]
        columns = {name: [line[name] for line in buckets] for name in _BUCKET_COLUMNS[1:]}
        _set(self.bucket_plot.x_range, "factors", names)
        _set(self.buckets, "data", {"bucket": names, **columns})
        _set(self.bucket_plot.y_range, "end", 1.15 * max([1, *columns["waiting"], *columns["slots"]]))

    def _show_outcomes(self, policy: dict[str, Any]) -> None:
        # A logarithmic axis has no place for 0: nothing was believed then, and nothing is drawn.
        lines = [line for line in policy["outcomes"] if min(line) > 0]
        _set(self.outcomes, "data", {n: [line[i] for line in lines] for i, n in enumerate(_OUTCOME_COLUMNS)})
        low, high = (f((side for line in lines for side in line), default=d) for f, d in ((min, 1), (max, 10)))
        for side in (self.outcome_plot.x_range, self.outcome_plot.y_range):
            _set(side, "start", low / 1.5)
            _set(side, "end", high * 1.5)
        skill = "" if policy["skill"] is None else f", skill {policy['skill']:.2f}"
        _set(self.outcome_plot.title, "text", f"Forecast against outcome, the latest {len(lines)}{skill}")

    def _show_slots(self, slots: dict[str, dict[str, int]]) -> None:
        for phase, span in self.capacity.items():
            _set(span, "location", slots[phase]["total"])
        text = ", ".join(f"{phase} {slots[phase]['used']:,} of {slots[phase]['total']:,}" for phase in Phase)
        _set(self.slot_plot.title, "text", f"Slots in use: {text}")
        _set(self.slot_plot.y_range, "end", 1.1 * max(1, *(part[side] for part in slots.values() for side in part)))

    def _show_versions(self, versions: dict[str, Any]) -> None:
        published, served = versions["published"], versions["served"]
        by_version: dict[int, list[str]] = {published: []}
        for worker, version in sorted(served.items()):
            by_version.setdefault(version, []).append(str(worker))
        ordered = sorted(by_version)[-8:]
        _set(self.version_plot.x_range, "factors", [f"v{version}" for version in ordered])
        data: dict[str, list[Any]] = {
            "version": [f"v{version}" for version in ordered],
            "workers": [len(by_version[version]) for version in ordered],
            "names": [", ".join(by_version[version][:20]) for version in ordered],
            "color": [_CURRENT if version == published else _BEHIND for version in ordered],
        }
        _set(self.served, "data", data)
        _set(self.version_plot.y_range, "end", 1.15 * max(1, *data["workers"]))
        _set(self.version_plot.title, "text", f"Weights served, v{published} published")

    def _show_iterations(self, snapshot: Snapshot) -> None:
        for source, name, pairs in ((self.rewards, "reward", snapshot["rewards"]), (self.lag, "lag", snapshot["lag"])):
            means = [NO_NUMBER if mean is None or mean != mean else float(mean) for _, mean in pairs]
            _set(source, "data", {"iteration": [int(k) for k, _ in pairs], name: means})
        eta, lags = snapshot["eta"], list(self.lag.data["lag"])
        _set(self.bound, "location", eta)
        _set(self.lag_plot.y_range, "end", 1.15 * max([1.0, eta, *(lag for lag in lags if lag == lag)]))
        _set(self.lag_plot.title, "text", f"Mean lag (bound {eta})")


def _figure(title: str, x_label: str, y_label: str, **options: Any) -> Any:
    """An empty drawing in the page's style."""
    plot: Any = figure(
        title=title, x_axis_label=x_label, y_axis_label=y_label, height=228, sizing_mode="stretch_width", tools="",
        toolbar_location=None, outline_line_color=None, margin=3, styles=CARD, **options,
    )  # fmt: skip
    plot.title.text_color, plot.title.text_font_size = "#37474f", "13px"
    plot.grid.grid_line_color = "#eceff1"
    plot.xgrid.visible = False
    plot.axis.axis_label_text_font_style, plot.axis.axis_label_text_font_size = "normal", "11px"
    plot.axis.axis_line_color = plot.axis.minor_tick_line_color = None
    plot.yaxis.formatter = NumeralTickFormatter(format="0,0.[00]")
    return plot


def _quiet_legend(legend: Any) -> None:
    """Make a legend small and see-through, since curves run under it; a click on an entry mutes its curve."""
    legend.orientation, legend.location, legend.click_policy = "horizontal", "top_right", "mute"
    legend.label_text_font_size, legend.glyph_height, legend.glyph_width = "10px", 10, 14
    legend.background_fill_alpha, legend.border_line_color = 0.7, None
    legend.padding, legend.margin, legend.spacing, legend.label_standoff = 2, 2, 8, 4


def _set(model: Any, name: str, value: Any) -> None:
    """Set a property where it differs, so that nothing travels for a page at rest."""
    if getattr(model, name) != value:
        setattr(model, name, value)

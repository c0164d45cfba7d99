"""Plots of page and report, and panels of the page: plot, title and one line of text.

1. A panel without data draws no plot; its line names the missing data.
2. Legends are above the curves. The browser colours texts and grids (``templates/scheme.js``).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

from bokeh.layouts import column
from bokeh.models import AdaptiveTicker, ColumnDataSource, FixedTicker, HoverTool, NumeralTickFormatter, Range1d
from bokeh.models.annotations import Legend, LegendItem, Span
from bokeh.models.widgets import Div
from bokeh.plotting import figure

from libra.observe.html import STATE_COLORS, STYLESHEET, percent, piece
from libra.observe.page_snapshots import Snapshot
from libra.observe.timeline.timeline import BANDS, MAX_SAMPLES
from libra.types import Phase
from libra.untrusted import shown_line

RUN_COLORS: Final = ("#3f7fc4", "#e08214", "#2a9d6f", "#b85c8a", "#7b68b5", "#8d7b4f")
PHASE_COLORS: Final[Mapping[str, str]] = {"ROLLOUT": "#3f7fc4", "TOOL": "#e08214"}


def plain(name: object) -> str:
    """An external name as plot text: one line without markup characters."""
    return shown_line(str(name), 60).translate(str.maketrans("<>&", "‹›+"))


def plot(title: str, x_label: str, y_label: str, *, height: int = 270, **options: Any) -> Any:
    """An empty plot with its legend above."""
    made: Any = figure(
        title=title, x_axis_label=x_label, y_axis_label=y_label, height=height, sizing_mode="stretch_width",
        tools="xpan,xwheel_zoom,box_zoom,reset,save", active_scroll=None, toolbar_location="right", output_backend="canvas",
        background_fill_color=None, border_fill_color=None, outline_line_color=None, **options,
    )  # fmt: skip
    made.toolbar.logo, made.toolbar.autohide = None, True
    made.xgrid.visible = False
    made.title.visible = bool(title)
    made.title.text_font_size, made.title.text_font_style = "13px", "normal"
    made.axis.axis_label_text_font_style = "normal"
    made.axis.minor_tick_line_color = None
    made.add_layout(Legend(orientation="horizontal", click_policy="hide", border_line_color=None), "above")
    made.legend.background_fill_color = None
    made.legend.ncols = 3
    made.legend.label_text_font_size, made.legend.padding, made.legend.spacing = "11px", 2, 10
    return made


def log_ticks(low: float, high: float) -> list[float]:
    """Ticks of a 300-pixel logarithmic axis; the longer the axis, the fewer ticks per decade."""
    decades = math.log10(high / low)
    steps = (1, 2, 3, 5, 7) if decades <= 1 else (1, 2, 5) if decades <= 2 else (1,)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [step * 10.0**power for power in powers for step in steps if low <= step * 10.0**power <= high]


def curve(
    made: Any, x: Sequence[float], y: Sequence[float], label: str, color: str, *, dash: str = "solid", dots: bool = True
) -> None:
    """A curve with dots, and a tooltip with its name; a single value is a dot."""
    source = ColumnDataSource({"x": list(x), "y": list(y)})
    if len(x) > 1:
        made.line("x", "y", source=source, color=color, line_width=2, line_dash=dash, legend_label=label)
    if dots or len(x) == 1:
        drawn = made.scatter("x", "y", source=source, color=color, size=6, legend_label=label)
        tips = [("", label), (made.xaxis[0].axis_label, "@x{0,0.[00]}"), (made.yaxis[0].axis_label, "@y{0,0.[0000]}")]
        made.add_tools(HoverTool(renderers=[drawn], tooltips=tips))


def spans(made: Any, rows: Sequence[tuple[str, float, float, str, str]], tips: Sequence[tuple[str, str]] = ()) -> None:
    """Horizontal bars (row name, start, stop, colour, tooltip), without legend."""
    names = ("row", "start", "stop", "color", "what")
    source = ColumnDataSource({name: list(column) for name, column in zip(names, zip(*rows, strict=True), strict=True)})
    drawn = made.hbar("row", left="start", right="stop", height=0.8, source=source, color="color", line_color=None)
    shown = [("", "@row"), ("", "@what"), ("from", "@start{0,0.00} s"), ("to", "@stop{0,0.00} s"), *tips]
    made.add_tools(HoverTool(renderers=[drawn], tooltips=shown))


def legend_only(made: Any, entries: Sequence[tuple[str, str]]) -> None:
    """Legend entries (label, colour) for bars drawn from one source."""
    first = made.y_range.factors[0]
    items = []
    for label, color in entries:
        glyph = made.hbar([first], left=[0], right=[0], height=0.1, color=color, line_color=None)
        items.append(LegendItem(label=label, renderers=[glyph]))
    made.legend[0].items.extend(items)


RATE_S: Final = 3.0
"""Look-back seconds of a point on the tokens/s curve, at least to the previous row."""
NO_NUMBER: Final = float("nan")
"""A shared NaN object, so that lists with it compare as equal; Bokeh draws a gap."""
CARD: Final[dict[str, Any]] = {
    "background": "var(--card)", "border": "1px solid var(--line)", "border-radius": "8px", "padding": "8px 12px",
    "min-width": "0", "align-self": "start", "box-sizing": "border-box",
}  # fmt: skip

_TRAINING, _HELD_OUT, _TOKENS, _SOFT = "#3f7fc4", "#2a9d6f", "#7b68b5", "#8fa1ab"
_BAND_COLORS: Final = ("#8e2430", "#3f7fc4", "#6f9fd4", "#e0b44f", "#c3ccd1")
_BAND_COLUMNS: Final = tuple(f"band_{number}" for number in range(len(BANDS)))
_SAMPLE_COLUMNS: Final = (
    "t_s", "queued_rollout", "queued_tool", "used_rollout", "used_tool", "tokens_per_s", *_BAND_COLUMNS,
)  # fmt: skip
_STEP_STATES: Final = (
    "trajectories", "grading", "batch", "training", "moving", "evaluation", "lost", "starting", "nothing",
)  # fmt: skip
_OUTCOME_COLUMNS: Final = ("first", "half", "tokens")


class Panel:
    """A card: title, line of text, plot, and source of the curves."""

    def __init__(self, title: str, what: str, waits: str, drawn: Any) -> None:
        self.title, self.what, self.waits, self.plot = title, what, waits, drawn
        self.head = Div(stylesheets=[STYLESHEET], sizing_mode="stretch_width", margin=0)
        self.card = column(self.head, drawn, sizing_mode="stretch_width", styles=CARD)

    def has_data(self, there: bool, note: str = "", *, instead: str = "") -> None:
        """Draw the plot, with ``note`` after its line, or show ``instead`` (default: the missing data)."""
        set_changed(self.plot, "visible", there)
        line = f"{self.what} {note}".strip() if there else instead or f"Waits for {self.waits}."
        set_changed(self.head, "text", str(piece("panel", self.title, line)))


class RewardPanel(Panel):
    """Mean reward of training and held-out questions."""

    def __init__(self) -> None:
        self.rewards = _source("libra_rewards", "iteration", "reward")
        self.evaluations = _source("libra_evaluations", "version", "reward")
        made = plot("", "iteration (held out: weights version)", "mean reward", height=230)
        _dotted(made, self.rewards, "training", _TRAINING)
        _dotted(made, self.evaluations, "held out", _HELD_OUT, "dashed")
        what = "Mean reward of each iteration, and of the held-out questions: is it learning?"
        super().__init__("Reward", what, "the end of the first iteration", made)

    def show(self, snapshot: Snapshot) -> None:
        means = [*_set_means(self.rewards, snapshot["rewards"]), *_set_means(self.evaluations, snapshot["evaluations"])]
        self.has_data(bool(means))


class StepPanel(Panel):
    """Seconds of each step by state of the training worker."""

    def __init__(self) -> None:
        self.source = _source("libra_steps", "step", *_STEP_STATES)
        made = plot("", "step", "seconds", height=230)
        bars = made.vbar_stack(
            list(_STEP_STATES), x="step", width=0.8, source=self.source, line_color=None, legend_label=list(_STEP_STATES),
            color=[STATE_COLORS[state] for state in _STEP_STATES],
        )  # fmt: skip
        for state, drawn in zip(_STEP_STATES, bars, strict=True):
            _hover(made, [("step", "@step"), (state, f"@{state}{{0.00}} s")], drawn)
        made.y_range.start = 0
        made.xaxis.ticker.min_interval = 1
        what = "Seconds from one weights version to the next, by what training did or waited for: where to save time."
        super().__init__("Step time", what, "the first step", made)

    def show(self, snapshot: Snapshot) -> None:
        steps = snapshot["steps"]
        columns = {state: [split.get(state, 0.0) for _, split in steps] for state in _STEP_STATES}
        set_changed(self.source, "data", {"step": [int(step) for step, _ in steps], **columns})
        for item in self.plot.legend[0].items:
            set_changed(item, "visible", any(columns[item.label.value]))
        self.has_data(bool(steps))


class TimePanels:
    """Tokens per second, waiting trajectories and used slots: three panels over one source."""

    def __init__(self) -> None:
        self._shown: tuple[Any, ...] | None = None  # run, start and spacing of the source's rows
        self._last_sample_s = float("-inf")
        self.samples = _source("libra_samples", *_SAMPLE_COLUMNS)
        at, source = ("at", "@t_s{00:00:00}"), self.samples
        made = _over_time("tokens/s")
        curve = made.line("t_s", "tokens_per_s", source=source, color=_TOKENS, line_width=2)
        made.varea("t_s", 0, "tokens_per_s", source=source, color=_TOKENS, alpha=0.15)
        _hover(made, [at, ("tokens/s", "@tokens_per_s{0,0}")], curve, mode="vline")
        what = f"Generated by all engines, over the {RATE_S:.0f} s before."
        self.tokens = Panel("Tokens per second", what, "generated tokens", made)
        made = _over_time("trajectories", x_range=self.tokens.plot.x_range)
        made.varea_stack(
            list(_BAND_COLUMNS), x="t_s", source=source, color=list(_BAND_COLORS), legend_label=list(BANDS), alpha=0.85
        )
        tools = {"color": PHASE_COLORS["TOOL"], "line_width": 2, "legend_label": "for tools"}
        curve = made.line("t_s", "queued_tool", source=source, **tools)
        tips = [(name, f"@{each}{{0,0}}") for name, each in zip(BANDS, _BAND_COLUMNS, strict=True)]
        _hover(made, [at, *tips, ("for tools", "@queued_tool{0,0}")], curve, mode="vline")
        what = "Trajectories that wait to generate, by the policy's level (the lower, the sooner), and for tools."
        self.queue = Panel("Waiting", what, "a trajectory without a free slot", made)
        made = _over_time("slots", x_range=self.tokens.plot.x_range)
        self.capacity, curves = {}, []
        for phase, label in ((Phase.ROLLOUT, "generate"), (Phase.TOOL, "run tools")):
            drawn: dict[str, Any] = {"source": source, "color": PHASE_COLORS[phase], "line_width": 2, "mode": "after"}
            curves.append(made.step("t_s", f"used_{phase.lower()}", legend_label=label, **drawn))
            line: dict[str, Any] = {"line_color": PHASE_COLORS[phase], "line_dash": "dashed", "line_alpha": 0.8}
            self.capacity[phase] = Span(location=0, dimension="width", **line)
            made.add_layout(self.capacity[phase])
        tips = [at, ("generate", "@used_rollout{0,0}"), ("run tools", "@used_tool{0,0}")]
        _hover(made, tips, curves[0], mode="vline")
        made.y_range = Range1d(start=0, end=1)
        what = "Trajectories that generate or run tools at each moment; dashed: slots of all workers."
        self.slots = Panel("Slots in use", what, "the first trajectory", made)
        self.panels = (self.tokens, self.queue, self.slots)

    def show(self, snapshot: Snapshot) -> None:
        """Show one snapshot; for an unchanged start and row spacing, only new rows are sent."""
        history, slots = list(snapshot["history"]), snapshot["slots"]
        spacing_s = history[1][0] - history[0][0] if len(history) > 1 else 0.0
        shown = (snapshot["run"], snapshot["epoch"], spacing_s)
        if shown != self._shown:
            self._shown, self.samples.data = shown, sample_columns(history)
        elif (first := bisect_right(history, self._last_sample_s, key=_time_of)) < len(history):
            self.samples.stream(sample_columns(history, first), MAX_SAMPLES)
        self._last_sample_s = history[-1][0] if history else float("-inf")
        for phase, span in self.capacity.items():
            set_changed(span, "location", slots[phase]["total"])
        used = [row[column] for row in history for column in (3, 4)]
        set_changed(self.slots.plot.y_range, "end", 1.1 * max([1, *(part["total"] for part in slots.values()), *used]))
        for item, place in zip(self.queue.plot.legend[0].items, (*range(6, 6 + len(BANDS)), 2), strict=True):
            set_changed(item, "visible", any(row[place] for row in history))
        self.tokens.has_data(bool(snapshot["tokens"]))
        self.queue.has_data(any(row[1] or row[2] for row in history))
        now = ", ".join(f"{slots[phase]['used']:,} of {slots[phase]['total']:,} {phase}" for phase in Phase)
        self.slots.has_data(any(used), f"Now {now}." if snapshot["state"] == "running" else "")


class LagPanel(Panel):
    """Mean lag of iterations; no plot while bound and lag are 0."""

    def __init__(self) -> None:
        self.source = _source("libra_lag", "iteration", "lag")
        made = plot("", "iteration", "versions behind", height=230, y_range=Range1d(start=0, end=1))
        _dotted(made, self.source, "mean lag", _TRAINING)
        self.bound = Span(location=0, dimension="width", line_color="#c62828", line_dash="dashed")
        made.add_layout(self.bound)
        what = "How many weights versions the trained tokens were behind, on average; dashed: the bound."
        super().__init__("Lag", what, "the end of the first iteration", made)

    def show(self, snapshot: Snapshot) -> None:
        pairs, eta = snapshot["lag"], snapshot["eta"]
        means = _set_means(self.source, pairs)
        set_changed(self.bound, "location", eta)
        set_changed(self.plot.y_range, "end", 1.15 * max([1.0, eta, *(lag for lag in means if lag == lag)]))
        on_policy = "The bound is 0: every token was trained on with the weights that made it."
        self.has_data(bool(pairs) and (eta > 0 or any(means)), instead=on_policy * bool(pairs))


class OutcomePanel(Panel):
    """Forecasts against outcomes."""

    def __init__(self) -> None:
        self.source = _source("libra_outcomes", *_OUTCOME_COLUMNS)
        ranges = {name: Range1d(start=1, end=10) for name in ("x_range", "y_range")}
        axes: dict[str, Any] = {"x_axis_type": "log", "y_axis_type": "log", **ranges}
        made = plot("", "generated tokens", "forecast tokens", height=230, **axes)
        made.line([1, 1e7], [1, 1e7], color=_SOFT, line_dash="dashed")
        tips = [("generated", "@tokens{0,0}"), ("at first", "@first{0,0}"), ("half way", "@half{0,0}")]
        for name, color, label in (("first", _SOFT, "at first"), ("half", PHASE_COLORS["ROLLOUT"], "half way")):
            dots = made.scatter("tokens", name, source=self.source, color=color, size=5, alpha=0.7, legend_label=label)
            _hover(made, tips, dots)
        for axis in made.axis:
            axis.ticker, axis.formatter = FixedTicker(ticks=[]), NumeralTickFormatter(format="0,0")
        what = "The policy's forecast of a trajectory's tokens against what it generated; on the line: right."
        super().__init__("Forecasts", what, "a trajectory that was forecast and has ended", made)

    def show(self, snapshot: Snapshot) -> None:
        policy = snapshot["policy"]
        lines = [line for line in policy["outcomes"] if min(line) > 0]  # 0: no forecast, and no place on a log axis
        set_changed(self.source, "data", {n: [line[i] for line in lines] for i, n in enumerate(_OUTCOME_COLUMNS)})
        low, high = (f((side for line in lines for side in line), default=d) for f, d in ((min, 1), (max, 10)))
        for side in (self.plot.x_range, self.plot.y_range):
            set_changed(side, "start", low / 1.5)
            set_changed(side, "end", high * 1.5)
        for axis in self.plot.axis:
            set_changed(axis.ticker, "ticks", log_ticks(max(1.0, low / 1.5), high * 1.5))
        skill = "" if policy["skill"] is None else f", skill {policy['skill']:.2f}"
        generated = sum(line[2] for line in lines) or 1
        first, half = (sum(abs(line[i] - line[2]) for line in lines) / generated for i in (0, 1))
        off = f", off by {percent(first, 0)} at first and {percent(half, 0)} half way, on average"
        self.has_data(bool(lines), f"The latest {len(lines)}{skill}{off}.")


def _time_of(row: Sequence[float]) -> float:
    return row[0]


def sample_columns(history: list[Any], start: int = 0) -> dict[str, Any]:
    """Rows from index ``start`` as columns, with tokens/s over the ``RATE_S`` before each."""
    rows = []
    for index in range(start, len(history)):
        sample = history[index]
        first = history[max(0, min(index - 1, bisect_right(history, sample[0] - RATE_S, key=_time_of) - 1))]
        elapsed_s = sample[0] - first[0]
        rate = (sample[5] - first[5]) / elapsed_s if elapsed_s > 0 else 0.0
        rows.append((*sample[:5], rate, *sample[6:]))
    return {name: [row[place] for row in rows] for place, name in enumerate(_SAMPLE_COLUMNS)}


def set_changed(model: Any, name: str, value: Any) -> None:
    """Set a property only if it differs, so that an unchanged page sends nothing."""
    if getattr(model, name) != value:
        setattr(model, name, value)


def _dotted(made: Any, source: Any, label: str, color: str, dash: str = "solid") -> None:
    x, y = source.column_names
    made.line(x, y, source=source, color=color, line_width=2, line_dash=dash, legend_label=label)
    dots = made.scatter(x, y, source=source, color=color, size=6, legend_label=label)
    _hover(made, [(x, f"@{x}"), (label, f"@{y}{{0.000}}")], dots)
    made.xaxis.ticker.min_interval = 1


def _set_means(source: Any, rows: Sequence[Sequence[Any]]) -> list[float]:
    x, y = source.column_names
    means = [NO_NUMBER if row[1] is None or row[1] != row[1] else float(row[1]) for row in rows]
    set_changed(source, "data", {x: [int(row[0]) for row in rows], y: means})
    return means


def _source(name: str, *columns: str) -> Any:
    return ColumnDataSource({column: [] for column in columns}, name=name)


def _hover(made: Any, tips: list[tuple[str, str]], renderer: Any, *, mode: Literal["mouse", "vline"] = "mouse") -> None:
    made.add_tools(HoverTool(renderers=[renderer], tooltips=tips, mode=mode))


def _over_time(y_label: str, **options: Any) -> Any:
    made = plot("", "h:mm:ss since the start", y_label, height=230, **options)
    made.xaxis.formatter = NumeralTickFormatter(format="00:00:00")
    made.xaxis.ticker = AdaptiveTicker(base=60, mantissas=[1, 2, 5, 10, 15, 30], min_interval=1, desired_num_ticks=3)
    made.yaxis.formatter = NumeralTickFormatter(format="0,0")
    made.y_range.start = 0
    return made

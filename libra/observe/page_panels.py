"""The panels of the Libra page. Each holds the plots and data sources of one subject; ``show`` brings them up to a snapshot."""

from __future__ import annotations

from typing import Any, Final, Literal

from bokeh.models import ColumnDataSource, HoverTool, NumeralTickFormatter, Range1d
from bokeh.models.annotations import Span
from bokeh.plotting import figure
from bokeh.transform import dodge

from libra.observe.page_snapshot import Snapshot
from libra.observe.state_colors import STATE_COLORS
from libra.observe.task_stream import PHASE_COLORS
from libra.observe.worker_states import STATES
from libra.types import Phase
from libra.untrusted import shown_line

MAX_SAMPLES: Final = 1200
MAX_WORKERS: Final = 32
"""Workers in the plot of worker time."""
RATE_SAMPLES: Final = 6
"""Samples (of 0.5 s) that one point of the tokens/s curve looks back."""
NO_BUCKET, ONE_BUCKET = "no home yet", "all engines"
"""Labels of trajectories that have generated nothing yet, and of the single bucket of workers that declare none."""
NO_NUMBER: Final = float("nan")
"""One shared object, so that lists with it compare as equal; Bokeh draws a gap for it."""
CARD: Final[dict[str, Any]] = {"background": "#fff", "border": "1px solid #e0e4e7", "border-radius": "6px"}

_ROLLOUT, _TOOL = PHASE_COLORS[Phase.ROLLOUT], PHASE_COLORS[Phase.TOOL]
_CURRENT, _BEHIND, _TOKENS = "#2a9d6f", "#e9c46a", "#5e548e"
_SAMPLE_COLUMNS: Final = ("t_s", "queued_rollout", "queued_tool", "used_rollout", "used_tool", "tokens_per_s")
_BUCKET_COLUMNS: Final = ("bucket", "engines", "used", "slots", "at_home", "waiting", "left_tokens")
_OUTCOME_COLUMNS: Final = ("first", "half", "tokens")


class LevelPanel:
    """Waiting trajectories by level."""

    def __init__(self) -> None:
        self.source = _source("libra_levels", "level", "ROLLOUT", "TOOL")
        self.plot = _figure("Waiting now, by level", "C-MLFQ level", "trajectories", x_range=[])
        for phase, offset, color in ((Phase.ROLLOUT, -0.19, _ROLLOUT), (Phase.TOOL, 0.19, _TOOL)):
            bars = _bars(self.plot, "level", str(phase), self.source, offset, 0.34, color, f"for {phase}")
            _hover(self.plot, [("level", "@level"), (f"waiting for {phase}", f"@{phase}{{0,0}}")], bars)
        self.plot.y_range.start = 0
        self.plot.yaxis.ticker.min_interval = 1
        _quiet_legend(self.plot.legend)

    def show(self, snapshot: Snapshot) -> None:
        queue = snapshot["queue"]
        numbers = sorted({0}.union(*(map(int, by_level) for by_level in queue.values())))
        waiting = {
            str(phase): [{int(k): v for k, v in queue.get(phase, {}).items()}.get(level, 0) for level in numbers]
            for phase in Phase
        }
        names = [str(level) for level in numbers]
        set_changed(self.plot.x_range, "factors", names)
        set_changed(self.source, "data", {"level": names, **waiting})
        set_changed(self.plot.y_range, "end", 1.15 * max(1, *waiting["ROLLOUT"], *waiting["TOOL"]))


class TimePanel:
    """Waiting trajectories, used slots and tokens per second, over time."""

    def __init__(self) -> None:
        self._shown: tuple[str, int] | None = None  # run and epoch that the source holds
        self._last_sample_s = float("-inf")
        self.samples = _source("libra_samples", *_SAMPLE_COLUMNS)
        self.queue_plot = _figure("Waiting", "seconds since the start", "trajectories")
        shared = {"x_range": self.queue_plot.x_range}
        self.slot_plot = _figure("Slots in use", "seconds since the start", "slots", **shared)
        self.capacity = {}
        for plot, what in ((self.queue_plot, "queued"), (self.slot_plot, "used")):
            for phase, color in PHASE_COLORS.items():
                curve = plot.step(
                    "t_s", f"{what}_{phase.lower()}", source=self.samples, color=color, line_width=2, mode="after",
                    legend_label=str(phase),
                )  # fmt: skip
                if phase is Phase.ROLLOUT:
                    tips = [(str(each), f"@{what}_{each.lower()}{{0,0}}") for each in Phase]
                    _hover(plot, [("time", "@t_s{0.0} s"), *tips], curve, mode="vline")
            _quiet_legend(plot.legend)
            plot.yaxis.ticker.min_interval = 1
        for phase, color in PHASE_COLORS.items():
            span = Span(location=0, dimension="width", line_color=color, line_dash="dashed", line_alpha=0.7)
            self.slot_plot.add_layout(span)
            self.capacity[phase] = span
        self.token_plot = _figure("Tokens generated per second", "seconds since the start", "tokens/s", **shared)
        curve = self.token_plot.line("t_s", "tokens_per_s", source=self.samples, color=_TOKENS, line_width=2)
        self.token_plot.varea("t_s", 0, "tokens_per_s", source=self.samples, color=_TOKENS, alpha=0.12)
        _hover(self.token_plot, [("time", "@t_s{0.0} s"), ("tokens/s", "@tokens_per_s{0,0}")], curve, mode="vline")
        for plot in (self.queue_plot, self.slot_plot, self.token_plot):
            plot.y_range.start = 0

    def show(self, snapshot: Snapshot) -> None:
        """Show one snapshot; for the same start of a run, only its new samples are sent."""
        history, shown = list(snapshot["history"]), (snapshot["run"], snapshot["epoch"])
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
        total = {phase: sum(snapshot["queue"].get(phase, {}).values()) for phase in Phase}
        waiting = ", ".join(f"{total[phase]:,} for {phase}" for phase in Phase)
        set_changed(self.queue_plot.title, "text", f"Waiting: {waiting}")
        slots = snapshot["slots"]
        for phase, span in self.capacity.items():
            set_changed(span, "location", slots[phase]["total"])
        text = ", ".join(f"{phase} {slots[phase]['used']:,} of {slots[phase]['total']:,}" for phase in Phase)
        set_changed(self.slot_plot.title, "text", f"Slots in use: {text}")
        top = max(1, *(part[side] for part in slots.values() for side in part))
        set_changed(self.slot_plot.y_range, "end", 1.1 * top)


class WorkerTimePanel:
    """What each worker did since the start of the run, as shares of its time; the tooltip names the states."""

    def __init__(self) -> None:
        self.source = _source("libra_worker_time", "worker", *STATES)
        self.plot = _figure(
            "Where worker time went", "share of its time since the start", "", y_range=[], x_range=(0, 1)
        )
        bars = self.plot.hbar_stack(
            list(STATES), y="worker", height=0.7, source=self.source, color=list(STATE_COLORS.values()), line_color=None
        )
        for state, drawn in zip(STATES, bars, strict=True):
            _hover(self.plot, [("worker", "@worker"), (state, f"@{state}{{0.0%}}"), ("it", STATES[state])], drawn)
        self.plot.xaxis.formatter = NumeralTickFormatter(format="0%")
        self.plot.ygrid.visible = False

    def show(self, snapshot: Snapshot) -> None:
        rows = [row for row in snapshot["time"]["workers"] if row["seconds"]][:MAX_WORKERS]
        totals = [sum(row["seconds"].values()) for row in rows]
        data: dict[str, list[Any]] = {"worker": [shown_line(row["worker"], 40) for row in rows]}
        for state in STATES:
            pairs = zip(rows, totals, strict=True)
            data[state] = [row["seconds"].get(state, 0.0) / total if total else 0.0 for row, total in pairs]
        set_changed(self.plot, "visible", bool(rows))
        set_changed(self.plot.y_range, "factors", data["worker"][::-1])
        set_changed(self.source, "data", data)


class BucketPanel:
    """Waiting and running trajectories by bucket."""

    def __init__(self) -> None:
        self.source = _source("libra_buckets", *_BUCKET_COLUMNS)
        self.plot = _figure("Waiting and running now, by bucket", "bucket", "trajectories", x_range=[])
        for name, offset, color, label in (
            ("waiting", -0.27, _BEHIND, "waiting"), ("used", 0.0, _ROLLOUT, "slots taken"), ("slots", 0.27, "#c9d1d6", "slots"),
        ):  # fmt: skip
            _bars(self.plot, "bucket", name, self.source, offset, 0.25, color, label)
        tips = [
            ("bucket", "@bucket"),
            ("engines", "@engines"),
            ("waiting", "@waiting{0,0}"),
            ("slots", "@used of @slots"),
        ]
        _hover(
            self.plot, [*tips, ("at home", "@at_home{0,0}"), ("forecast remaining, mean tokens", "@left_tokens{0,0}")]
        )
        self.plot.y_range.start = 0
        _quiet_legend(self.plot.legend)

    def show(self, snapshot: Snapshot) -> None:
        buckets = snapshot["buckets"]
        names = [NO_BUCKET if line["bucket"] is None else line["bucket"] or ONE_BUCKET for line in buckets]
        columns = {name: [line[name] for line in buckets] for name in _BUCKET_COLUMNS[1:]}
        set_changed(self.plot.x_range, "factors", names)
        set_changed(self.source, "data", {"bucket": names, **columns})
        set_changed(self.plot.y_range, "end", 1.15 * max([1, *columns["waiting"], *columns["slots"]]))


class OutcomePanel:
    """Forecasts against outcomes."""

    def __init__(self) -> None:
        self.source = _source("libra_outcomes", *_OUTCOME_COLUMNS)
        axes = {"x_axis_type": "log", "y_axis_type": "log"}
        self.plot = _figure("Forecast against outcome", "generated tokens", "tokens forecast", **axes)
        self.plot.line([1, 1e7], [1, 1e7], color="#b0bec5", line_dash="dashed")
        tips = [("generated", "@tokens{0,0}"), ("at first", "@first{0,0}"), ("half way", "@half{0,0}")]
        for name, color, label in (("first", "#b0bec5", "at first"), ("half", _ROLLOUT, "half way")):
            dots = self.plot.scatter(
                "tokens", name, source=self.source, color=color, size=5, alpha=0.7, legend_label=label
            )
            _hover(self.plot, tips, dots)
        for side in (self.plot.x_range, self.plot.y_range):
            side.start, side.end = 1, 10
        self.plot.xaxis.formatter = NumeralTickFormatter(format="0,0")
        _quiet_legend(self.plot.legend)
        self.plot.legend.location = "bottom_right"

    def show(self, snapshot: Snapshot) -> None:
        policy = snapshot["policy"]
        # A logarithmic axis has no place for 0: there was no forecast, and nothing is drawn.
        lines = [line for line in policy["outcomes"] if min(line) > 0]
        set_changed(self.source, "data", {n: [line[i] for line in lines] for i, n in enumerate(_OUTCOME_COLUMNS)})
        low, high = (f((side for line in lines for side in line), default=d) for f, d in ((min, 1), (max, 10)))
        for side in (self.plot.x_range, self.plot.y_range):
            set_changed(side, "start", low / 1.5)
            set_changed(side, "end", high * 1.5)
        skill = "" if policy["skill"] is None else f", skill {policy['skill']:.2f}"
        set_changed(self.plot.title, "text", f"Forecast against outcome, the latest {len(lines)}{skill}")


class IterationPanel:
    """Mean reward and lag of iterations."""

    def __init__(self) -> None:
        self.rewards = _source("libra_rewards", "iteration", "reward")
        self.lag = _source("libra_lag", "iteration", "lag")
        self.reward_plot = _figure("Mean reward of each iteration", "iteration", "reward")
        self.reward_plot.line("iteration", "reward", source=self.rewards, color=_CURRENT, line_width=2)
        dots = self.reward_plot.scatter("iteration", "reward", source=self.rewards, color=_CURRENT, size=6)
        _hover(self.reward_plot, [("iteration", "@iteration"), ("mean reward", "@reward{0.000}")], dots)
        self.lag_plot = _figure(
            "Mean lag at consumption", "iteration", "versions behind", y_range=Range1d(start=0, end=1)
        )
        bars = self.lag_plot.vbar("iteration", top="lag", width=0.7, source=self.lag, color="#8d99ae")
        _hover(self.lag_plot, [("iteration", "@iteration"), ("lag", "@lag{0.00}")], bars)
        self.bound = Span(location=0, dimension="width", line_color="#c62828", line_dash="dashed")
        self.lag_plot.add_layout(self.bound)
        for plot in (self.reward_plot, self.lag_plot):
            plot.xaxis.ticker.min_interval = 1

    def show(self, snapshot: Snapshot) -> None:
        for source, name in ((self.rewards, "reward"), (self.lag, "lag")):
            pairs = snapshot["rewards" if name == "reward" else "lag"]
            means = [NO_NUMBER if mean is None or mean != mean else float(mean) for _, mean in pairs]
            set_changed(source, "data", {"iteration": [int(k) for k, _ in pairs], name: means})
        eta, lags = snapshot["eta"], list(self.lag.data["lag"])
        set_changed(self.bound, "location", eta)
        set_changed(self.lag_plot.y_range, "end", 1.15 * max([1.0, eta, *(lag for lag in lags if lag == lag)]))
        set_changed(self.lag_plot.title, "text", f"Mean lag (bound {eta})")


class VersionPanel:
    """Weight versions that workers serve."""

    def __init__(self) -> None:
        self.source = _source("libra_served", "version", "workers", "names", "color")
        self.plot = _figure("Weights served", "version", "workers", x_range=[])
        bars = self.plot.vbar(
            "version", top="workers", width=0.6, source=self.source, fill_color="color", line_color=None
        )
        self.plot.y_range.start = 0
        self.plot.yaxis.ticker.min_interval = 1
        _hover(self.plot, [("version", "@version"), ("workers", "@workers"), ("names", "@names")], bars)

    def show(self, snapshot: Snapshot) -> None:
        published, served = snapshot["versions"]["published"], snapshot["versions"]["served"]
        by_version: dict[int, list[str]] = {published: []}
        for worker, version in sorted(served.items()):
            by_version.setdefault(version, []).append(str(worker))
        ordered = sorted(by_version)[-8:]
        names = [f"v{version}" for version in ordered]
        counts = [len(by_version[version]) for version in ordered]
        data: dict[str, list[Any]] = {
            "version": names,
            "workers": counts,
            "names": [", ".join(by_version[version][:20]) for version in ordered],
            "color": [_CURRENT if version == published else _BEHIND for version in ordered],
        }
        set_changed(self.plot.x_range, "factors", names)
        set_changed(self.source, "data", data)
        set_changed(self.plot.y_range, "end", 1.15 * max(1, *counts))
        set_changed(self.plot.title, "text", f"Weights served, v{published} published")


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


def set_changed(model: Any, name: str, value: Any) -> None:
    """Set a property if it differs, so that an unchanged page sends nothing."""
    if getattr(model, name) != value:
        setattr(model, name, value)


def _source(name: str, *columns: str) -> Any:
    return ColumnDataSource({column: [] for column in columns}, name=name)


def _bars(plot: Any, x: str, top: str, source: Any, offset: float, width: float, color: str, label: str) -> Any:
    """Bars beside those of other offsets."""
    return plot.vbar(
        dodge(x, offset, range=plot.x_range), top=top, width=width, source=source,
        fill_color=color, line_color=None, legend_label=label,
    )  # fmt: skip


def _hover(
    plot: Any, tips: list[tuple[str, str]], renderer: Any = None, *, mode: Literal["mouse", "vline"] = "mouse"
) -> None:
    """Tooltips of one renderer, None: of all."""
    plot.add_tools(HoverTool(renderers="auto" if renderer is None else [renderer], tooltips=tips, mode=mode))


def _figure(title: str, x_label: str, y_label: str, **options: Any) -> Any:
    """An empty plot in the page's style."""
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
    """Make a legend small and transparent, since curves run under it; a click on an entry mutes its curve."""
    legend.orientation, legend.location, legend.click_policy = "horizontal", "top_right", "mute"
    legend.label_text_font_size, legend.glyph_height, legend.glyph_width = "10px", 10, 14
    legend.background_fill_alpha, legend.border_line_color = 0.7, None
    legend.padding, legend.margin, legend.spacing, legend.label_standoff = 2, 2, 8, 4

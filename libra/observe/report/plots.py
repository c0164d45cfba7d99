"""Report sections of plots: worker time and curves over iterations."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from bokeh.models import ColumnDataSource, FixedTicker, HoverTool
from markupsafe import Markup
from numpy.typing import NDArray

from libra.observe.html import STATE_COLORS, number, percent, piece, table
from libra.observe.panels import PHASE_COLORS, OutcomePanel, curve, legend_only, log_ticks, plain, plot, spans
from libra.observe.recorded_run import ReportedRun
from libra.observe.report.listings import Part, Section, label, per_run
from libra.observe.run_directory import finite
from libra.observe.timeline.states import STATES

ALL: Final = "all engines and training workers"
MAX_SPANS: Final = 4000
"""Maximum bars per plot: fewer than the pixels of a wide screen."""
MAX_ROWS: Final = 64
"""Maximum trajectories drawn per iteration."""


def _time_of(run: ReportedRun) -> list[Part]:
    if not run.time.shares:
        return [piece("missing", f"{run.name}: {run.log_error or 'no worker has been seen yet'}.")]
    return [_shares_plot(run), _time_table(run)]


def _shares_plot(run: ReportedRun) -> Any:
    rows = [(ALL, run.time.shares), *((plain(worker.worker), worker.shares) for worker in run.time.workers)]
    rows = [(name, shares) for name, shares in rows if shares][:MAX_ROWS]
    states = [state for state in STATES if any(state in shares for _, shares in rows)]
    names = [name for name, _ in rows]
    height = 90 + 30 * len(rows) + 22 * (len(states) // 4 + 1)
    made = plot("", "share of time", "", height=height, y_range=names[::-1], x_range=(0, 1))
    stops = np.zeros(len(rows))
    for state in states:
        widths = np.array([shares.get(state, 0.0) for _, shares in rows])
        starts, stops = stops, stops + widths
        columns = {"row": names, "left": starts.tolist(), "right": stops.tolist(), "share": list(map(percent, widths))}
        source = ColumnDataSource(columns, name=f"share_{state}")
        drawn = made.hbar(
            "row", left="left", right="right", height=0.7, source=source, color=STATE_COLORS[state], line_color=None,
            legend_label=state,
        )  # fmt: skip
        made.add_tools(HoverTool(renderers=[drawn], tooltips=[("", "@row"), (state, "@share"), ("", STATES[state])]))
    made.legend.ncols = 4
    return made


def _time_table(run: ReportedRun) -> Markup:
    cost = None if isinstance(run.cost, str) else run.cost
    price = [] if cost is None else [cost.currency]

    def row(first: object, name: str, share: float | None, gpu_s: float, money: float, cause: str) -> list[object]:
        cells = [first, piece("figure", name, run.name, percent(share)), number(gpu_s / 3600, ",.4f")]
        return [*cells, *(number(money, ",.4f") for _ in price), cause]

    gpu_s, by_state = run.time.gpu_s, {} if cost is None else cost.by_state
    rows = [
        row(piece("swatch", STATE_COLORS[s], s), f"share_{s}", share, gpu_s[s], by_state.get(s, 0.0), STATES[s])
        for s, share in run.time.shares.items()
    ]
    total = sum(by_state.values())
    rows.append(row("busy, of all", "busy_share", run.time.busy_frac, sum(gpu_s.values()), total, ""))
    head = ("", "share", "GPU-hours" if run.is_on_gpu else "worker-hours", *price, "cause")
    used = [f"{w.worker} {percent(w.slots_used_frac)}" for w in run.time.workers if w.slots_used_frac is not None]
    notes = [piece("soft", f"Slots in use on average: {', '.join(used)}.")] if used else []
    if cost is None:
        notes.append(piece("missing", f"No money: {run.cost}."))
    else:
        each = f", {cost.units:g} cores for each worker" if cost.unit == "core" else ""
        paid = f"Money: {number(cost.price.price, ',.4f')} {cost.currency} per {cost.unit}-hour{each}"
        notes.append(piece("soft", f"{paid}; {cost.price.source}, read {cost.price.date}."))
    return table(head, rows, range(1, 3 + len(price))) + Markup().join(notes)


worker_time = per_run(
    "time", "Where worker time went", "Share of each worker's time by its work, or by the cause of its idleness. The first row is "
    "weighted by GPUs; workers that only run tools need none, and do not count there.", _time_of,
)  # fmt: skip


def _gantt_of(run: ReportedRun) -> list[Part]:
    if not run.time.shares:
        return [piece("missing", f"{run.name}: {run.log_error or 'no worker has been seen yet'}.")]
    return [_workers_plot(run), _turns_plot(run)]


def _workers_plot(run: ReportedRun) -> Any:
    by_worker = {name: found for name, found in run.timeline.workers.segments().items() if found}
    bars = coarse(by_worker, MAX_SPANS)
    states = [state for state in STATES if any(bar[3] == state for bar in bars)]
    names = [plain(name) for name in by_worker]
    made = plot(
        "", "seconds since the start", "", height=110 + 34 * len(names) + 22 * (len(states) // 4), y_range=names[::-1],
        x_range=(0, max(run.time.until_s, 1e-3)),
    )  # fmt: skip
    spans(made, [(plain(name), start, stop, STATE_COLORS[state], state) for name, start, stop, state in bars])
    legend_only(made, [(state, STATE_COLORS[state]) for state in states])
    made.legend.ncols = 4
    return made


def coarse(
    by_worker: Mapping[str, Sequence[tuple[float, float, str]]], most: int
) -> list[tuple[str, float, float, str]]:
    """(worker, start, stop, state) of about ``most`` bars, merged into equal cells beyond that.

    A cell has the state with the most time in it.
    """
    if sum(len(found) for found in by_worker.values()) <= most:
        return [(name, *each) for name, found in by_worker.items() for each in found]
    end_s = max(found[-1][1] for found in by_worker.values() if found)
    edges = np.linspace(0.0, end_s, max(1, most // len(by_worker)) + 1)
    bars: list[tuple[str, float, float, str]] = []
    for name, found in by_worker.items():
        states = sorted({state for _, _, state in found})
        held = np.array([_time_in_cells([each[:2] for each in found if each[2] == state], edges) for state in states])
        largest = [states[place] for place in held.argmax(0)]
        cells = [state if any_s > 0 else "" for state, any_s in zip(largest, held.sum(0), strict=True)]
        for state, group in itertools.groupby(range(len(cells)), cells.__getitem__):
            numbers = list(group)
            if state:
                bars.append((name, float(edges[numbers[0]]), float(edges[numbers[-1] + 1]), state))
    return bars


def _time_in_cells(spans_s: Sequence[tuple[float, float]], edges: NDArray[np.float64]) -> NDArray[np.float64]:
    knots = np.array(spans_s).ravel()
    passed = np.cumsum([value for start, stop in spans_s for value in (0.0, stop - start)])
    return np.diff(np.interp(edges, knots, passed))


def _turns_plot(run: ReportedRun) -> Any:
    ends: dict[str, float] = {}
    for span in run.timeline.turns:
        ends[span.key] = max(span.stop_s, ends.get(span.key, 0.0))
    if not ends:
        return piece("missing", "No training trajectory has ended yet, so there are no turns to draw.")
    shown = sorted(ends, key=ends.__getitem__)[-MAX_ROWS:]
    names = {key: _short(key) for key in shown}
    rows = []
    for span in run.timeline.turns:
        if span.key in names:
            what = f"{plain(span.tool) or span.phase} on {plain(span.worker)}"
            rows.append((names[span.key], span.start_s, span.stop_s, PHASE_COLORS[span.phase], what))
    begin, end = min(row[1] for row in rows), max(row[2] for row in rows)
    of = f", the last {len(shown)} to end" if len(ends) > len(shown) else ""
    made = plot(
        f"iteration {run.timeline.turns_of}{of}", "seconds since the start", "", height=110 + max(140, 5 * len(shown)),
        y_range=list(names.values())[::-1], x_range=(begin, end if end > begin else begin + 1),
    )  # fmt: skip
    spans(made, rows)
    legend_only(made, [("generates", PHASE_COLORS["ROLLOUT"]), ("runs tools", PHASE_COLORS["TOOL"])])
    if len(shown) > 24:
        made.yaxis.visible = False
    return made


gantt = per_run(
    "gantt", "Workers and turns over time",
    "Left: the state of each worker over the run. Right: the turns of the newest iteration's trajectories, by end.", _gantt_of,
)  # fmt: skip


def _short(key: str) -> str:
    found = re.match(r"trajectory-([a-z]+-[\d-]*\d)-e\d+-", key)
    return found[1] if found else plain(key)


MISMATCH: Final = (("mismatch_mean_abs", "mean", "solid"), ("mismatch_max_abs", "largest", "dotted"))
"""Absolute gaps between engine and trainer log-probabilities of the same tokens, in nats."""
SECONDS: Final = (
    ("iteration_s", "iteration", "solid"), ("train_s", "training step", "dashed"), ("store_s", "storing", "dotted"),
)  # fmt: skip
LENGTHS: Final = ((0.5, "median", "solid"), (0.9, "9 of 10 are shorter", "dashed"), (1.0, "longest", "dotted"))
"""Quantiles of trajectory lengths."""
LAG: Final = (("lag", "mean lag", "solid"), ("lag_max", "largest lag", "dotted"))
MAX_DOTS: Final = 2000


def _draw(
    made: Any, runs: Sequence[ReportedRun], series: Sequence[tuple[str, str, str]], *, log: bool = False
) -> list[float]:
    drawn: list[float] = []
    for run in runs:
        for name, what, dash in series:
            known = {k: value for k, value in zip(*run.series(name), strict=True) if value > 0 or not log}
            if known:
                dots = dash == "solid" or log
                curve(made, list(known), list(known.values()), label(runs, run, what), run.color, dash=dash, dots=dots)
                drawn += known.values()
    return drawn


def rewards(runs: Sequence[ReportedRun]) -> Section:
    """Training and held-out reward."""
    made = plot("", "iteration (held out: weights version)", "mean reward", height=320)
    if len(runs) == 1:
        _band(made, runs[0])
    drawn = bool(_draw(made, runs, [("reward", "training questions", "solid")]))
    for run in runs:
        found = ((version, finite(result.get("reward"))) for version, result in run.evaluations.items())
        if held := {version: reward for version, reward in found if reward is not None}:
            color = run.color if len(runs) > 1 else "#2a9d6f"
            curve(made, list(held), list(held.values()), label(runs, run, "held-out questions"), color, dash="dashed")
            drawn = True
    why = "No iteration has a reward, and nothing was evaluated yet."
    bins = _bins(runs[0]) if len(runs) == 1 else None
    parts = [made if drawn else piece("missing", why), *([] if bins is None else [bins])]
    what = "Mean reward of each iteration's trajectories, and of the held-out questions at each evaluation."
    return Section("rewards", "Rewards", what, parts)


def _band(made: Any, run: ReportedRun) -> None:
    (x, low), (other, high) = run.series("reward_group_min"), run.series("reward_group_max")
    if len(x) > 1 and x == other:
        made.varea(x, low, high, color=run.color, alpha=0.13, legend_label="lowest and highest group")


def _bins(run: ReportedRun) -> Any:
    evaluated = sorted(run.evaluations.items())
    known = [(version, dict(result["bins"])) for version, result in evaluated if result.get("bins")]
    if len(known) < 2:
        return None
    names = [name for name in known[-1][1] if name in known[0][1]]
    made = plot(
        "", "bin of the environment", "mean reward of held-out questions", height=320, x_range=[str(n) for n in names]
    )
    for offset, (version, bins), color in ((-0.2, known[0], "#8fa1ab"), (0.2, known[-1], "#2a9d6f")):
        x, means = [(str(name), offset) for name in names], [bins[name][0] for name in names]
        made.vbar(x, top=means, width=0.36, color=color, line_color=None, legend_label=f"version {version}")
    made.y_range.start = 0
    return made


def seconds(runs: Sequence[ReportedRun]) -> Section:
    """Seconds and tokens per second by iteration."""
    times, rates = plot("", "iteration", "seconds"), plot("", "iteration", "generated tokens/s")
    _draw(times, runs, SECONDS)
    drawn = _draw(rates, runs, [("tokens_per_s", "tokens/s", "solid")])
    times.y_range.start = rates.y_range.start = 0
    what = "Wall time of each iteration and of its training step, and tokens generated per second of the iteration."
    parts = [times, rates] if drawn else [piece("missing", "No iteration has ended yet.")]
    return Section("seconds", "Iterations", what, parts)


def lengths(runs: Sequence[ReportedRun]) -> Section:
    """Lengths of trajectories."""
    by_iteration = plot("", "iteration", "generated tokens of a trajectory")
    histogram = plot("", "generated tokens of a trajectory", "share of trajectories")
    drawn, why = False, ""
    for run in runs:
        if not run.columns:
            why = why or f"{run.name}: {run.store_error}."
            continue
        train = run.columns["split"] == "train"
        iteration, tokens = run.columns["iteration"][train], run.generated_tokens[train]
        if not len(tokens):
            continue
        numbers = np.unique(iteration).tolist()
        for share, what, dash in LENGTHS:
            values = [float(np.quantile(tokens[iteration == k], share)) for k in numbers]
            curve(by_iteration, numbers, values, label(runs, run, what), run.color, dash=dash, dots=dash == "solid")
        edges = np.histogram_bin_edges(tokens, bins=min(40, max(8, int(tokens.max()) + 1)))
        shares = np.histogram(tokens, edges)[0] / len(tokens)
        histogram.quad(
            left=edges[:-1], right=edges[1:], bottom=0, top=shares, color=run.color, alpha=0.75 / len(runs) + 0.15, line_color=None,
            legend_label=label(runs, run, f"all {len(tokens):,}"),
        )  # fmt: skip
        drawn = True
    histogram.y_range.start = by_iteration.y_range.start = 0
    parts = (
        [by_iteration, histogram] if drawn else [piece("missing", why or "The store has no training trajectory yet.")]
    )
    return Section("lengths", "Lengths", "Generated tokens of training trajectories, tool returns not counted.", parts)


def _forecasts_of(run: ReportedRun) -> list[Part]:
    pairs = list(run.timeline.forecasts)[-MAX_DOTS:]
    if not pairs:
        why = run.log_error or "its policy made no forecast of a trajectory that ended"
        return [piece("missing", f"{run.name}: {why}.")]
    panel = OutcomePanel()
    panel.show({"policy": {"outcomes": pairs, "skill": None}})
    return [panel.card]


forecasts = per_run(
    "forecasts", "Forecasts against truth",
    "The policy's forecast of a trajectory's tokens, at first and half way, against the tokens that it generated.", _forecasts_of,
)  # fmt: skip


def mismatch(runs: Sequence[ReportedRun]) -> Section:
    """Mismatch, lag and clipping."""
    made, lag = plot("", "iteration", "nats", y_axis_type="log"), plot("", "iteration", "versions behind")
    drawn = _draw(made, runs, MISMATCH, log=True)
    if drawn:
        made.yaxis.ticker = FixedTicker(ticks=log_ticks(min(drawn) / 2, max(drawn) * 2))
    lags = _draw(lag, runs, LAG)
    lag.y_range.start = 0
    parts: list[Part] = [
        made if drawn else piece("missing", "No iteration compared the engine's log-probabilities with the trainer's."),
        lag if lags else piece("missing", "No iteration has ended, so no lag was measured."),
    ]
    what = (
        "Difference between the engines' and the trainer's log-probabilities of the same tokens (mismatch), and how many weights "
        "versions the trained tokens were behind."
    )
    return Section("mismatch", "Mismatch and lag", what, parts)

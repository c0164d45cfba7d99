"""Sections of the report with curves over iterations: rewards, seconds, lengths, forecasts, mismatch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from bokeh.models import FixedTicker

from libra.observe.html import piece
from libra.observe.page_panels import OutcomePanel
from libra.observe.plots import curve, log_ticks, plot
from libra.observe.report.reported_run import ReportedRun
from libra.observe.report.section import Part, Section, for_each, label
from libra.observe.run_directory import finite

MISMATCH: Final = (
    ("mismatch_mean_abs", "mean", "solid"),
    ("mismatch_max_abs", "largest", "dotted"),
)
"""Absolute differences between the engine's and the trainer's log-probabilities of the same tokens, in nats."""
SECONDS: Final = (
    ("iteration_s", "iteration", "solid"),
    ("train_s", "training step", "dashed"),
    ("store_s", "storing", "dotted"),
)
LAG: Final = (("lag", "mean lag", "solid"), ("lag_max", "largest lag", "dotted"))
MAX_DOTS: Final = 2000


def _draw(
    made: Any, runs: Sequence[ReportedRun], series: Sequence[tuple[str, str, str]], *, log: bool = False
) -> list[float]:
    """Curves of each run's metrics, each (name, label, dash); the drawn values, positive ones alone on a logarithmic axis."""
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
        held = {
            version: reward
            for version, result in run.evaluations.items()
            if (reward := finite(result.get("reward"))) is not None
        }
        if held:
            color = run.color if len(runs) > 1 else "#2a9d6f"
            curve(made, list(held), list(held.values()), label(runs, run, "held-out questions"), color, dash="dashed")
            drawn = True
    parts: list[Part] = [
        made if drawn else piece("missing", "No iteration has a reward, and nothing was evaluated yet.")
    ]
    bins = _bins(runs[0]) if len(runs) == 1 else None
    what = "Mean reward of each iteration's trajectories, and of the held-out questions at each evaluation."
    return Section("rewards", "Rewards", what, [*parts, *([bins] if bins is not None else [])])


def _band(made: Any, run: ReportedRun) -> None:
    """Lowest and highest mean of a group, behind the curve."""
    (x, low), (other, high) = run.series("reward_group_min"), run.series("reward_group_max")
    if len(x) > 1 and x == other:
        made.varea(x, low, high, color=run.color, alpha=0.13, legend_label="lowest and highest group")


def _bins(run: ReportedRun) -> Any:
    """Held-out reward by bin, at the first and the last evaluation."""
    evaluated = sorted(run.evaluations.items())
    known = [(version, dict(result["bins"])) for version, result in evaluated if result.get("bins")]
    if len(known) < 2:
        return None
    names = [name for name in known[-1][1] if name in known[0][1]]
    made = plot(
        "", "bin of the environment", "mean reward of held-out questions", height=320, x_range=[str(n) for n in names]
    )
    for offset, (version, bins), color in ((-0.2, known[0], "#8fa1ab"), (0.2, known[-1], "#2a9d6f")):
        x = [(str(name), offset) for name in names]
        made.vbar(
            x,
            top=[bins[n][0] for n in names],
            width=0.36,
            color=color,
            line_color=None,
            legend_label=f"version {version}",
        )
    made.y_range.start = 0
    return made


def seconds(runs: Sequence[ReportedRun]) -> Section:
    """Seconds and tokens per second of iterations."""
    times, rates = plot("", "iteration", "seconds"), plot("", "iteration", "generated tokens/s")
    _draw(times, runs, SECONDS)
    drawn = _draw(rates, runs, [("tokens_per_s", "tokens/s", "solid")])
    times.y_range.start = rates.y_range.start = 0
    what = "Wall time of each iteration and of its training step, and tokens generated per second of the iteration."
    return Section(
        "seconds", "Iterations", what, [times, rates] if drawn else [piece("missing", "No iteration has ended yet.")]
    )


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
        for share, what, dash in (
            (0.5, "median", "solid"),
            (0.9, "9 of 10 are shorter", "dashed"),
            (1.0, "longest", "dotted"),
        ):
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


def forecasts(runs: Sequence[ReportedRun]) -> Section:
    """Forecasts of lengths against the truth."""
    what = "The policy's forecast of a trajectory's tokens, at first and half way, against what it generated."
    return Section("forecasts", "Forecasts against truth", what, for_each(runs, _forecasts_of))


def _forecasts_of(run: ReportedRun) -> list[Part]:
    pairs = list(run.timeline.forecasts)[-MAX_DOTS:]
    if not pairs:
        why = run.log_error or "its policy made no forecast of a trajectory that ended"
        return [piece("missing", f"{run.name}: {why}.")]
    panel = OutcomePanel()
    panel.show({"policy": {"outcomes": pairs, "skill": None}})
    return [panel.card]


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

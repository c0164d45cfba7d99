"""Report sections of tables and texts: decisions, waves, failures, samples, settings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import yaml
from markupsafe import Markup

from libra import facts
from libra.errors import ModelError, StoreError
from libra.observe.html import duration, number, percent, piece, table
from libra.observe.inspect import trajectory_text
from libra.observe.panels import plain
from libra.observe.recorded_run import ReportedRun
from libra.observe.timeline.decision_outcomes import Outcome
from libra.observe.timeline.recorded import Logged
from libra.observe.timeline.steps import EngineSwitch, Wave, groups_text
from libra.observe.trajectory_view import headline, load_decode
from libra.untrusted import shown_line

Part = Any
"""HTML as `Markup`, or a Bokeh model."""


class Section(NamedTuple):
    """A section: ``what`` explains it in one line; ``parts`` are side by side in a wide window."""

    anchor: str
    title: str
    what: str
    parts: Sequence[Part]


def per_run(
    anchor: str, title: str, what: str, make: Callable[[ReportedRun], Sequence[Part]]
) -> Callable[[Sequence[ReportedRun]], Section]:
    """A section with every run's parts, under the run's name if there are several."""

    def section(runs: Sequence[ReportedRun]) -> Section:
        parts: list[Part] = []
        for run in runs:
            made = list(make(run))
            if len(runs) > 1 and made:
                heading = piece("heading", run.name)
                made = [heading + made[0], *made[1:]] if isinstance(made[0], Markup) else [heading, *made]
            parts += made
        return Section(anchor, title, what, parts)

    return section


def label(runs: Sequence[ReportedRun], run: ReportedRun, what: str) -> str:
    """Curve label, with the run's name if there are several."""
    return f"{plain(run.name)}: {what}" if len(runs) > 1 else what


MAX_ROWS: Final = 60
MAX_STEPS: Final = 20
MAX_DETAILS: Final = 20
MAX_SAMPLE_CHARS: Final = 6000


def _decisions_of(run: ReportedRun) -> list[Part]:
    logged = list(run.timeline.decisions)
    if not logged:
        why = "no layout was planned, no role changed and no limit was set (planner.replan, libra roles)"
        return [piece("missing", f"{run.name}: {run.log_error or why}.")]
    outcomes = run.timeline.outcomes.outcomes()
    rows = [_decision_row(each, outcomes) for each in logged[-MAX_ROWS:]]
    before = f" The {len(logged) - MAX_ROWS} before them are left out." if len(logged) > MAX_ROWS else ""
    head = ("at", "decision", "predicted gain", "realised gain", "why")
    return [piece("soft", f"{len(rows)} decisions.{before}") + table(head, rows, (0, 2, 3))]


def _decision_row(logged: Logged, outcomes: Sequence[Outcome]) -> tuple[str, str, str, str, str]:
    decision, why = facts.said(logged.event)
    predicted = realised = "–"
    if isinstance(logged.event, facts.PlanRealised):
        predicted, realised = percent(logged.event.predicted_gain_frac), percent(logged.event.realised_gain_frac)
    elif logged.outcome is not None:
        outcome = outcomes[logged.outcome]
        predicted, realised = outcome.predicted_words or predicted, outcome.realised_words
    return duration(logged.t_s, 1), decision, predicted, realised, shown_line(why, 300)


decisions = per_run(
    "decisions", "Decisions", "Decisions of planner, roles and limits, each with its predicted and its realised gain of a step.",
    _decisions_of,
)  # fmt: skip


def _streamed_of(run: ReportedRun) -> list[Part]:
    steps = run.timeline.steps
    found = [(step, waves) for step, waves in sorted(steps.waves.items()) if waves]
    if not found:
        return [piece("missing", f"{run.name}: {run.log_error or 'no step was trained in waves (trainer.streaming)'}.")]
    parts = []
    if steps.modes:
        modes = [(duration(each.t_s, 1), each.step + 1, each.way, shown_line(each.reason, 300)) for each in steps.modes]
        parts.append(table(("at", "from step", "steps are taken by", "why"), modes[-MAX_ROWS:], (0, 1)))
    rows = [_step_row(step, waves, taken=steps.is_taken(step)) for step, waves in found[-MAX_STEPS:]]
    head = ("step", "groups trained", "waves of groups", "gradients took", "with switched engines", "state")
    parts.append(table(head, rows, (0, 1, 3)))
    switches = [_switch_row(switch) for switch in list(steps.switches)[-MAX_ROWS:]]
    head = ("at", "engine", "switches to", "result", "took", "why")
    no_switch = piece("missing", "No engine switched its role (trainer.turning).")
    return [Markup().join([*parts, table(head, switches, (0, 4)) if switches else no_switch])]


def _step_row(step: int, waves: dict[int, Wave], *, taken: bool) -> tuple[object, ...]:
    numbered = sorted(waves.items())
    trained = [(place, wave) for place, wave in numbered if wave.train_s is not None]
    helped = ", ".join(f"wave {place}: {wave.hybrids}" for place, wave in trained if wave.hybrids)
    return (
        step, sum(wave.groups for _, wave in trained), " + ".join(groups_text(wave.groups, wave.others) for _, wave in numbered),
        number(sum(wave.train_s or 0.0 for _, wave in trained), ",.2f", " s"), helped or "–", "taken" if taken else "open",
    )  # fmt: skip


def _switch_row(switch: EngineSwitch) -> tuple[object, ...]:
    words = (shown_line(word, 120) for word in (switch.worker, switch.to, switch.result))
    return duration(switch.t_s, 1), *words, number(switch.seconds, ",.2f", " s"), shown_line(switch.reason, 300)


streamed = per_run(
    "waves", "Waves and role switches", "Waves in which steps were trained while their trajectories were generated, and engines "
    "that switched to training and back, with the reason of each switch.", _streamed_of,
)  # fmt: skip


def _failures_of(run: ReportedRun) -> list[Part]:
    parts = [_failure_table(run)]
    if run.timeline.failed_attempts:
        counted = run.timeline.failed_attempts.most_common(MAX_DETAILS)
        found = [(f"{count:,}", failure, shown_line(detail, 300)) for (failure, detail), count in counted]
        parts.append(table(("attempts", "class", "detail"), found, (0,)))
    if run.timeline.troubles:
        rows = [
            (duration(each.t_s, 1), *(shown_line(word, 300) for word in facts.said(each.event)))
            for each in list(run.timeline.troubles)[-MAX_ROWS:]
        ]
        parts.append(table(("at", "trouble", "detail"), rows, (0,)))
    elif run.log_error:
        parts.append(piece("missing", f"Troubles of workers are not known: {run.log_error}."))
    return parts


def _failure_table(run: ReportedRun) -> Markup:
    ended = run.failures
    if ended is None or not run.columns:
        return piece("missing", f"{run.name}: {run.store_error}.")
    retried = Counter(cause for causes in run.columns["retried"].tolist() for cause in causes.split(",") if cause)
    if not ended and not retried:
        return piece("missing", f"No failure among {len(run.columns['failure']):,} trajectories.")
    rows = [
        (name, piece("figure", f"failure_{name}", run.name, f"{ended.get(name, 0):,}"), f"{retried[name]:,}")
        for name in sorted({*ended, *retried})
    ]
    return table(("class", "trajectories", "attempts tried again"), rows, (1, 2))


failures = per_run(
    "failures", "Failures", "Training trajectories that ended as failures, by class (only `policy` is trained on), repeated "
    "attempts, and troubles.", _failures_of,
)  # fmt: skip


def chosen_rows(columns: Mapping[str, Any]) -> dict[int, str]:
    """Store rows to show, with descriptions."""
    chosen: dict[int, str] = {}
    train = np.flatnonzero(columns["split"] == "train")
    if not len(train):
        return chosen
    iteration, reward = columns["iteration"][train], columns["reward"][train]
    for number_, name in ((int(iteration.min()), "first"), (int(iteration.max()), "last")):
        graded = train[(iteration == number_) & np.isfinite(reward)]
        for what, choose in (("best", np.argmax), ("worst", np.argmin)):
            if len(graded):
                chosen.setdefault(int(graded[choose(columns["reward"][graded])]), f"{what} of the {name} iteration")
    failed = np.flatnonzero(columns["failure"] != "none")
    if len(failed):
        chosen.setdefault(int(failed[-1]), "last failure")
    return chosen


def _samples_of(run: ReportedRun) -> list[Part]:
    if run.store is None or not run.columns:
        return [piece("missing", f"{run.name}: {run.store_error}.")]
    pieces, decode = [], None
    try:
        decode = load_decode(run.directory)
    except ModelError as error:
        pieces.append(piece("missing", f"Token ids are shown, not text: {error}"))
    for row, what in chosen_rows(run.columns).items():
        try:
            trajectory = run.store.trajectory(row)
        except StoreError as error:
            pieces.append(piece("missing", f"{what}: {error}"))
            continue
        words = trajectory_text(trajectory, decode, MAX_SAMPLE_CHARS)
        pieces.append(piece("details", f"{what}: {headline(trajectory)}", words, open=True))
    return [Markup().join(pieces) or piece("missing", f"{run.name}: no training trajectory is stored yet.")]


samples = per_run(
    "samples", "Samples", "The best and the worst trajectory of the first and the last iteration, and the last failure. Read text "
    "is grey.", _samples_of,
)  # fmt: skip


def settings(runs: Sequence[ReportedRun]) -> Section:
    """Settings of one run, or those that differ between runs."""
    if len(runs) == 1:
        dump = yaml.safe_dump(runs[0].config, sort_keys=False, allow_unicode=True)
        there = piece("details", "all settings", dump)
        part = there if runs[0].config else piece("missing", "The configuration cannot be read.")
        return Section("settings", "Settings", "The run's resolved configuration.", [part])
    flat = [dict(_flat(run.config)) for run in runs]
    names = sorted({name for values in flat for name in values})
    differ = [name for name in names if len({repr(values.get(name)) for values in flat}) > 1]
    rows = [(name, *(shown_line(str(values.get(name, "–")), 80) for values in flat)) for name in differ]
    head = ("setting", *(run.name for run in runs))
    part = table(head, rows) if rows else piece("missing", "All settings are equal.")
    return Section("settings", "Settings that differ", "Of the resolved configurations.", [part])


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value

"""Sections of the report made of tables and texts: decisions, failures, samples, settings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import yaml

from libra import facts
from libra.errors import ModelError, StoreError
from libra.observe.html import Html, duration, missing, named_number, percent, table, text
from libra.observe.inspect_page import headline, trajectory_text
from libra.observe.report.reported_run import ReportedRun
from libra.observe.report.section import Part, Section, for_each
from libra.observe.timeline.outcomes import Outcome
from libra.observe.timeline.recorded import Logged
from libra.observe.token_text import Decode, load_decode
from libra.untrusted import shown_line

MAX_ROWS: Final = 60
MAX_DETAILS: Final = 20
MAX_SAMPLE_CHARS: Final = 6000

# ---------------------------------------------------------------- decisions


def decisions(runs: Sequence[ReportedRun]) -> Section:
    """Plans, role changes and limits, with predicted and realised gain."""
    what = "What planner, roles and limits decided in the run, with the gain of a step that was predicted and the one that came."
    return Section("decisions", "Decisions", what, for_each(runs, _decisions_of))


def _decisions_of(run: ReportedRun) -> list[Part]:
    logged = list(run.timeline.decisions)
    if not logged:
        why = (
            run.log_error or "no layout was planned, no role changed and no limit was set (planner.replan, libra roles)"
        )
        return [missing(f"{run.name}: {why}.")]
    outcomes = run.timeline.outcomes.outcomes()
    rows = [_decision_row(each, outcomes) for each in logged[-MAX_ROWS:]]
    before = f" The {len(logged) - MAX_ROWS} before them are left out." if len(logged) > MAX_ROWS else ""
    note = f'<p class="soft">{len(rows)} decisions.{before}</p>'
    return [Html(note + table(("at", "decision", "predicted gain", "realised gain", "why"), rows, (0, 2, 3)).source)]


def _decision_row(logged: Logged, outcomes: Sequence[Outcome]) -> tuple[str, str, str, str, str]:
    what, why = facts.said(logged.event)
    predicted = realised = "–"
    if isinstance(logged.event, facts.PlanRealised):
        predicted, realised = percent(logged.event.predicted_gain_frac), percent(logged.event.realised_gain_frac)
    elif logged.outcome is not None:
        outcome = outcomes[logged.outcome]
        predicted, realised = outcome.predicted_words or predicted, outcome.realised_words
    return duration(logged.t_s), what, predicted, realised, shown_line(why, 300)


# ---------------------------------------------------------------- failures


def failures(runs: Sequence[ReportedRun]) -> Section:
    """Trajectories that failed, attempts that were repeated, and what happened to workers."""
    what = "Training trajectories that ended as failures, by class (only `policy` is trained on), repeated attempts, and troubles."
    return Section("failures", "Failures", what, for_each(runs, _failures_of))


def _failures_of(run: ReportedRun) -> list[Part]:
    parts: list[Part] = [_failure_table(run)]
    if run.timeline.failed_attempts:
        counted = run.timeline.failed_attempts.most_common(MAX_DETAILS)
        found = [(f"{count:,}", failure, shown_line(detail, 300)) for (failure, detail), count in counted]
        parts.append(table(("attempts", "class", "detail"), found, (0,)))
    if run.timeline.troubles:
        rows = [
            (duration(each.t_s), *(shown_line(word, 300) for word in facts.said(each.event)))
            for each in list(run.timeline.troubles)[-MAX_ROWS:]
        ]
        parts.append(table(("at", "what", "detail"), rows, (0,)))
    elif run.log_error:
        parts.append(missing(f"Troubles of workers are not known: {run.log_error}."))
    return parts


def failure_counts(run: ReportedRun) -> dict[str, int] | None:
    """Training trajectories that ended as failures, by class, as the page counts them; of the store where there is no log."""
    if run.log_error and not run.columns:
        return None
    ended = (
        Counter(run.columns["failure"][run.columns["split"] == "train"].tolist())
        if run.log_error
        else run.timeline.failures
    )
    return {name: count for name, count in ended.items() if count and name != "none"}


def _failure_table(run: ReportedRun) -> Html:
    ended = failure_counts(run)
    if ended is None or not run.columns:
        return missing(f"{run.name}: {run.store_error}.")
    retried = Counter(cause for causes in run.columns["retried"].tolist() for cause in causes.split(",") if cause)
    if not ended and not retried:
        return missing(f"No failure among {len(run.columns['failure']):,} trajectories.")
    names = sorted({*ended, *retried})
    counts = [named_number(f"failure_{name}", run.name, f"{ended.get(name, 0):,}") for name in names]
    rows = [(name, Html(count), f"{retried[name]:,}") for name, count in zip(names, counts, strict=True)]
    return table(("class", "trajectories", "attempts tried again"), rows, (1, 2))


# ---------------------------------------------------------------- samples


def samples(runs: Sequence[ReportedRun]) -> Section:
    """Texts of trajectories: the best, the worst, and one that failed."""
    what = "The best and the worst trajectory of the first and the last iteration, and the last failure. Read text is grey."
    return Section("samples", "Samples", what, for_each(runs, lambda run: [_samples_of(run)]))


def chosen_rows(columns: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """What is shown, and its row in the store; each row once."""
    seen: set[int] = set()
    train = np.flatnonzero(columns["split"] == "train")
    if not len(train):
        return
    iteration, reward = columns["iteration"][train], columns["reward"][train]
    for number_, name in ((int(iteration.min()), "first"), (int(iteration.max()), "last")):
        graded = train[(iteration == number_) & np.isfinite(reward)]
        for what, choose in (("best", np.argmax), ("worst", np.argmin)):
            if len(graded):
                row = int(graded[choose(columns["reward"][graded])])
                if row not in seen:
                    seen.add(row)
                    yield f"{what} of the {name} iteration", row
    failed = np.flatnonzero(columns["failure"] != "none")
    if len(failed) and int(failed[-1]) not in seen:
        yield "last failure", int(failed[-1])


def _samples_of(run: ReportedRun) -> Html:
    if run.store is None or not run.columns:
        return missing(f"{run.name}: {run.store_error}.")
    try:
        decode: Decode | None = load_decode(run.directory)
        note = ""
    except ModelError as error:
        decode, note = None, missing(f"Token ids are shown, not text: {error}").source
    pieces = []
    for what, row in chosen_rows(run.columns):
        try:
            trajectory = run.store.trajectory(row)
        except StoreError as error:
            pieces.append(missing(f"{what}: {error}").source)
            continue
        title = f"{what}: {headline(trajectory)}"
        pieces.append(
            f"<details open><summary>{text(title)}</summary>"
            f"<pre>{trajectory_text(trajectory, decode, MAX_SAMPLE_CHARS)}</pre></details>"
        )
    return Html(note + "".join(pieces)) if pieces else missing(f"{run.name}: no training trajectory is stored yet.")


# ---------------------------------------------------------------- settings


def settings(runs: Sequence[ReportedRun]) -> Section:
    """Settings of one run; of several, those that differ."""
    if len(runs) == 1:
        dump = yaml.safe_dump(runs[0].config, sort_keys=False, allow_unicode=True)
        body = f"<details><summary>all settings</summary><pre>{text(dump)}</pre></details>"
        part = Html(body) if runs[0].config else missing("The configuration cannot be read.")
        return Section("settings", "Settings", "The run's resolved configuration.", [part])
    flat = [dict(_flat(run.config)) for run in runs]
    names = sorted({name for values in flat for name in values})
    differ = [name for name in names if len({repr(values.get(name)) for values in flat}) > 1]
    rows = [(name, *(shown_line(str(values.get(name, "–")), 80) for values in flat)) for name in differ]
    part = table(("setting", *(run.name for run in runs)), rows) if rows else missing("All settings are equal.")
    return Section("settings", "Settings that differ", "Of the resolved configurations.", [part])


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value

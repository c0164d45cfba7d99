"""A section of the report: a heading, a line that explains it, and parts side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from libra.observe.html import Html, text
from libra.observe.report.reported_run import ReportedRun

Part = Any
"""`Html`, or a plot of Bokeh."""


class Section(NamedTuple):
    """``what`` explains the section in one line; ``parts`` stand side by side where the window is wide enough."""

    anchor: str
    title: str
    what: str
    parts: Sequence[Part]


def for_each(runs: Sequence[ReportedRun], make: Callable[[ReportedRun], Sequence[Part]]) -> list[Part]:
    """The parts of every run, under its name where there are several."""
    parts: list[Part] = []
    for run in runs:
        made = list(make(run))
        if len(runs) > 1 and made:
            made = [[Html(f"<h3>{text(run.name)}</h3>"), *made]]
        parts += made
    return parts


def label(runs: Sequence[ReportedRun], run: ReportedRun, what: str) -> str:
    """Label of a curve: what it is, and of which run where there are several."""
    from libra.observe.plots import plain

    return f"{plain(run.name)}: {what}" if len(runs) > 1 else what

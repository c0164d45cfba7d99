"""A section of the report: a heading, a line that explains it, and parts side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from markupsafe import Markup

from libra.observe.html import piece
from libra.observe.plots import plain
from libra.observe.report.reported_run import ReportedRun

Part = Any
"""HTML as `Markup`, or a model of Bokeh."""


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
            heading = piece("heading", run.name)
            made = [heading + made[0], *made[1:]] if isinstance(made[0], Markup) else [heading, *made]
        parts += made
    return parts


def label(runs: Sequence[ReportedRun], run: ReportedRun, what: str) -> str:
    """Label of a curve: what it is, and of which run where there are several."""
    return f"{plain(run.name)}: {what}" if len(runs) > 1 else what

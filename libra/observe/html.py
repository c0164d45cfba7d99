"""HTML of page, report and trajectories: jinja2 templates (``templates/``), and number formats.

1. Every value reaches HTML through a template, which escapes it and removes characters that could
   deceive a reader (`libra.untrusted.shown`). Only template output and Bokeh's scripts are inserted
   raw.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from libra.observe.timeline.states import BUSY, STATES
from libra.untrusted import shown, shown_line

STATE_COLORS: Final[Mapping[str, str]] = {
    "generating": "#3f7fc4", "acting": "#e08214", "training": "#2a9d6f", "turned": "#7cc29f", "moving": "#7b68b5",
    "starting": "#8fa1ab", "version": "#d4b13f", "trajectories": "#e3cf7a", "grading": "#c58b6b", "batch": "#a1887f",
    "tail": "#d06a6a", "tools": "#e6a57e", "dispatch": "#b85c8a", "no_calls": "#c3ccd1", "evaluation": "#8fb8de",
    "turning": "#c9a27e", "wave": "#d9c3a5", "returning": "#a67f5d",
    "role": "#6d5a4f", "lost": "#8e2430", "quarantined": "#5d1f2b", "lent": "#b0bec5", "nothing": "#aab4ba",
}  # fmt: skip
"""Colour of each worker state."""


def number(value: Any, spec: str = ",.3f", unit: str = "") -> str:
    """A formatted number with unit; a dash if missing or infinite."""
    if value is None or isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return "–"
    return f"{value:{spec}}{unit}"


def percent(share: float | None, digits: int = 1) -> str:
    """A share as percent."""
    return number(None if share is None else 100 * share, f".{digits}f", " %")


def duration(seconds: float | None, digits: int = 0) -> str:
    """Seconds as text, e.g. ``1 h 05 min``; ``digits`` decimals below one minute."""
    if seconds is None:
        return "–"
    if seconds < 60:
        return f"{math.floor(seconds * 10**digits) / 10**digits:.{digits}f} s"
    minutes, rest_s = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest_s:02d} s"


ENVIRONMENT: Final = Environment(
    loader=PackageLoader("libra.observe"), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
    lstrip_blocks=True, finalize=lambda value: value if isinstance(value, Markup) else shown(str(value)),
)  # fmt: skip
ENVIRONMENT.filters |= {"duration": duration, "percent": percent, "number": number, "line": shown_line}
ENVIRONMENT.globals |= {"STATES": STATES, "BUSY": BUSY, "COLORS": STATE_COLORS}
STYLESHEET: Final = ENVIRONMENT.get_template("style.css").render()
_SHARED: Final[Any] = ENVIRONMENT.get_template("shared.html").module


def render(template: str, **values: Any) -> Markup:
    """A rendered template of ``templates/``."""
    return Markup(ENVIRONMENT.get_template(template).render(**values))


def table(
    head: Sequence[str],
    rows: Iterable[Sequence[object]],
    numbers: Sequence[int] = (),
    names: Sequence[tuple[str, str]] = (),
) -> Markup:
    """A table: columns in ``numbers`` are right-aligned; ``names`` holds the name and class of each row."""
    return Markup(_SHARED.table(head, list(rows), numbers, names))


def piece(name: str, *values: Any, **named: Any) -> Markup:
    """A piece of ``templates/shared.html``, e.g. ``missing``: a sentence in place of a plot."""
    return Markup(getattr(_SHARED, name)(*values, **named))

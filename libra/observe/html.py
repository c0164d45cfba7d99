"""Pieces of the report's HTML. `text` is the border: every string from outside passes it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any, Final, NamedTuple

from libra.observe.color_scheme import COLORS
from libra.untrusted import shown

STYLE: Final = (
    COLORS
    + """
body { margin: 0; background: var(--back); color: var(--text); font: 15px/1.5 system-ui, Helvetica, Arial, sans-serif; }
main { max-width: 1280px; margin: 0 auto; padding: 20px; }
h1 { font-size: 24px; margin: 0 0 4px; } h2 { font-size: 18px; margin: 0 0 2px; } h3 { font-size: 14px; margin: 14px 0 6px; }
p { margin: 4px 0 10px; } .what, .soft { color: var(--soft); font-size: 13px; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 14px 18px; margin: 14px 0; }
nav { font-size: 13px; } nav a { color: var(--soft); margin-right: 12px; }
.side { display: grid; gap: 18px; grid-template-columns: repeat(auto-fit, minmax(min(100%, 480px), 1fr)); }
.side > div { min-width: 0; }
.tiles { display: flex; flex-wrap: wrap; gap: 8px; margin: 8px 0; }
.tile { flex: 1 1 116px; border: 1px solid var(--line); border-radius: 6px; padding: 6px 11px; }
.tile h4 { margin: 0; font-size: 11px; font-weight: 600; color: var(--soft); }
.tile b { display: block; font-size: 22px; line-height: 1.3; font-variant-numeric: tabular-nums; }
.tile small { font-size: 12px; color: var(--soft); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13px; }
th, td { padding: 3px 10px; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top; }
td.num, th.num { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
th { color: var(--soft); font-weight: 600; }
.swatch { display: inline-block; width: 11px; height: 11px; border-radius: 2px; margin-right: 6px; }
.label { white-space: nowrap; }
.missing { color: var(--soft); border-left: 3px solid var(--line); padding-left: 10px; }
.bad { color: var(--bad); }
pre { background: var(--code); border-radius: 6px; padding: 10px; white-space: pre-wrap; overflow-wrap: anywhere; font-size: 12px; }
pre i { font-style: normal; color: var(--soft); }
details > summary { cursor: pointer; font-size: 13px; }
"""
)


class Html(NamedTuple):
    """A piece of HTML that is safe to put into the page as it is."""

    source: str


def content_policy(*, scripts: bool) -> str:
    """What a page in one file may do, as an element of its head: no request to anywhere, and no scripts but its own, or none."""
    allowed = "script-src 'unsafe-inline'; " if scripts else ""
    rules = (
        f"default-src 'none'; {allowed}style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
    )
    return f'<meta http-equiv="Content-Security-Policy" content="{rules}">'


def text(value: object) -> str:
    """Any value as text of the page: markup is escaped, and nothing in it acts on the reader."""
    return escape(shown(str(value)))


def missing(why: str) -> Html:
    """A sentence in place of a plot; ``why`` may contain text from outside."""
    return Html(f'<p class="missing">{text(why)}</p>')


def named_number(name: str, run: str, value: str) -> str:
    """A number that a program can find in the page: ``data-libra`` and ``data-run``."""
    return f'<b data-libra="{text(name)}" data-run="{text(run)}">{text(value)}</b>'


def table(head: Sequence[str], rows: Iterable[Sequence[object | Html]], numbers: Sequence[int] = ()) -> Html:
    """A table; columns in ``numbers`` are right-aligned. A cell that is `Html` is put in as it is."""

    def cells(values: Sequence[object | Html], tag: str) -> str:
        return "".join(
            f"<{tag}{' class=num' if index in numbers else ''}>{value.source if isinstance(value, Html) else text(value)}</{tag}>"
            for index, value in enumerate(values)
        )

    body = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in rows)
    return Html(f'<div class="scroll"><table><tr>{cells(head, "th")}</tr>{body}</table></div>')


def swatch(color: str, label: str) -> Html:
    """A label with its colour."""
    return Html(
        f'<span class="label"><span class="swatch" style="background:{text(color)}"></span>{text(label)}</span>'
    )


def number(value: Any, spec: str = ",.3f", unit: str = "") -> str:
    """A number by its format, with its unit; a dash for what is missing or not finite."""
    if value is None or isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return "–"
    return f"{value:{spec}}{unit}"


def percent(share: float | None) -> str:
    """A share as percent, one digit after the point."""
    return "–" if share is None or not math.isfinite(share) else f"{100 * share:.1f} %"


def duration(seconds: float) -> str:
    """Seconds for readers, e.g. ``1 h 05 min``."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest_s = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest_s:02d} s"

"""What the Libra page says of single workers: those that cannot take part in a run, and those that can change roles.

Both are tables made from one snapshot, with nothing in them of a run all of whose workers take part and keep their roles.
A row's element has ``data-libra`` set to ``role-<worker>`` or ``not-ready-<worker>``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any, Final

Row = Mapping[str, Any]

SETTLED: Final = ("resupplied", "lost", "failed")
"""Stages in which no change is under way."""
_ROLE_HEAD: Final = ("Worker", "Role", "Stage", "For", "Under way", "Generation", "Last change took", "Reason")
_NOT_READY_HEAD: Final = ("Worker", "Not ready", "For", "What failed", "Started anew")


def duration(seconds: float) -> str:
    """Seconds as read by people, e.g. ``1 h 05 min``; whole units only, so that the text seldom changes."""
    minutes, rest_s = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest_s:02d} s" if minutes else f"{rest_s} s"


def workers_html(snapshot: Mapping[str, Any]) -> str:
    """The tables of one run; empty where there is nothing to say. A snapshot without ``roles`` or ``not_ready`` has none."""
    return not_ready_html(snapshot.get("not_ready") or ()) + roles_html(snapshot.get("roles") or ())


def roles_html(rows: Sequence[Row]) -> str:
    """One line per worker that can change its role: what it is or is becoming, since when, and why."""
    lines = []
    for row in rows:
        stage = row["stage"]
        cells = (
            row["worker"],
            _has(row["role"], row["tp"]),
            stage,
            _for(row.get("for_s")),
            _under_way(row),
            f"{row['generation']}",
            _took(row.get("seconds")),
            row.get("reason") or "",
        )
        mark = "bad" if stage in ("lost", "failed") else "" if stage in SETTLED else "shown"
        lines.append(_line(f"role-{row['worker']}", mark, cells))
    return _table("Workers that can change roles", _ROLE_HEAD, lines)


def not_ready_html(rows: Sequence[Row]) -> str:
    """One line per worker that is in the cluster and takes no part: it is being set up, or that failed."""
    lines = []
    for row in rows:
        again_s = row.get("again_in_s")
        again = "" if again_s is None else f"in {duration(again_s)}"
        cells = (row["worker"], row["stage"], _for(row.get("for_s")), row.get("detail") or "", again)
        lines.append(_line(f"not-ready-{row['worker']}", "bad" if row["stage"] == "failed" else "", cells))
    return _table("Workers that take no part", _NOT_READY_HEAD, lines)


def _under_way(row: Row) -> str:
    """From what to what a change leads that has not ended."""
    if row["stage"] in SETTLED:
        return ""
    before, after = _has(row["from_role"], row["from_tp"]), _has(row["role"], row["tp"])
    return f"{before} → {after}" if before != after else f"back to {after}"


def _has(role: str, tp: int) -> str:
    """A role as shown; the degree is an engine's."""
    return f"{role} TP {tp}" if role == "rollout" else role


def _for(seconds: float | None) -> str:
    return "–" if seconds is None or not math.isfinite(seconds) else duration(seconds)


def _took(seconds: float | None) -> str:
    return "–" if seconds is None or not math.isfinite(seconds) else f"{seconds:,.2f} s"


def _line(name: str, mark: str, cells: Iterable[str]) -> str:
    return (
        f'<tr data-libra="{escape(name)}" class="{mark}">'
        + "".join(f"<td>{escape(str(cell))}</td>" for cell in cells)
        + "</tr>"
    )


def _table(title: str, head: Iterable[str], lines: Sequence[str]) -> str:
    if not lines:
        return ""
    columns = "".join(f"<th>{name}</th>" for name in head)
    return f"<h4>{title}</h4><table><tr>{columns}</tr>{''.join(lines)}</table>"

"""HTML of the Libra page: tiles and tables made from snapshots; it computes no numbers.

Elements have ``data-libra`` attributes: the names of `libra.observe.page_snapshot.numbers`, ``role-<worker>``, and
``not-ready-<worker>``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from typing import Any, Final

from libra.observe.page_snapshot import Snapshot, numbers
from libra.untrusted import shown

Row = Mapping[str, Any]

SETTLED: Final = ("resupplied", "lost", "failed")
"""Stages without a change under way."""
_ROLE_HEAD: Final = ("Worker", "Role", "Stage", "For", "Under way", "Generation", "Last change took", "Reason")
_NOT_READY_HEAD: Final = ("Worker", "Not ready", "For", "What failed", "Next attempt")
_TITLES: Final = {
    "busy": "Busy",
    "iteration": "Iteration",
    "reward": "Mean reward",
    "tokens_per_s": "Tokens/s",
    "tokens": "Tokens",
    "groups": "Groups",
    "quanta_rollout": "Rollout quanta",
    "quanta_tool": "Tool quanta",
    "version": "Weights",
    "policy": "Policy",
    "failures": "Failures",
}

STYLESHEET: Final = """
:host { font-family: Helvetica, Arial, sans-serif; color: #263238; }
.bk-clearfix { width: 100%; }
.head { display: flex; align-items: baseline; gap: 14px; padding: 4px 4px 6px; }
.head b { font-size: 19px; } .head span { font-size: 13px; color: #607d8b; }
.tiles { display: flex; flex-wrap: wrap; gap: 8px; }
.tile { flex: 1 1 104px; background: #fff; border: 1px solid #e0e4e7; border-radius: 6px; padding: 7px 11px; }
.tile h4 { margin: 0; font-size: 10px; color: #607d8b; white-space: nowrap; text-transform: uppercase; }
.tile b { display: block; font-size: 22px; line-height: 1.3; font-variant-numeric: tabular-nums; }
.tile small { font-size: 11px; color: #78909c; }
.tile.bad b { color: #c62828; }
table { border-collapse: collapse; background: #fff; font-size: 13px; }
th, td { padding: 4px 14px; border: 1px solid #e0e4e7; text-align: right; font-variant-numeric: tabular-nums; }
th { color: #607d8b; font-weight: 600; } th:first-child, td:first-child { text-align: left; }
tr.shown td { background: #eaf1f8; } tr.bad td { color: #c62828; }
.bk-clearfix > h4 { margin: 6px 4px 3px; font-size: 11px; color: #607d8b; text-transform: uppercase; }
"""


def summary_html(snapshot: Snapshot) -> str:
    """The tiles of one run."""
    not_trained = any(count for name, count in snapshot["failures"].items() if name not in ("none", "policy"))
    tiles = []
    for name, (value, remark) in numbers(snapshot).items():
        bad = " bad" if name == "failures" and not_trained else ""
        tiles.append(
            f'<div class="tile{bad}"><h4>{_TITLES[name]}</h4><b data-libra="{name}">{escape(value)}</b>'
            f"<small>{escape(remark)}</small></div>"
        )
    return (
        f'<div class="head"><b data-libra="run">{escape(snapshot["run"])}</b>'
        f"<span>epoch {snapshot['epoch']}, up {duration(snapshot['uptime_s'])}</span></div>"
        f'<div class="tiles">{"".join(tiles)}</div>'
    )


def overview_html(snapshots: Sequence[Snapshot], shown: str) -> str:
    """A table with one line per run, empty if there is only one; ``shown`` is the run drawn below it."""
    if not snapshots:
        return (
            '<div class="head"><b>No run on this scheduler yet</b><span>start one with '
            "<code>libra run CONFIG --scheduler ADDRESS</code>; this page follows by itself</span></div>"
        )
    if len(snapshots) == 1:
        return ""
    columns = ("iteration", "reward", "tokens_per_s", "groups", "version", "failures")
    lines = []
    for snapshot in snapshots:
        cells, run = numbers(snapshot), snapshot["run"]
        lines.append(
            f'<tr class="{"shown" if run == shown else ""}"><td>{escape(run)}</td>'
            + "".join(f"<td>{escape(cells[name][0])}</td>" for name in columns)
            + f"<td>{duration(snapshot['uptime_s'])}</td></tr>"
        )
    head = "".join(f"<th>{_TITLES[name]}</th>" for name in columns)
    return f"<table><tr><th>Run</th>{head}<th>Up</th></tr>{''.join(lines)}</table>"


def duration(seconds: float) -> str:
    """Seconds for readers, e.g. ``1 h 05 min``; in whole units, so that the text seldom changes."""
    minutes, rest_s = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest_s:02d} s" if minutes else f"{rest_s} s"


def workers_html(snapshot: Mapping[str, Any]) -> str:
    """Tables of the workers that are not used by a run, and of those that can change roles; empty if there are none."""
    return _not_ready_html(snapshot.get("not_ready") or ()) + _roles_html(snapshot.get("roles") or ())


def _roles_html(rows: Sequence[Row]) -> str:
    """One line per worker that can change its role: role, stage of a change, its age and reason."""
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
            _for(row.get("seconds"), "{:,.2f} s".format),
            row.get("reason") or "",
        )
        mark = "bad" if stage in ("lost", "failed") else "" if stage in SETTLED else "shown"
        lines.append(_line(f"role-{row['worker']}", mark, cells))
    return _table("Workers that can change roles", _ROLE_HEAD, lines)


def _not_ready_html(rows: Sequence[Row]) -> str:
    """One line per worker of the cluster that is not used yet: its setup is running, or failed."""
    lines = []
    for row in rows:
        again_s = row.get("again_in_s")
        again = "" if again_s is None else f"in {duration(again_s)}"
        cells = (row["worker"], row["stage"], _for(row.get("for_s")), row.get("detail") or "", again)
        lines.append(_line(f"not-ready-{row['worker']}", "bad" if row["stage"] == "failed" else "", cells))
    return _table("Workers not used by the run", _NOT_READY_HEAD, lines)


def _under_way(row: Row) -> str:
    """Old and new role of a change that has not ended."""
    if row["stage"] in SETTLED:
        return ""
    before, after = _has(row["from_role"], row["from_tp"]), _has(row["role"], row["tp"])
    return f"{before} → {after}" if before != after else f"back to {after}"


def _has(role: str, tp: int) -> str:
    """A role as shown; the degree is an engine's."""
    return f"{role} TP {tp}" if role == "rollout" else role


def _for(seconds: float | None, shown: Callable[[float], str] = duration) -> str:
    return "–" if seconds is None or not math.isfinite(seconds) else shown(seconds)


def _line(name: str, mark: str, cells: Iterable[str]) -> str:
    return (
        f'<tr data-libra="{escape(shown(name))}" class="{mark}">'
        + "".join(f"<td>{escape(shown(str(cell)))}</td>" for cell in cells)
        + "</tr>"
    )


def _table(title: str, head: Iterable[str], lines: Sequence[str]) -> str:
    if not lines:
        return ""
    columns = "".join(f"<th>{name}</th>" for name in head)
    return f"<h4>{title}</h4><table><tr>{columns}</tr>{''.join(lines)}</table>"

"""HTML of the Libra page: where time went, tiles and tables, made from snapshots; it computes no numbers but shares of a bar.

Elements have ``data-libra`` attributes: the names of `libra.observe.page_snapshot.numbers`, ``share-<state>`` and ``now-<state>``,
``waves`` and ``wave-<number>``, ``worker-<worker>``, ``role-<worker>``, and ``not-ready-<worker>``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from typing import Any, Final

from libra.observe.page_snapshot import BUSY_WINDOW_S, Snapshot, duration, numbers
from libra.observe.state_colors import STATE_COLORS
from libra.observe.timeline.states import BUSY, STATES
from libra.observe.timeline.steps import groups_text
from libra.untrusted import shown, shown_line

Row = Mapping[str, Any]

MAX_WORKERS: Final = 64
"""Lines in the table of workers."""
SETTLED: Final = ("resupplied", "lost", "failed")
"""Stages without a change under way."""
_WORKER_HEAD: Final = ("Worker", "Kind", "Now", "Busy", "Time by state since the start", "Slots used", "Weights")
_ROLE_HEAD: Final = ("Worker", "Role", "Stage", "For", "Under way", "Generation", "Last change took", "Reason")
_WAVE_HEAD: Final = ("Wave", "Groups", "Trained in", "Engines that had turned")
_NOT_READY_HEAD: Final = ("Worker", "Not ready", "For", "What failed", "Next attempt")
_BUCKET_HEAD: Final = ("Bucket", "Engines", "Slots used", "Waiting", "At home", "Forecast: tokens left")
_KINDS: Final = {"engine": "engine", "trainer": "training", "tools": "tools"}
_TITLES: Final = {
    "reward": "Reward, training",
    "evaluation": "Reward, held out",
    "iteration": "Iteration",
    "left": "To go",
    "step": "Last step",
    "tokens_per_s": "Tokens/s",
    "waiting": "Waiting",
    "lag": "Lag",
    "version": "Weights",
    "failures": "Failures",
}
_COUNTS: Final = ("tokens", "groups", "quanta_rollout", "quanta_tool")

STYLESHEET: Final = """
:host { font: 14px/1.45 system-ui, Helvetica, Arial, sans-serif; color: var(--text); }
.bk-clearfix { width: 100%; }
.head { display: flex; flex-wrap: wrap; align-items: baseline; gap: 4px 14px; padding: 2px 2px 8px; }
.head b { font-size: 20px; } .head span, .soft { font-size: 13px; color: var(--soft); }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 10px 14px; }
.hero { display: flex; flex-wrap: wrap; gap: 8px 28px; margin-bottom: 8px; }
.hero .big { flex: 0 0 140px; } .hero .big b { display: block; font-size: 46px; line-height: 1.1; }
.hero .where { flex: 1 1 600px; min-width: 0; }
.hero h4, .tile h4 { margin: 0; font-size: 12px; font-weight: 600; color: var(--soft); white-space: nowrap; }
.line { display: flex; align-items: center; gap: 10px; font-size: 12px; color: var(--soft); margin: 3px 0; }
.line > span { flex: 0 0 96px; }
.bar { display: flex; flex: 1 1 auto; height: 18px; border-radius: 4px; overflow: hidden; background: var(--line); }
.bar i { display: block; } .slim { height: 10px; min-width: 160px; }
.states { display: grid; grid-template-columns: repeat(auto-fill, minmax(255px, 1fr)); gap: 3px 16px; margin-top: 6px;
  font-size: 12px; line-height: 1.3; }
.states b { font-variant-numeric: tabular-nums; } .states span { color: var(--soft); }
.swatch { display: inline-block; width: 10px; height: 10px; border-radius: 2px; margin-right: 6px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(206px, 1fr)); gap: 8px; }
.tile { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 6px 12px; }
.tile b { display: block; font-size: 23px; line-height: 1.3; font-variant-numeric: tabular-nums; }
.tile small { font-size: 12px; line-height: 1.3; color: var(--soft); display: block; }
.bad b, tr.bad td { color: var(--bad); }
.counts { font-size: 13px; color: var(--soft); padding: 7px 2px 0; } .counts b { color: var(--text); font-weight: 600; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13px; width: 100%; }
th, td { padding: 4px 10px; border-bottom: 1px solid var(--line); text-align: left; font-variant-numeric: tabular-nums; }
th { color: var(--soft); font-weight: 600; } tr:last-child td { border-bottom: 0; } td.num { white-space: nowrap; }
tr.shown td { background: var(--mark); }
.missing { color: var(--bad); margin: 0 2px 8px; }
h3 { margin: 0; font-size: 14px; } .what { margin: 0 0 4px; font-size: 12px; color: var(--soft); }
.card + .card { margin-top: 8px; }
"""


def summary_html(snapshot: Snapshot) -> str:
    """Head, where time went, and the tiles of one run."""
    figures = numbers(snapshot)
    not_trained = any(count for name, count in snapshot["failures"].items() if name not in ("none", "policy"))
    tiles = []
    for name, title in list(_TITLES.items())[1:]:
        value, remark = figures[name]
        bad = " bad" if name == "failures" and not_trained else ""
        tiles.append(
            f'<div class="tile{bad}"><h4>{title}</h4><b data-libra="{name}">{escape(value)}</b>'
            f"<small>{escape(remark)}</small></div>"
        )
    counts = " · ".join(f'<b data-libra="{n}">{escape(figures[n][0])}</b> {escape(figures[n][1])}' for n in _COUNTS)
    policy, trust = figures["policy"]
    start = f"start {snapshot['epoch'] + 1}, " if snapshot["epoch"] else ""
    return (
        f'<div class="head"><b data-libra="run">{escape(snapshot["run"])}</b>'
        f'<span>{start}<span data-libra="state">{escape(snapshot["state"])}</span>, {duration(snapshot["uptime_s"])}</span></div>'
        f'{_note(snapshot)}{_hero(snapshot, figures)}<div class="tiles">{"".join(tiles)}</div>'
        f'<div class="counts">{counts} · policy <b data-libra="policy">{escape(policy)}</b> {escape(trust)}</div>'
    )


def _note(snapshot: Snapshot) -> str:
    """What is missing of the records, if anything is."""
    note = snapshot.get("note")
    return f'<p class="missing" data-libra="note">{escape(shown(note))}</p>' if note else ""


def _hero(snapshot: Snapshot, figures: Mapping[str, tuple[str, str]]) -> str:
    """Reward and busy as the first numbers, and the shares of all states, over the run and now."""
    time = snapshot["time"]
    whole, now = time["shares"], time["now_shares"] if snapshot["state"] == "running" else {}
    lines = f'<div class="line"><span>over the run</span>{_bar(whole)}</div>' if whole else ""
    if now:
        lines += f'<div class="line"><span>last {BUSY_WINDOW_S:.0f} s</span>{_bar(now)}</div>'
    states = "".join(_state(state, whole.get(state, 0.0), now.get(state)) for state in STATES if state in whole)
    what = (
        "Time of all engines and training workers, by what they did or why they were idle."
        if whole
        else "Waits for the first worker."
    )
    first = "".join(
        f'<div class="big"><h4>{title}</h4><b data-libra="{name}">{escape(figures[name][0])}</b>'
        f'<span class="soft">{escape(figures[name][1])}</span></div>'
        for name, title in (("reward", _TITLES["reward"]), ("busy", "Busy"))
    )
    return (
        f'<div class="card hero">{first}<div class="where"><p class="what">{what}</p>{lines}'
        f'<div class="states">{states}</div></div></div>'
    )


def _bar(shares: Mapping[str, float], css: str = "bar") -> str:
    """A bar of all states' shares."""
    parts = (
        f'<i style="width:{100 * shares[state]:.2f}%;background:{STATE_COLORS[state]}" title="{state}: {STATES[state]}"></i>'
        for state in STATES
        if shares.get(state)
    )
    return f'<div class="{css}">{"".join(parts)}</div>'


def _state(state: str, share: float, now: float | None) -> str:
    """Swatch, shares and meaning of one state."""
    recent = "" if now is None else f' <span>(now <b data-libra="now-{state}">{100 * now:.0f} %</b>)</span>'
    idle = "" if state in BUSY else "idle: "
    return (
        f'<div title="{STATES[state]}"><span class="swatch" style="background:{STATE_COLORS[state]}"></span>{state} '
        f'<b data-libra="share-{state}">{100 * share:.1f} %</b>{recent} <span>{idle}{STATES[state]}</span></div>'
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
    titles = {**_TITLES, "groups": "Groups"}
    lines = []
    for snapshot in snapshots:
        cells, run = numbers(snapshot), snapshot["run"]
        lines.append(
            f'<tr class="{"shown" if run == shown else ""}"><td>{escape(run)}</td><td>{escape(cells["busy"][0])}</td>'
            + "".join(f"<td>{escape(cells[name][0])}</td>" for name in columns)
            + f"<td>{duration(snapshot['uptime_s'])}</td></tr>"
        )
    head = "".join(f"<th>{titles[name]}</th>" for name in columns)
    return f'<div class="card"><table><tr><th>Run</th><th>Busy</th>{head}<th>Up</th></tr>{"".join(lines)}</table></div>'


def decisions_html(snapshot: Snapshot) -> str:
    """The last decisions in words."""
    lines = [
        f'<tr><td class="num">{duration(t_s)}</td><td>{escape(what)}</td><td>{escape(why)}</td></tr>'
        for t_s, what, why in snapshot["decisions"]
    ]
    if not lines:
        return '<div class="card"><h3>Last decisions</h3><p class="what">Waits for the first trajectory.</p></div>'
    what = "What planner, roles, limits and policy decided last, and why; the newest first."
    return _table("Last decisions", what, ("At", "Decision", "Because"), lines)


def waves_html(snapshot: Snapshot) -> str:
    """The waves of the open step, or of the last one; nothing where steps are not streamed."""
    step = snapshot.get("waves")
    if step is None:
        return ""
    lines = [
        _line(
            f"wave-{row['wave']}",
            "",
            (row["wave"], groups_text(row["groups"], row["others"]), _trained_in(row["train_s"]), row["hybrids"]),
        )
        for row in step["waves"]
    ]
    what = f'<span data-libra="waves">{escape(waves_text(step))}</span>'
    return _table(f"Waves of step {step['step']}", what, _WAVE_HEAD, lines or [_line("wave-none", "", ("–",) * 4)])


def waves_text(step: Mapping[str, Any]) -> str:
    """How far a streamed step is."""
    in_wave = f", {step['in_wave']:,} in training now" if step["in_wave"] else ""
    missing = "" if step["taken"] else f", {step['missing']:,} in no wave yet"
    trained = f"{step['trained']:,} of {step['groups']:,} groups are trained{in_wave}{missing}"
    return f"{trained}; the step was taken." if step["taken"] else f"{trained}."


def _trained_in(seconds: float | None) -> str:
    return "in training" if seconds is None else f"{seconds:,.2f} s"


def workers_html(snapshot: Mapping[str, Any]) -> str:
    """Tables of workers: what each does; buckets of engines, changes of roles and what is not used yet, if there are any."""
    return (
        _workers(snapshot)
        + _buckets(snapshot.get("buckets") or ())
        + _roles_html(snapshot.get("roles") or ())
        + _not_ready_html(snapshot.get("not_ready") or ())
    )


def _workers(snapshot: Mapping[str, Any]) -> str:
    rows = [row for row in (snapshot.get("time") or {"workers": ()})["workers"] if row["seconds"]]
    served = (snapshot.get("versions") or {"served": {}})["served"]
    lines, running = [], snapshot.get("state") == "running"
    for row in rows[:MAX_WORKERS]:
        total = sum(row["seconds"].values())
        shares = {state: seconds / total for state, seconds in row["seconds"].items()} if total else {}
        state, slots, name = row.get("state", "") if running else "", row.get("slots_used_frac"), row["worker"]
        now = (
            f'<span class="swatch" style="background:{STATE_COLORS[state]}"></span>{state}'
            if state
            else "has left"
            if running
            else ""
        )
        version = f"v{served[name]}" if name in served else ""
        busy = f"{100 * row['busy_frac']:.0f} %"
        cells = (
            escape(shown_line(name, 60)), _KINDS.get(row["kind"], ""), now, busy, _bar(shares, "bar slim"),
            "" if slots is None else f"{100 * slots:.0f} %", version,
        )  # fmt: skip
        inside = "".join(f"<td>{cell}</td>" for cell in cells)
        lines.append(f'<tr data-libra="worker-{escape(shown(name))}">{inside}</tr>')
    more = f" The first {MAX_WORKERS} of {len(rows)}." if len(rows) > MAX_WORKERS else ""
    what = f"Each worker: what it does now, and its share of time by state (colours as above; hover to read).{more}"
    return _table("Workers", what, _WORKER_HEAD, lines)


def _buckets(rows: Sequence[Row]) -> str:
    """One line per bucket, where there are several: engines of different capacity."""
    if sum(row["bucket"] is not None for row in rows) < 2:
        return ""
    lines = []
    for row in rows:
        name = "no home yet" if row["bucket"] is None else row["bucket"] or "all engines"
        slots = f"{row['used']:,} of {row['slots']:,}"
        cells = (
            name,
            row["engines"],
            slots,
            f"{row['waiting']:,}",
            f"{row['at_home']:,}",
            f"{row['left_tokens']:,.0f}",
        )
        lines.append(_line(f"bucket-{name}", "", cells))
    what = (
        "Waiting and running trajectories by capacity class of their engines; a trajectory's home holds its KV cache."
    )
    return _table("Buckets of engines", what, _BUCKET_HEAD, lines)


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
    return _table("Workers that can change roles", "Role, and the stage of a change under way.", _ROLE_HEAD, lines)


def _not_ready_html(rows: Sequence[Row]) -> str:
    """One line per worker of the cluster that is not used yet: its setup is running, or failed."""
    lines = []
    for row in rows:
        again_s = row.get("again_in_s")
        again = "" if again_s is None else f"in {duration(again_s)}"
        cells = (row["worker"], row["stage"], _for(row.get("for_s")), row.get("detail") or "", again)
        lines.append(_line(f"not-ready-{row['worker']}", "bad" if row["stage"] == "failed" else "", cells))
    return _table("Workers not used by the run", "Their setup is running, or failed.", _NOT_READY_HEAD, lines)


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


def _line(name: str, mark: str, cells: Iterable[Any]) -> str:
    return (
        f'<tr data-libra="{escape(shown(name))}" class="{mark}">'
        + "".join(f"<td>{escape(shown(str(cell)))}</td>" for cell in cells)
        + "</tr>"
    )


def _table(title: str, what: str, head: Iterable[str], lines: Sequence[str]) -> str:
    """A card with a table; nothing without lines."""
    if not lines:
        return ""
    columns = "".join(f"<th>{name}</th>" for name in head)
    return (
        f'<div class="card"><h3>{title}</h3><p class="what">{what}</p>'
        f'<div class="scroll"><table><tr>{columns}</tr>{"".join(lines)}</table></div></div>'
    )

"""The Libra page of Dask's dashboard: ``/libra`` for people, ``/libra/state.json`` for programs.

Both show what ``snapshots()`` returns, one dict per run:

- ``run`` str, ``epoch`` int, ``uptime_s`` float, ``eta`` int (staleness bound), ``iterations`` int
- ``iteration`` int: newest whose gate opened, -1 before the first
- ``versions``: {"published": int, "served": {worker: int}}
- ``slots``: {phase: {"used": int, "total": int}}; ``queue``: {phase: {level: parked tasks}}
- ``buckets``: one row per rollout capacity class, see `libra.policy.Dispatcher.buckets`
- ``policy``: {"name", "objective", "skill", "weights": {signal: weight}, "outcomes": [[tokens believed at first, half way, and as
  they were], ...]}, of the orderings that have something to show
- ``roles``: one row per worker that can change its role, see `libra.scheduler.role_plugin.RolePlugin.roles`
- ``not_ready``: one row per worker that takes no part in the run, see `libra.scheduler.unready_workers.NotReady.rows`
- ``quanta``: {phase: finished}
- ``tokens`` int generated, ``groups`` int committed, ``failures`` {class: count}
- ``rewards``, ``lag``: [[iteration, mean], ...]
- ``history``: [(t_s, queued_rollout, queued_tool, used_rollout, used_tool, tokens), ...], oldest first

Invariants
----------
1. No number is made here, except the rates and totals of :func:`numbers`, which are functions of one snapshot.
2. However many people look, ``snapshots`` is called at most once per ``Feed.max_age_s``.
3. Attaching twice leaves one page, fed by the latest ``snapshots``.
4. Nothing here writes to the scheduler's state.
"""

from __future__ import annotations

import functools
import json
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any, Final

from tornado.ioloop import IOLoop
from tornado.web import RequestHandler

from libra.observe.page_workers import duration

if TYPE_CHECKING:
    from distributed import Scheduler

logger = logging.getLogger(__name__)

Snapshot = dict[str, Any]

RATE_WINDOW_S: Final = 10.0
"""Seconds of history that tokens per second is taken over."""


class Feed:
    """The latest snapshots, shared by every open page.

    Parameters
    ----------
    snapshots : callable
        Gives one dict per run.
    max_age_s : float
        How old an answer may be before ``snapshots`` is asked again.
    clock_s : callable
        Monotonic seconds.
    """

    def __init__(
        self,
        snapshots: Callable[[], list[Snapshot]],
        max_age_s: float = 0.4,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.snapshots = snapshots
        self.max_age_s = max_age_s
        self._clock_s = clock_s
        self._read_at_s = -math.inf
        self._latest: list[Snapshot] = []

    def read(self) -> list[Snapshot]:
        """Snapshots at most ``max_age_s`` old; not to be changed by the reader."""
        now_s = self._clock_s()
        if now_s - self._read_at_s >= self.max_age_s:
            self._latest = self.snapshots()
            self._read_at_s = now_s
        return self._latest

    def follow(self, snapshots: Callable[[], list[Snapshot]]) -> None:
        """Take another source from now on."""
        self.snapshots = snapshots
        self._read_at_s = -math.inf


class StateHandler(RequestHandler):
    """``GET /libra/state.json``: a JSON array of snapshots. Levels are strings, a number that is not finite is null."""

    def initialize(self, feed: Feed) -> None:
        self.feed = feed

    def get(self) -> None:
        self.set_header("Content-Type", "application/json; charset=utf-8")
        self.set_header("Cache-Control", "no-store")
        self.write(json.dumps(_finite(self.feed.read()), allow_nan=False))


def attach_page(scheduler: Scheduler, snapshots: Callable[[], list[Snapshot]], prefix: str = "") -> None:
    """Serve the Libra page and its JSON from a scheduler's dashboard. Call it on the scheduler's event loop.

    Without Bokeh, or with the dashboard switched off, there is no page but only the JSON, and the reason is logged.

    Parameters
    ----------
    scheduler : Scheduler
        One whose HTTP server has started.
    snapshots : callable
        Gives one dict per run; see the module's docstring. Called on the event loop, so it must be quick.
    prefix : str
        The scheduler's ``--dashboard-prefix``. Left empty, it is taken from the pages Dask already serves.
    """
    http = getattr(scheduler, "http_application", None)
    if http is None:
        logger.warning("no Libra page: this scheduler has no HTTP server")
        return
    existing: Feed | None = getattr(http, "libra_feed", None)
    if existing is not None:
        existing.follow(snapshots)
        return
    feed = http.libra_feed = Feed(snapshots)
    dashboards = [app for app in http.applications if hasattr(app, "app_paths") and hasattr(app, "prefix")]
    root = (prefix or (dashboards[0].prefix if dashboards else "")).strip("/")
    route = f"/{root}/libra/state.json" if root else "/libra/state.json"
    http.add_handlers(r".*", [(route.replace(".", r"\."), StateHandler, {"feed": feed})])
    if not dashboards:
        logger.warning("no Libra page: this scheduler runs without a dashboard (bokeh missing, or dashboard=False)")
        return
    try:
        from distributed.dashboard.core import BokehApplication
        from distributed.dashboard.scheduler import template_variables

        from libra.observe.page_document import libra_document
    except ImportError as error:
        logger.warning("no Libra page: %s; to have one, type: pip install bokeh", error)
        return
    variables = template_variables(
        scheduler
    )  # memoised per scheduler: its list of pages is the one every tab bar reads
    if "libra" not in variables["pages"]:
        variables["pages"].insert(1, "libra")
    page = BokehApplication(
        {"/libra": functools.partial(_serve, libra_document, feed)},
        scheduler,
        prefix=root,
        template_variables=variables,
    )
    http.add_application(page)
    page.initialize(IOLoop.current())
    page.start()
    logger.info("Libra page at %s", f"/{root}/libra" if root else "/libra")


def _serve(
    libra_document: Callable[..., None], feed: Feed, _scheduler: Scheduler, extra: dict[str, Any], doc: Any
) -> None:
    """Adapter to the arguments that Dask's BokehApplication passes."""
    libra_document(feed, extra, doc)


def tokens_per_s(history: Sequence[Sequence[float]], window_s: float = RATE_WINDOW_S) -> float:
    """Tokens generated per second over the last ``window_s`` of history, 0.0 where it is shorter than two samples."""
    if len(history) < 2:
        return 0.0
    last = history[-1]
    first = next(row for row in history if row[0] >= last[0] - window_s)
    return (last[5] - first[5]) / (last[0] - first[0]) if last[0] > first[0] else 0.0


def numbers(snapshot: Snapshot) -> dict[str, tuple[str, str]]:
    """What the page says in figures about one run: name -> (value, remark), both as shown."""
    published, served = snapshot["versions"]["published"], snapshot["versions"]["served"]
    rewards, quanta, failures = snapshot["rewards"], snapshot["quanta"], snapshot["failures"]
    failed = {name: count for name, count in failures.items() if count and name != "none"}
    iteration = snapshot["iteration"]
    behind = sum(version < published for version in served.values())
    return {
        "iteration": (
            f"{iteration}" if iteration >= 0 else "–",
            f"of 0–{snapshot['iterations'] - 1}, lag bound {snapshot['eta']}",
        ),
        "reward": (
            _reward(rewards[-1][1]) if rewards else "–",
            f"in {rewards[-1][0]}; {_reward(rewards[0][1])} in {rewards[0][0]}" if rewards else "none finished",
        ),
        "tokens_per_s": (f"{tokens_per_s(snapshot['history']):,.0f}", f"last {RATE_WINDOW_S:.0f} s"),
        "tokens": (f"{snapshot['tokens']:,}", "generated in all"),
        "groups": (f"{snapshot['groups']:,}", "committed"),
        "quanta_rollout": (f"{quanta.get('ROLLOUT', 0):,}", "generations finished"),
        "quanta_tool": (f"{quanta.get('TOOL', 0):,}", "actions finished"),
        "version": (
            f"v{published}",
            f"on {len(served) - behind} of {len(served)} engines" if served else "on no engine yet",
        ),
        "policy": (snapshot["policy"]["name"], _trust(snapshot["policy"])),
        "failures": (
            f"{sum(failed.values()):,}",
            ", ".join(f"{name} {count:,}" for name, count in sorted(failed.items())) or "no trajectory failed",
        ),
    }


def _trust(policy: Mapping[str, Any]) -> str:
    """How far an ordering follows its forecasts, in words."""
    if policy["skill"] is None:
        return policy["objective"] or "no forecasts"
    if policy["skill"] <= 0:
        return f"{policy['objective']}, forecasts not trusted yet"
    followed = ", ".join(f"{name} {weight:.2f}" for name, weight in policy["weights"].items() if weight >= 0.005)
    return f"{policy['objective']}, skill {policy['skill']:.2f} ({followed or 'progress'})"


def _reward(mean: float | None) -> str:
    """A mean reward as shown; a dash where no trajectory of the iteration could be graded."""
    return "–" if mean is None or math.isnan(mean) else f"{mean:.3f}"


_TITLES: Final = {
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
    """The row of numbers of one run. Each is in an element with ``data-libra`` set to its name in :func:`numbers`."""
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
    """A table with one line per run, empty where there is but one; ``shown`` is the run drawn below it."""
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


def _finite(value: Any) -> Any:
    """The same value as strict JSON can hold it: keys as strings, NaN and infinities as None."""
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value

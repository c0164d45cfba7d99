"""Dashboard page and metrics of a scheduler: ``/libra``, ``/libra/state.json`` and ``/metrics``.

`METRICS` declares each metric once; the Grafana board (``configs/grafana_board.json``) uses these
names. Without ``prometheus_client``, neither Dask nor Libra serves metrics.

1. Page, JSON and metrics all show ``snapshots()`` (`libra.observe.page_snapshots`).
2. Attaching twice leaves one page, fed by the latest ``snapshots``.
3. Nothing here writes to the scheduler's state.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import msgspec
from tornado.ioloop import IOLoop
from tornado.web import RequestHandler

from libra.errors import pip_install
from libra.observe.page_snapshots import Feed, Snapshot, tokens_per_s
from libra.types import Phase

logger = logging.getLogger(__name__)

Sample = tuple[tuple[str, ...], float | None]
"""Label values after ``run``, and the number (None without a value)."""


class Metric(NamedTuple):
    """One metric: the name ends with its unit, or a counter's with ``_total``; the first label is run."""

    name: str
    kind: Literal["gauge", "counter"]
    help: str
    labels: tuple[str, ...]
    samples: Callable[[Mapping[str, Any]], Iterator[Sample]]


def _one(read: Callable[[Mapping[str, Any]], float | None]) -> Callable[[Mapping[str, Any]], Iterator[Sample]]:
    return lambda snapshot: iter([((), read(snapshot))])


def _by(read: Callable[[Mapping[str, Any]], Mapping[Any, Any]]) -> Callable[[Mapping[str, Any]], Iterator[Sample]]:
    return lambda snapshot: (((str(name),), value) for name, value in read(snapshot).items())


def _worker_seconds(snapshot: Mapping[str, Any]) -> Iterator[Sample]:
    for row in snapshot["time"]["workers"]:
        for state, seconds in row["seconds"].items():
            yield (row["worker"], row["kind"], state), seconds


def _waiting(snapshot: Mapping[str, Any]) -> Iterator[Sample]:
    for phase in Phase:
        levels = snapshot["queue"].get(phase) or {}
        yield from (((str(phase), str(level)), count) for level, count in (levels or {0: 0}).items())


METRICS: Final = (
    Metric("libra_busy_ratio", "gauge", "Share of the time of engines and training workers in which they were busy, by window "
           "(run: since the start; now: the last minute).", ("window",),
           _by(lambda s: {"run": s["time"]["busy_frac"], "now": s["time"]["now_busy_frac"]})),
    Metric("libra_worker_seconds", "gauge", "Seconds of each worker by state; docs/observe.md has the states. Not a counter: a "
           "step's end relabels its last seconds.", ("worker", "kind", "state"), _worker_seconds),
    Metric("libra_iteration", "gauge", "Newest iteration whose gate opened; -1 before the first.", (),
           _one(lambda s: s["iteration"])),
    Metric("libra_iterations", "gauge", "Iterations of the run.", (), _one(lambda s: s["iterations"])),
    Metric("libra_reward", "gauge", "Mean reward of the last finished iteration.", (),
           _one(lambda s: s["rewards"][-1][1] if s["rewards"] else None)),
    Metric("libra_lag_versions", "gauge", "Mean lag of the tokens that the last finished iteration trained on.", (),
           _one(lambda s: s["lag"][-1][1] if s["lag"] else None)),
    Metric("libra_generated_tokens", "counter", "Generated tokens.", (), _one(lambda s: s["tokens"])),
    Metric("libra_generated_tokens_per_second", "gauge", "Generated tokens per second, of the last ten seconds.", (),
           _one(lambda s: tokens_per_s(s["history"]))),
    Metric("libra_quanta", "counter", "Finished quanta by phase.", ("phase",), _by(lambda s: s["quanta"])),
    Metric("libra_groups_committed", "counter", "Committed groups of training prompts.", (), _one(lambda s: s["groups"])),
    Metric("libra_failures", "counter", "Trajectories of committed training groups that ended so.", ("failure",),
           _by(lambda s: {name: count for name, count in s["failures"].items() if name != "none"})),
    Metric("libra_waiting_trajectories", "gauge", "Waiting trajectories by phase and level.", ("phase", "level"), _waiting),
    Metric("libra_slots", "gauge", "Slots of the run's workers by phase.", ("phase",),
           _by(lambda s: {phase: row["total"] for phase, row in s["slots"].items()})),
    Metric("libra_slots_used", "gauge", "Slots that the run uses, by phase.", ("phase",),
           _by(lambda s: {phase: row["used"] for phase, row in s["slots"].items()})),
    Metric("libra_published_version", "gauge", "Newest published version of the weights.", (),
           _one(lambda s: s["versions"]["published"])),
    Metric("libra_served_version", "gauge", "Version that each engine serves.", ("worker",),
           _by(lambda s: s["versions"]["served"])),
    Metric("libra_forecast_skill_ratio", "gauge", "Skill of the policy's forecasts, at most 1.", (),
           _one(lambda s: s["policy"]["skill"])),
    Metric("libra_uptime_seconds", "gauge", "Seconds since this start of the run.", (), _one(lambda s: s["uptime_s"])),
)  # fmt: skip
"""All metrics of Libra."""


class Collector:
    """Prometheus collector over all runs in the feed's newest snapshots."""

    def __init__(self, feed: Feed) -> None:
        self.feed = feed

    def describe(self) -> list[Any]:
        """Nothing: registration must not read snapshots."""
        return []

    def collect(self) -> Iterator[Any]:
        """Metric families with the samples of all runs."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        snapshots = self.feed.read()
        for metric in METRICS:
            family = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            made = family(metric.name, metric.help, labels=["run", *metric.labels])
            for snapshot in snapshots:
                for labels, value in metric.samples(snapshot):
                    if value is not None:
                        made.add_metric([str(label) for label in (snapshot["run"], *labels)], float(value))
            yield made


_collector: list[Collector] = []
"""The registered collector: the registry belongs to the process, which may have several schedulers."""


def export(feed: Feed) -> bool:
    """Serve the feed's metrics on ``/metrics``; False without ``prometheus_client``."""
    try:
        from prometheus_client import REGISTRY
    except ImportError:
        logger.debug("no Prometheus metrics: prometheus_client is not installed; %s", pip_install("metrics"))
        return False
    if _collector:
        _collector[0].feed = feed
    else:
        _collector.append(Collector(feed))
        REGISTRY.register(_collector[0])
    return True


if TYPE_CHECKING:
    from distributed import Scheduler


class StateHandler(RequestHandler):
    """``GET /libra/state.json``: a JSON array of snapshots; levels are strings, NaN is null."""

    def initialize(self, feed: Feed) -> None:
        self.feed = feed

    def get(self) -> None:
        self.set_header("Content-Type", "application/json; charset=utf-8")
        self.set_header("Cache-Control", "no-store")
        self.write(msgspec.json.encode(self.feed.read()))


def attach_page(scheduler: Scheduler, snapshots: Callable[[], list[Snapshot]], prefix: str = "") -> None:
    """Serve page, JSON and metrics on a scheduler's dashboard; call on its event loop.

    ``snapshots`` returns one snapshot per run and must be quick, as it runs on the event loop.
    ``prefix`` is the scheduler's ``--dashboard-prefix``; if empty, Dask's own pages provide it.
    Without Bokeh or a dashboard, only JSON and metrics are served, and the reason is logged.
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
    export(feed)
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

        from libra.observe.page_document import dashboard_document
    except ImportError as error:
        logger.warning("no Libra page: %s; to have one, type: pip install bokeh", error)
        return
    variables = template_variables(scheduler)  # memoised per scheduler: every tab bar reads its list of pages
    if "libra" not in variables["pages"]:
        variables["pages"].insert(1, "libra")
    documents = {"/libra": lambda _scheduler, extra, doc: dashboard_document(feed, extra, doc)}
    page = BokehApplication(documents, scheduler, prefix=root, template_variables=variables)
    http.add_application(page)
    page.initialize(IOLoop.current())
    page.start()
    logger.info("Libra page at %s", f"/{root}/libra" if root else "/libra")

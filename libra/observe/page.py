"""The Libra page of Dask's dashboard: ``/libra`` as HTML, ``/libra/state.json`` for programs.

Invariants
----------
1. Both show what ``snapshots()`` returns (`libra.observe.snapshots`).
2. Attaching twice leaves one page, fed by the latest ``snapshots``.
3. Nothing here writes to the scheduler's state.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
from tornado.ioloop import IOLoop
from tornado.web import RequestHandler

from libra.observe.prometheus import export
from libra.observe.snapshots import Feed, Snapshot

if TYPE_CHECKING:
    from distributed import Scheduler

logger = logging.getLogger(__name__)


class StateHandler(RequestHandler):
    """``GET /libra/state.json``: a JSON array of snapshots. Levels are strings, a number that is not finite is null."""

    def initialize(self, feed: Feed) -> None:
        self.feed = feed

    def get(self) -> None:
        self.set_header("Content-Type", "application/json; charset=utf-8")
        self.set_header("Cache-Control", "no-store")
        self.write(msgspec.json.encode(self.feed.read()))


def attach_page(scheduler: Scheduler, snapshots: Callable[[], list[Snapshot]], prefix: str = "") -> None:
    """Serve the Libra page and its JSON from a scheduler's dashboard. Call it on the scheduler's event loop.

    Without Bokeh, or with the dashboard switched off, there is no page but only the JSON, and the reason is logged.

    Parameters
    ----------
    scheduler : Scheduler
        One whose HTTP server has started.
    snapshots : callable
        Gives one snapshot per run. Called on the event loop, so it must be quick.
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
    page = BokehApplication(
        {"/libra": functools.partial(_serve, dashboard_document, feed)},
        scheduler,
        prefix=root,
        template_variables=variables,
    )
    http.add_application(page)
    page.initialize(IOLoop.current())
    page.start()
    logger.info("Libra page at %s", f"/{root}/libra" if root else "/libra")


def _serve(document: Callable[..., None], feed: Feed, _scheduler: Scheduler, extra: dict[str, Any], doc: Any) -> None:
    """Adapter to the arguments that Dask's BokehApplication passes."""
    document(feed, extra, doc)

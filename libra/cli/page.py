"""`libra page`: the page of a run, served from its records."""

from __future__ import annotations

import errno
import logging
from pathlib import Path
from typing import TYPE_CHECKING

import click

from libra.errors import ConfigError

if TYPE_CHECKING:
    from bokeh.server.server import Server

DEFAULT_PORT = 8788


@click.command()
@click.argument("run_dir", metavar="RUN", type=click.Path(path_type=Path))
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    help=f"Port on 127.0.0.1; 0: any free one. Default: {DEFAULT_PORT}, or a free one if it is taken.",
)
def page(run_dir: Path, port: int | None) -> None:
    """Serve the page of RUN from its event log and records, on this machine only, until Ctrl-C.

    It is the page that a running run has in Dask's dashboard. RUN may have finished, been stopped, or be running; then the page
    follows its files. They are read, never written.

    \b
    libra page runs/my_run
    libra page runs/my_run --port 9000
    """
    from libra.observe.run_directory import check_run_directory

    directory = check_run_directory(run_dir, "page")
    for quiet in ("bokeh", "tornado.access"):  # a refused request is told to who made it
        logging.getLogger(quiet).setLevel(logging.CRITICAL)
    server = page_server(directory, DEFAULT_PORT if port is None else port, any_other=port is None)
    click.echo(f"{directory}: http://127.0.0.1:{server.port}/libra (Ctrl-C ends it)")
    try:
        server.io_loop.start()
    except KeyboardInterrupt:
        click.echo(f"\nended; to see it again, type: libra page {directory}")


def page_server(directory: Path, port: int, *, any_other: bool = False) -> Server:
    """A started server of one run's page, for its ``io_loop``; ConfigError if the port is taken, unless ``any_other`` will do.

    It is reached from this machine only, and answers to its names only (`libra.cluster.page_names`).
    """
    from bokeh.application import Application
    from bokeh.application.handlers.function import FunctionHandler
    from bokeh.server.server import Server
    from tornado.web import RedirectHandler

    from libra.cluster.page_names import check_names
    from libra.observe.page import StateHandler
    from libra.observe.page_document import libra_document
    from libra.observe.recorded_run import RecordedRun
    from libra.observe.snapshots import Feed

    feed = Feed(RecordedRun(directory).snapshots, max_age_s=1.0)
    feed.read()  # a large log is read before the address is told
    shown = Application(FunctionHandler(lambda doc: libra_document(feed, doc)))
    patterns = [
        ("/", RedirectHandler, {"url": "/libra", "permanent": False}),
        (r"/libra/state\.json", StateHandler, {"feed": feed}),
    ]
    try:
        # Bokeh's list of origins cannot have every name of the machine; `check_names` looks at them instead.
        server = Server(
            {"/libra": shown}, address="127.0.0.1", port=port, allow_websocket_origin=["*"], extra_patterns=patterns,
            use_index=False, check_unused_sessions_milliseconds=5000, unused_session_lifetime_milliseconds=15000,
        )  # fmt: skip
    except OSError as error:
        if error.errno != errno.EADDRINUSE and error.errno != errno.EACCES:
            raise
        if any_other:
            return page_server(directory, 0)
        raise ConfigError(
            f"--port {port}: cannot be used on 127.0.0.1 ({error.strerror}); name another one, or 0 for any free one: "
            f"libra page {directory} --port 0"
        ) from error
    check_names(server._tornado)
    server.start()
    return server

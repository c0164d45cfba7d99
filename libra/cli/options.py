"""Arguments that several commands have."""

from __future__ import annotations

import click

CONFIG = click.argument("config", metavar="CONFIG")
OVERRIDES = click.argument("overrides", metavar="[FILE | SECTION.KEY=VALUE]...", nargs=-1)
SCHEDULER = click.option(
    "--scheduler", metavar="ADDR", help="A running Dask scheduler: tls://HOST:8786, or a cluster.json of libra cluster."
)
VERBOSE = click.option("-v", "--verbose", is_flag=True, help="Log every decision to standard error.")

"""Shared arguments and options, aligned tables, and warnings about ignored settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from libra.config import RunConfig
    from libra.config.effects import CommandName

PATH = click.Path(path_type=Path)
CONFIG = click.argument("config", metavar="CONFIG")
OVERRIDES = click.argument("overrides", metavar="[FILE | SECTION.KEY=VALUE]...", nargs=-1)
SCHEDULER = click.option(
    "--scheduler", metavar="ADDR", help="A running Dask scheduler: tls://HOST:8786, or a cluster.json of libra cluster."
)
RUN = click.argument("run_dir", metavar="RUN", type=PATH)
JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON; of several results, one object a line.")
VERBOSE = click.option("-v", "--verbose", is_flag=True, help="Log every decision to standard error.")


def aligned(rows: Sequence[Sequence[object]], *, num_left: int) -> Iterator[str]:
    """Lines of a table: the first ``num_left`` columns are left-aligned, the others right-aligned."""
    from libra.untrusted import shown_line

    cells = [[shown_line(str(cell)) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        pairs = enumerate(zip(row, widths, strict=True))
        yield "  ".join(f"{cell:{'<' if i < num_left else '>'}{width}}" for i, (cell, width) in pairs).rstrip()


def warn_of_ignored(
    config: RunConfig,
    command: CommandName | None,
    overrides: Sequence[str] = (),
    options: Mapping[str, object] | None = None,
) -> None:
    """Warn of settings that ``command`` ignores; ``options`` None and false are not given."""
    from libra.config.effects import Situation, ignored_settings, warning_lines

    situation = Situation(
        command=command,
        typed=frozenset(override.partition("=")[0].strip() for override in overrides),
        options=frozenset(name for name, value in (options or {}).items() if value not in (None, False, ())),
    )
    for line in warning_lines(ignored_settings(config, situation)):
        click.secho(f"libra: warning: {line}", fg="yellow", err=True)

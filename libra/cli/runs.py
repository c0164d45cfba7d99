"""`libra runs`: the runs in a directory, one a line."""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from libra.observe.run_directory import RunSummaryRow

HEAD = ("run", "state", "iterations", "reward", "held out", "changed", "size")


@click.command()
@click.argument("directory", metavar="[DIR]", required=False, type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a line.")
def runs(directory: Path | None, as_json: bool) -> None:
    """List the runs in DIR (default: runs), the newest first: state, iterations, last rewards, last change, size.

    A run is finished when all its iterations and its last evaluation have ended. Without that evaluation it is unevaluated, and
    libra resume RUN makes it.

    \b
    libra runs
    libra runs /shared/runs --json
    """
    from libra.observe.run_directory import list_runs

    directory = directory if directory is not None else Path("runs")
    rows = list_runs(directory)
    if as_json:
        for row in rows:
            click.echo(json.dumps(asdict(row), default=str))
        return
    if not rows:
        click.echo(f"{directory}: no run here; libra run CONFIG makes one")
        return
    click.echo("\n".join(table_lines(rows)))


def table_lines(rows: list[RunSummaryRow]) -> list[str]:
    """The table, at most 80 columns wide unless a name needs more."""
    from libra.untrusted import shown_line

    cells = [HEAD, *(_cells(row) for row in rows)]
    cells = [tuple(shown_line(cell) for cell in line) for line in cells]
    widths = [max(len(line[column]) for line in cells) for column in range(len(HEAD))]
    return [
        "  ".join(
            cell.ljust(width) if column < 2 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in cells
    ]


def _cells(row: RunSummaryRow) -> tuple[str, ...]:
    of = f" of {row.of_iterations}" if row.of_iterations else ""
    return (
        row.directory.name,
        row.state,
        f"{row.iterations}{of}",
        "-" if row.reward is None else f"{row.reward:.3f}",
        "-" if row.evaluation is None else f"{row.evaluation:.3f}",
        f"{datetime.fromtimestamp(row.changed_s):%Y-%m-%d %H:%M}",
        _size(row.size_bytes),
    )


def _size(num_bytes: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000 or unit == "GB":
            break
        num_bytes /= 1000
    return f"{num_bytes:.1f} {unit}" if unit != "B" else f"{num_bytes:.0f} B"

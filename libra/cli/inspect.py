"""`libra inspect`: trajectories of a run, in the terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click


@click.command()
@click.argument("run_dir", metavar="RUN", type=click.Path(path_type=Path))
@click.option("--index", type=int, help="Position in the store, from 0; negative counts from the end.")
@click.option("--split", type=click.Choice(["train", "eval"]), help="Only training or only held-out prompts.")
@click.option("--iteration", type=int, help="Only this iteration; for held-out prompts, the weight version.")
@click.option("--group", type=int, help="Only this group.")
@click.option("--sample", type=int, help="Only this sample of each group.")
@click.option("--failed", is_flag=True, help="Only trajectories with a failure class.")
@click.option("--order", type=click.Choice(["best", "worst"]), help="Sort by reward, instead of as stored.")
@click.option("--tokens", is_flag=True, help="Show every token with its log-probability and weight version.")
@click.option(
    "--limit",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Trajectories to print; 1 in a terminal steps through all of them.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, one trajectory a line.")
@click.option(
    "--html",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write the first --limit of them to FILE as one page.",
)
def inspect(run_dir: Path, **choice: Any) -> None:
    """Step through the trajectories of RUN, a run directory: text, tool calls, reward, and why each ended."""
    from libra.observe.inspect import inspect_run

    inspect_run(run_dir, **choice)

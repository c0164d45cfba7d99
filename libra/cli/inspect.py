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
@click.option(
    "--invariants",
    is_flag=True,
    help="Count what breaks the run's promises: lag, consumed once, DORA's conditions, lengths. Exit 1 if one is broken.",
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
    if choice.pop("invariants"):
        _check_invariants(run_dir, choice)
        return
    from libra.observe.inspect import inspect_run

    inspect_run(run_dir, **choice)


def _check_invariants(run_dir: Path, choice: dict[str, Any]) -> None:
    """Print the verdict on each promise of a run; exit 1 if one is broken."""
    as_json = choice.pop("as_json")
    unset = {"limit": 1}
    if others := [f"--{name}" for name, value in choice.items() if value != unset.get(name) and value is not False]:
        raise click.UsageError(f"--invariants counts all trajectories of the run; leave out {', '.join(others)}")
    import json

    from libra.observe.invariants import as_rows, check_invariants

    promises = check_invariants(run_dir)
    for promise, row in zip(promises, as_rows(promises), strict=True):
        click.echo(json.dumps(row) if as_json else str(promise))
    if any(promise.verdict == "BROKEN" for promise in promises):
        raise click.exceptions.Exit(1)

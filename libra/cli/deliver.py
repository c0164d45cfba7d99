"""``libra deliver``: a late reward from the command line."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("run_dir", metavar="RUN", type=click.Path(path_type=Path))
@click.argument("trajectory")
@click.argument("value", type=float)
def deliver(run_dir: Path, trajectory: str, value: float) -> None:
    """Deliver VALUE as the reward of TRAJECTORY (train-ITERATION-GROUP-SAMPLE), whose reward function returned libra.Late.

    The first delivery counts, in the next batch of RUN, which need not be running. A negative VALUE comes after "--".

    \b
    libra deliver runs/my_run train-3-0-7 1.0
    libra deliver runs/my_run train-3-0-7 -- -0.5
    """
    from libra.driver.late_delivery import deliver as record

    click.echo(record(trajectory, value, run=run_dir))

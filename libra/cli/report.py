"""`libra report` and `libra trace`: a finished or running run as one HTML page, and as a trace for Perfetto."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("run_dirs", metavar="RUN [RUN]...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "-o",
    "output",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Default: RUN/report.html of the first RUN.",
)
@click.option(
    "--prices",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Prices per GPU-hour and core-hour, instead of Libra's list.",
)
@click.option(
    "--gpu", metavar="NAME", help="The kind of GPU that the runs used, for their cost: H100-80G, or a name in FILE."
)
def report(run_dirs: tuple[Path, ...], output: Path | None, prices: Path | None, gpu: str | None) -> None:
    """Write one HTML page about RUN, or about several runs side by side; it needs no network, and opens in any browser.

    It shows rewards, where worker time went by cause and what it cost, workers and turns over time, lengths, forecasts against
    truth, decisions with predicted and realised gain, mismatch, failures and samples. A running run is shown as far as it is.

    \b
    libra report runs/my_run
    libra report runs/one runs/other -o compared.html
    libra report runs/my_run --prices prices.yaml --gpu H100-80G
    """
    from libra.hardware.prices import load_prices
    from libra.observe.run_directory import check_run_directory

    directories = [check_run_directory(directory, "report") for directory in run_dirs]
    loaded = load_prices(prices)
    from libra.observe.report import write_report

    target = output if output is not None else directories[0] / "report.html"
    runs = write_report(directories, target, loaded, gpu=gpu)
    for run in runs:
        if run.log_error:
            click.secho(f"libra: warning: {run.directory}: {run.log_error}", fg="yellow", err=True)
    click.echo(f"{target}: {target.stat().st_size / 1e6:.1f} MB, {', '.join(run.name for run in runs)}")


@click.command()
@click.argument("run_dir", metavar="RUN", type=click.Path(path_type=Path))
@click.option(
    "-o",
    "output",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Default: RUN/trace.json; .json.gz is compressed.",
)
def trace(run_dir: Path, output: Path | None) -> None:
    """Write the event log of RUN as a trace; open it at https://ui.perfetto.dev or in chrome://tracing.

    Each worker is a process with its state, its weight syncs and the turns in its slots; steps, versions and the counters of
    open and waiting trajectories are in the process `run`.

    \b
    libra trace runs/my_run
    libra trace runs/my_run -o trace.json.gz
    """
    from libra.cli.replay import event_log_path
    from libra.observe.run_directory import read_config
    from libra.observe.timeline.recorded import read_log, trainers_of
    from libra.observe.trace import write_trace

    path = event_log_path(run_dir, "trace")
    target = output if output is not None else run_dir / "trace.json"
    count = write_trace(read_log(path), target, trainers_of(read_config(run_dir)))
    click.echo(f"{target}: {count:,} lines, {target.stat().st_size / 1e6:.1f} MB; open it at https://ui.perfetto.dev")

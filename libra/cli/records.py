"""Commands for runs' records: ``runs``, ``report``, ``trace``, ``page``, ``inspect``, ``diagnose``."""

from __future__ import annotations

import errno
import json
import logging
from collections.abc import Iterator
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from libra.cli.arguments import JSON, PATH, RUN, aligned
from libra.errors import ConfigError

if TYPE_CHECKING:
    from bokeh.server.server import Server

    from libra.observe.mismatch_diagnosis import Diagnosis, LayerFinding
    from libra.observe.run_directory import RunSummaryRow

HEAD = ("run", "state", "iterations", "reward", "held out", "changed", "size")
FILE = click.Path(path_type=Path, dir_okay=False)


@click.command()
@click.argument("directory", metavar="[DIR]", default="runs", type=PATH)
@JSON
def runs(directory: Path, as_json: bool) -> None:
    """List the runs in DIR (default: runs), the newest first: state, iterations, last rewards, last change, size.

    A run is finished when all its iterations and its last evaluation have ended. Without that evaluation it is unevaluated, and
    libra resume RUN makes it.

    \b
    libra runs
    libra runs /shared/runs --json
    """
    from libra.observe.run_directory import list_runs

    rows = list_runs(directory)
    if as_json:
        for row in rows:
            click.echo(json.dumps(asdict(row), default=str))
    elif rows:
        click.echo("\n".join(aligned([HEAD, *map(_cells, rows)], num_left=2)))
    else:
        click.echo(f"{directory}: no run here; libra run CONFIG makes one")


def _cells(row: RunSummaryRow) -> tuple[str, ...]:
    size, unit = float(row.size_bytes), "B"
    for larger in ("kB", "MB", "GB"):
        if size >= 1000:
            size, unit = size / 1000, larger
    return (
        row.directory.name, row.state, f"{row.iterations}" + (f" of {row.of_iterations}" if row.of_iterations else ""),
        *("-" if reward is None else f"{reward:.3f}" for reward in (row.reward, row.evaluation)),
        f"{datetime.fromtimestamp(row.changed_s):%Y-%m-%d %H:%M}", f"{size:.{int(unit != 'B')}f} {unit}",
    )  # fmt: skip


@click.command()
@click.argument("run_dirs", metavar="RUN [RUN]...", nargs=-1, required=True, type=PATH)
@click.option("-o", "output", type=FILE, metavar="FILE", help="Default: RUN/report.html of the first RUN.")
@click.option("--prices", type=PATH, metavar="FILE", help="Prices per GPU-hour and core-hour, instead of Libra's list.")
@click.option(
    "--gpu", metavar="NAME", help="The kind of GPU that the runs used, for their cost: H100-80G, or a name in FILE."
)
def report(run_dirs: tuple[Path, ...], output: Path | None, prices: Path | None, gpu: str | None) -> None:
    """Write one HTML page about RUN, or about several runs side by side; it needs no network, and opens in any browser.

    It shows rewards, worker time by cause with its cost, workers and turns over time, lengths, forecasts against truth,
    decisions with predicted and realised gain, mismatch, failures and samples. A running run is shown up to now.

    \b
    libra report runs/my_run
    libra report runs/one runs/other -o compared.html
    libra report runs/my_run --prices prices.yaml --gpu H100-80G
    """
    from libra.hardware.gpus import load_prices
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
@RUN
@click.option("-o", "output", type=FILE, metavar="FILE", help="Default: RUN/trace.json; .json.gz is compressed.")
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


DEFAULT_PORT = 8788


@click.command()
@RUN
@click.option(
    "--port", type=click.IntRange(0, 65535),
    help=f"Port on 127.0.0.1; 0: any free one. Default: {DEFAULT_PORT}, or a free one if it is taken.",
)  # fmt: skip
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
    for quiet in ("bokeh", "tornado.access"):  # the requester gets the refusal
        logging.getLogger(quiet).setLevel(logging.CRITICAL)
    server = page_server(directory, DEFAULT_PORT if port is None else port, any_other=port is None)
    click.echo(f"{directory}: http://127.0.0.1:{server.port}/libra (Ctrl-C ends it)")
    try:
        server.io_loop.start()
    except KeyboardInterrupt:
        click.echo(f"\nended; to see it again, type: libra page {directory}")


def page_server(directory: Path, port: int, *, any_other: bool = False) -> Server:
    """A started page server; ConfigError for a taken port, unless ``any_other`` is allowed.

    Reachable from this machine only, under its own names only (`libra.cluster.page_names`).
    """
    from bokeh.application import Application
    from bokeh.application.handlers.function import FunctionHandler
    from bokeh.server.server import Server
    from tornado.web import RedirectHandler

    from libra.cluster.page_names import check_names
    from libra.observe.endpoints import StateHandler
    from libra.observe.page_document import libra_document
    from libra.observe.page_snapshots import Feed
    from libra.observe.recorded_run import RecordedRun

    feed = Feed(RecordedRun(directory).snapshots, max_age_s=1.0)
    feed.read()  # read a large log before printing the address
    shown = Application(FunctionHandler(lambda doc: libra_document(feed, doc)))
    redirect = ("/", RedirectHandler, {"url": "/libra", "permanent": False})
    patterns = [redirect, (r"/libra/state\.json", StateHandler, {"feed": feed})]
    try:
        # Bokeh's list of origins cannot hold all names of the machine; `check_names` checks them instead.
        server = Server(
            {"/libra": shown}, address="127.0.0.1", port=port, allow_websocket_origin=["*"], extra_patterns=patterns,
            use_index=False, check_unused_sessions_milliseconds=5000, unused_session_lifetime_milliseconds=15000,
        )  # fmt: skip
    except OSError as error:
        if error.errno not in (errno.EADDRINUSE, errno.EACCES):
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


@click.command()
@RUN
@click.option("--index", type=int, help="Position in the store, from 0; negative counts from the end.")
@click.option("--split", type=click.Choice(["train", "eval"]), help="Only training or only held-out prompts.")
@click.option("--iteration", type=int, help="Only this iteration; for held-out prompts, the weight version.")
@click.option("--group", type=int, help="Only this group.")
@click.option("--sample", type=int, help="Only this sample of each group.")
@click.option("--failed", is_flag=True, help="Only trajectories with a failure class.")
@click.option("--order", type=click.Choice(["best", "worst"]), help="Sort by reward, instead of as stored.")
@click.option("--tokens", is_flag=True, help="Show every token with its log-probability and weight version.")
@click.option(
    "--limit", type=click.IntRange(1), default=1, show_default=True,
    help="Trajectories to print; 1 in a terminal steps through all of them.",
)  # fmt: skip
@click.option(
    "--invariants", is_flag=True,
    help="Count violations of the run's promises: lag, consumed once, DORA's conditions, lengths. Exit 1 if one is broken.",
)  # fmt: skip
@JSON
@click.option("--html", type=FILE, metavar="FILE", help="Write the first --limit of them to FILE as one page.")
def inspect(run_dir: Path, **choice: Any) -> None:
    """Step through the trajectories of RUN, a run directory: text, tool calls, reward, and why each ended."""
    if choice.pop("invariants"):
        _check_invariants(run_dir, **choice)
        return
    from libra.observe.inspect import inspect_run

    inspect_run(run_dir, **choice)


def _check_invariants(run_dir: Path, *, as_json: bool, limit: int, **choice: Any) -> None:
    choice["limit"] = limit != 1
    if others := [f"--{name}" for name, value in choice.items() if value not in (None, False)]:
        raise click.UsageError(f"--invariants counts all trajectories of the run; leave out {', '.join(others)}")
    from libra.observe.invariants import check_invariants

    promises = check_invariants(run_dir)
    for promise in promises:
        click.echo(json.dumps(asdict(promise) | {"verdict": promise.verdict}) if as_json else str(promise))
    if any(promise.verdict == "BROKEN" for promise in promises):
        raise click.exceptions.Exit(1)


@click.command()
@RUN
@click.option("--above", type=click.FloatRange(0, min_open=True), metavar="NATS", help="k3 above which a step counts.")
@click.option("--tokens", type=click.IntRange(1, 16), default=5, show_default=True, help="Tokens to show of a step.")
@JSON
def diagnose(run_dir: Path, above: float | None, tokens: int, as_json: bool) -> None:
    """Find where engine and trainer of RUN begin to disagree: step, version, engines, tokens, and the layer.

    Read are the records of its steps, its version checks and its tokens. The threshold is --above, else
    trainer.mismatch_args.k3, else 100 times k3 of the first steps. The layer is known where an engine failed a check: in runs
    with a mismatch alarm engines are checked again before they leave a version. Exit code 1 if a step is above.

    \b
    libra diagnose runs/NAME
    libra diagnose runs/NAME --above 1e-3 --json
    """
    import msgspec

    from libra.observe.mismatch_diagnosis import diagnose as find

    found = find(run_dir, above=above, num_tokens=tokens)
    click.echo(msgspec.json.encode(found) if as_json else "\n".join(lines(found)))
    if found.first is not None:
        raise click.exceptions.Exit(1)


def lines(found: Diagnosis) -> Iterator[str]:
    """The diagnosis as text; characters from models cannot control the terminal."""
    from libra.untrusted import shown_line

    for name in found.damaged:
        yield f"steps/{shown_line(name)} is damaged, and left out"
    limit = f"{found.threshold:.3g} nats ({found.threshold_from})"
    if found.first is None:
        yield f"no mismatch: k3 is within {limit} at each of {found.steps} steps"
        return
    yield f"step {found.first}: k3 is above {limit} for the first time, and up to step {found.last}"
    yield f"version {found.first}: step s trains version s, and only tokens of version s count in it"
    yield ""
    yield f"{'':28}{'from step':>10}{'tokens':>8}{'mean gap':>11}{'k3':>11}{'k3, last step':>15}"
    for part in found.parts:
        yield (
            f"{shown_line(part.name):28}{part.first_step:>10}{part.tokens:>8}{part.mean_abs:>11.3g}{part.k3:>11.3g}"
            f"{part.last_k3:>15.3g}"
        )
    yield ""
    for token in found.tokens:
        text = f"token id {token.token_id}" if token.text is None else repr(shown_line(token.text))
        before = "" if token.before is None else f" after {shown_line(token.before)[-60:]!r}"
        yield (
            f"step {token.step}, {token.trajectory}, token {token.token} by {shown_line(token.engine)}: log p engine "
            f"{token.rollout:.4f}, trainer {token.trainer:.4f}: {text}{before}"
        )
    yield ""
    yield from (_layer(layer) for layer in found.layers)
    if not found.layers and found.checked:
        yield (
            f"layers: no check failed, {found.checked} were passed before a version was left: the weights are right, so look at "
            "sampling, KV cache, attention and types"
        )
    elif not found.layers:
        yield "layers: not known, no engine was checked again; set trainer.mismatch_args.k3, and engines are"


def _layer(layer: LayerFinding) -> str:
    from libra.untrusted import shown_line

    when = "after its load" if layer.loading else "when it left the version, after it had passed the check at its load"
    gap = "no number" if layer.gap is None else f"{layer.gap:.3g}"
    more = "" if layer.checks == 1 else f"; {layer.checks} such checks failed, the last of version {layer.last_version}"
    return (
        f"layer {shown_line(layer.layer)}: {shown_line(layer.worker)} disagrees with version {layer.version} {when}: "
        f"{layer.method} {gap}, allowed {layer.tolerance:.3g}{more}"
    )

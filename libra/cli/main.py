"""The ``libra`` command; subcommands import torch, dask and pydantic only when run.

An error becomes one message and an exit code: 2 for `LibraError` (1 for `BatchFailed`), 130 for
Ctrl-C. ``LIBRA_TRACEBACK=1`` keeps the tracebacks of Libra's errors.
"""

from __future__ import annotations

import os
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import click

from libra.cli.clusters import cluster, deliver, roles
from libra.cli.doctor import doctor
from libra.cli.predictions import calibrate, plan, replay, simulate
from libra.cli.projects import config, init
from libra.cli.records import diagnose, inspect, page, report, runs, trace
from libra.cli.run import repair, resume, run
from libra.errors import BatchFailed, LibraError

EXIT_FAILED, EXIT_ERROR, EXIT_INTERRUPTED = 1, 2, 130


def installed_version() -> str:
    """Version of the installed package; "unknown" in a source tree that is not installed."""
    try:
        return version("libra-rl")
    except PackageNotFoundError:
        return "unknown (not installed)"


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(installed_version(), prog_name="libra")
def cli() -> None:
    """Train language models with agentic reinforcement learning, as Dask graphs.

    \b
    Start with:  libra run libra/quickstart
    """


for _command in (
    calibrate, cluster, config, deliver, diagnose, doctor, init, inspect, page, plan, repair, replay, report, resume, roles,
    run, runs, simulate, trace,
):  # fmt: skip
    cli.add_command(_command)


def _show_error(text: str) -> None:
    from libra.untrusted import shown  # here: `libra --help` imports only what it needs

    click.secho(f"libra: {shown(text)}", fg="red", err=True)


def _usage_words(error: click.ClickException) -> str:
    text = " ".join(error.format_message().split())
    context = getattr(error, "ctx", None)
    return text if context is None else f"{text.removesuffix('.')}; type {context.command_path} --help for its usage"


def main(arguments: list[str] | None = None) -> None:
    """Entry point of ``libra``; always raises SystemExit.

    Modules named in a configuration are searched in the working directory last, so that no
    installed module is hidden.
    """
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)
    try:
        code = cli.main(args=arguments, prog_name="libra", standalone_mode=False)
    except LibraError as error:
        if os.environ.get("LIBRA_TRACEBACK") == "1":
            raise
        _show_error(str(error))
        code = EXIT_FAILED if isinstance(error, BatchFailed) else EXIT_ERROR
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        code = error.exit_code
    except click.ClickException as error:
        _show_error(_usage_words(error))
        code = error.exit_code
    except (KeyboardInterrupt, click.Abort):
        _show_error("interrupted")
        code = EXIT_INTERRUPTED
    sys.exit(code if isinstance(code, int) else 0)

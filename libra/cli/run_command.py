"""``libra run`` and ``libra resume``: a line at once, the stages of the start, the run, and its closing lines."""

from __future__ import annotations

import logging
import os
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from libra.cluster import fork_server
from libra.cluster.worker_environment import inherited_environment
from libra.config.model_paths import model_line
from libra.driver.interruption import Interruption, resume_words, with_overrides
from libra.errors import LibraError
from libra.observe.start_stages import StartStages

if TYPE_CHECKING:
    from libra.config import RunConfig


def run_to_its_end(config: RunConfig, *, resume: bool, verbose: bool, overrides: Sequence[str] = ()) -> None:
    """Run or resume a configuration, which has a name, to its end, and print the summary; LibraError is one message.

    ``overrides``: those of a run that is resumed, which its own configuration does not have.
    """
    stages = StartStages(enabled=config.observe.progress)
    directory = (Path(config.run.dir) / (config.run.name or "")).absolute()
    with Interruption(command=True, overrides=overrides) as interruption:
        interruption.of(directory, resume_words(directory, given=False))
        stages.say(
            f"{config.run.name}: {config.run.iterations} iterations of {model_line(config.model.path)}, in {directory}"
        )
        if config.planner.layout == "configured":  # else the layout, which decides what workers do, is not known yet
            fork_server.begin(config, inherited_environment(config))
        stages.begin("libraries")
        from libra.cli.log_lines import log_to_stderr
        from libra.cli.plan import shown_layout
        from libra.cli.run_ending import closing_lines
        from libra.driver.session import run

        log_to_stderr(logging.INFO if verbose else logging.WARNING)
        try:
            config = shown_layout(config)
            summary = run(config, resume=resume, interruption=interruption, stages=stages)
        except LibraError:
            raise
        except Exception as error:  # the boundary to the terminal: any other error is a line there, too
            raise _in_one_line(error, directory, overrides) from error
        click.echo("\n".join(closing_lines(summary, config)))


def _in_one_line(error: Exception, directory: Path, overrides: Sequence[str]) -> Exception:
    """The error with the place of its traceback and what to type; itself where tracebacks are wanted."""
    log = directory / "logs" / "driver.log"
    if os.environ.get("LIBRA_TRACEBACK") == "1":
        return error
    text = f"{type(error).__name__}: {(str(error).strip().splitlines() or ['without a message'])[0]}"
    if not log.exists():
        return LibraError(f"{text}; type LIBRA_TRACEBACK=1 before the command for its traceback")
    with log.open("a") as file:
        file.write(
            f"{time.strftime('%Y-%m-%d %H:%M:%S')} the run ended with\n{''.join(traceback.format_exception(error))}"
        )
    again = with_overrides(resume_words(directory, given=False), overrides)
    return LibraError(f"{text}; its traceback is in {log}. To try again from what is committed, type {again}")

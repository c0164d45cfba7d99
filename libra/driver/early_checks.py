"""What is refused before torch and Dask are imported: names and paths that are wrong, and an engine that is not installed.

A start checks all of it again, with the rest (`libra.driver.run_start.prepare`).
"""

from __future__ import annotations

import time
from pathlib import Path

from libra import keys
from libra.config import RunConfig, resolve_model
from libra.config.engine_package import check_installed
from libra.config.model_paths import model_line
from libra.driver.run_directory import check_free


def named(config: RunConfig) -> RunConfig:
    """``config`` with a name for its run, by the time of day where it has none."""
    name = keys.check_run_name(config.run.name or time.strftime("run_%Y%m%d_%H%M%S"))
    return config.model_copy(update={"run": config.run.model_copy(update={"name": name})})


def run_directory(config: RunConfig) -> Path:
    """The directory of a run that has a name."""
    return (Path(config.run.dir) / (config.run.name or "")).absolute()


def first_line(config: RunConfig) -> str:
    """What a run is, in the first line that it writes."""
    count, model = config.run.iterations, model_line(config.model.path)
    return f"{config.run.name}: {count} iteration{'s' * (count != 1)} of {model}, in {run_directory(config)}"


def check_early(config: RunConfig, *, resume: bool, starts_workers: bool, given: bool) -> None:
    """LibraError for what a look at names and files finds; ``given``: the environment is an object."""
    if not resume:
        check_free(run_directory(config))
    resolve_model(config.model.path)
    if starts_workers and config.rollout.engine == "vllm":
        check_installed()
    if not given:
        from libra.envs.registry import check_named

        check_named(config.environment.name, config.environment.args)

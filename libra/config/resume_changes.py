"""The configuration of a resumed run: unchanged, except for settings that may change."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from libra.config.load import load_config
from libra.config.run_config import RunConfig
from libra.errors import ConfigError, RunDirectoryError

RESOLVED_FILE = "config.resolved.yaml"
FREE_SECTIONS = (
    "policy",
    "cluster",
    "observe",
    "checkpoint",
    "store",
    "weights",
    "watchdog",
    "planner",
    "simulation",
    "slurm",
)
"""Sections about execution, display and retention: they do not change the result of a run."""
FREE_FIELDS = (
    "run.iterations",
    "run.dir",
    "run.name",
    "environment.retries",
    "services.device_gib",
    "rollout.tp",
    "rollout.engine_args",
    "trainer.max_row_tokens",
    "trainer.micro_batch_tokens",
    "trainer.mismatch_alarm",
    "trainer.mismatch_k3_alarm",
    "trainer.mismatch_action",
    "trainer.no_signal",
)
"""Further fields that may change."""


def load_resumed(run_dir: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Configuration of the run in ``run_dir``, with overrides of what may change.

    Raises
    ------
    RunDirectoryError
        There is no run in ``run_dir``.
    ConfigError
        An override is wrong, or changes a field that would change the result.
    """
    directory = run_dir.expanduser().absolute()
    file = directory / RESOLVED_FILE
    if not file.is_file():
        raise RunDirectoryError(
            f"{run_dir}: no run here, it has no {RESOLVED_FILE}; type the directory of a run, such as runs/NAME"
        )
    here = {"name": directory.name, "dir": directory.parent}
    config = load_config(file, overrides)
    config = config.model_copy(update={"run": config.run.model_copy(update=here)})
    check_unchanged(directory, config)
    return config


def check_unchanged(directory: Path, config: RunConfig) -> RunConfig:
    """The configuration that the run in ``directory`` was started with; ConfigError naming the first field in which ``config``
    differs from it and must not."""
    file = directory / RESOLVED_FILE
    was = load_config(file)
    before, after = _flat(was.model_dump()), _flat(config.model_dump())
    for name in sorted(before.keys() | after.keys()):
        if name in FREE_FIELDS or name.split(".")[0] in FREE_SECTIONS:
            continue
        if before.get(name) != after.get(name):
            raise ConfigError(
                f"{name}: the run was started with {before.get(name)!r}, got {after.get(name)!r}; a resumed run keeps it. "
                f"For a run with another value type libra run {file} {name}=... run.name=ANOTHER_NAME "
                f"--from {directory / 'checkpoints' / 'best'}"
            )
    return was


def _flat(values: dict[str, Any]) -> dict[str, Any]:
    return {f"{section}.{name}": value for section, fields in values.items() for name, value in fields.items()}

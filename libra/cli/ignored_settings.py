"""Warnings of settings that change nothing, on standard error before a command begins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from libra.config import RunConfig
    from libra.config.effect_conditions import CommandName


def tell_ignored(
    config: RunConfig,
    command: CommandName | None,
    overrides: Sequence[str] = (),
    options: Mapping[str, object] | None = None,
) -> None:
    """Say which settings of ``config`` have no effect in ``command``.

    ``options`` are the command's own, by name; those that are neither None nor false count as given.
    """
    from libra.config.effect_conditions import Situation
    from libra.config.effects import ignored_settings, warning_lines

    situation = Situation(
        command=command,
        typed=frozenset(override.partition("=")[0].strip() for override in overrides),
        options=frozenset(name for name, value in (options or {}).items() if value not in (None, False, ())),
        has_gpu=_machine_has_gpu if command == "run" and config.cluster.scheduler is None else None,
    )
    for line in warning_lines(ignored_settings(config, situation)):
        click.secho(f"libra: warning: {line}", fg="yellow", err=True)


def _machine_has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()

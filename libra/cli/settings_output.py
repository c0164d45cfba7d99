"""Output about settings: those without effect, and the reference of all."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from libra.config import RunConfig
    from libra.config.effect_conditions import CommandName


def warn_of_ignored(
    config: RunConfig,
    command: CommandName | None,
    overrides: Sequence[str] = (),
    options: Mapping[str, object] | None = None,
) -> None:
    """Warn of settings of ``config`` without effect in ``command``; of its ``options``, None and false count as not given."""
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
    from libra.cluster.fork_server import may_have_gpu

    if sys.platform == "linux" and not may_have_gpu():
        return False
    import torch  # seconds

    return torch.cuda.is_available()


def print_fields() -> None:
    """Print every section and key with its type, default and description."""
    from rich.console import Console
    from rich.padding import Padding
    from rich.text import Text

    from libra.config.field_help import field_references, sections

    console = Console()
    for section_name, section in sections().items():
        console.print(Text.assemble((section_name, "bold cyan"), "  ", " ".join((section.__doc__ or "").split())))
        for name, field in field_references().items():
            if name.startswith(f"{section_name}."):
                console.print(Text.assemble("  ", (name, "bold"), f" = {field.default}  ", (field.allowed, "dim")))
                console.print(Padding(Text(field.description), (0, 0, 0, 6)))
        console.print()

"""``libra init`` and ``libra config``, arguments that several commands share, and warnings of settings without effect."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

import click

from libra.errors import ConfigError, shell_path

if TYPE_CHECKING:
    from libra.config import RunConfig
    from libra.config.effect_conditions import CommandName

CONFIG = click.argument("config", metavar="CONFIG")
OVERRIDES = click.argument("overrides", metavar="[FILE | SECTION.KEY=VALUE]...", nargs=-1)
SCHEDULER = click.option(
    "--scheduler", metavar="ADDR", help="A running Dask scheduler: tls://HOST:8786, or a cluster.json of libra cluster."
)
VERBOSE = click.option("-v", "--verbose", is_flag=True, help="Log every decision to standard error.")

FILES = {
    "config.yaml": "config.yaml",
    "my_environment.py": "my_environment.py.in",
    "test_my_environment.py": "test_my_environment.py.in",
}
"""Files of a project, with the names of their texts in ``libra/assets/starter``."""


def make_project(directory: Path) -> list[str]:
    """Write the files into ``directory``, which is made if it is missing; lines that say what to type next.

    ConfigError if one of them is there already, or ``directory`` cannot be written.
    """
    taken = [name for name in FILES if (directory / name).exists()]
    if taken:
        raise ConfigError(
            f"{directory}: {', '.join(taken)} is there already, and libra init never overwrites a file; type libra init ANOTHER_DIR"
        )
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, source in FILES.items():
            text = files("libra").joinpath("assets", "starter", source).read_text(encoding="utf-8")
            (directory / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{directory}: cannot be written: {error.strerror or error}; type libra init DIR with another directory"
        ) from error
    return [
        f"{directory}: {', '.join(FILES)}",
        f"type: cd {shell_path(directory)} && libra run config.yaml, and pytest for its test",
    ]


@click.command()
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
def init(directory: Path) -> None:
    """Write a starter project into DIR: a configuration, an environment of your own, and its test.

    \b
    libra init my_project && cd my_project && libra run config.yaml
    """
    click.echo("\n".join(make_project(directory)))


@click.command()
@click.argument("config", metavar="CONFIG", required=False)
@OVERRIDES
@click.option("--fields", is_flag=True, help="Show every key with its type, default and description.")
def config(config: str | None, overrides: tuple[str, ...], fields: bool) -> None:
    """Print the configuration that CONFIG and the overrides resolve to, as YAML, or describe every key (--fields)."""
    if fields:
        print_fields()
        return
    if config is None:
        raise click.UsageError("name a configuration file, e.g. libra config configs/quickstart.yaml, or type --fields")
    from libra.config import dump_config, load_config

    loaded = load_config(config, overrides)
    warn_of_ignored(loaded, None, overrides)
    click.echo(dump_config(loaded), nl=False)


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
    from libra.cluster.hardware_inventory import may_have_gpu

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

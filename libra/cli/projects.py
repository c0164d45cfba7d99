"""``libra init`` and ``libra config``: a starter project; the resolved configuration, or its fields."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import click

from libra.cli.arguments import OVERRIDES, warn_of_ignored
from libra.errors import ConfigError, shell_path

FILES = {
    "config.yaml": "config.yaml",
    "my_environment.py": "my_environment.py.in",
    "test_my_environment.py": "test_my_environment.py.in",
}
"""Project files, with their source names in ``libra/assets/starter``."""


def make_project(directory: Path) -> list[str]:
    """Write the project into ``directory``, creating it; returns the next commands to type.

    ConfigError if one of the files exists, or ``directory`` cannot be written.
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

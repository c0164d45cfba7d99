"""``libra init``: a starter project of three files, which runs and whose test passes as it is."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import click

from libra.errors import ConfigError, shell_path

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

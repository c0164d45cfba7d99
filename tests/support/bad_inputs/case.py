"""`BadInput`: something that a user may type in the first hour, and what the answer has to contain."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple


class BadInput(NamedTuple):
    """One wrong input.

    Attributes
    ----------
    arguments : tuple of str
        What follows ``libra``. ``{dir}`` becomes the working directory.
    field, value, typed : str
        What the message names: the field or option, its value, and what to type. ``{dir}`` as above.
    make : callable, optional
        Makes the files that it needs, in the working directory.
    """

    arguments: tuple[str, ...]
    field: str
    value: str
    typed: str
    make: Callable[[Path], object] | None = None


def setting(override: str, value: str, typed: str, field: str = "") -> BadInput:
    """``libra run libra/quickstart OVERRIDE``; ``field`` is the name in the override if it is not given."""
    return BadInput(("run", "libra/quickstart", override), field or override.partition("=")[0], value, typed)


def settings(overrides: str, field: str, value: str, typed: str) -> BadInput:
    """``libra run libra/quickstart OVERRIDE ...``, the overrides separated by " & "."""
    return BadInput(("run", "libra/quickstart", *overrides.split(" & ")), field, value, typed)


def yaml_file(text: str, field: str, value: str, typed: str) -> BadInput:
    """``libra run bad.yaml``, a file with this text."""
    return BadInput(("run", "bad.yaml"), field, value, typed, lambda directory: write(directory, {"bad.yaml": text}))


def write(directory: Path, files: dict[str, str | bytes]) -> None:
    """Write ``files`` (text or bytes by relative path) below ``directory``."""
    for name, content in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            path.write_text(content)

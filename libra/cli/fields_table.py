"""The configuration reference in the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from libra.config.field_help import field_references, sections


def print_fields(console: Console | None = None) -> None:
    """Print every section and key with what it allows, its default and what it is."""
    console = console or Console()
    for section_name, section in sections().items():
        console.print(Text.assemble((section_name, "bold cyan"), "  ", " ".join((section.__doc__ or "").split())))
        for name, field in field_references().items():
            if name.startswith(f"{section_name}."):
                console.print(Text.assemble("  ", (name, "bold"), f" = {field.default}  ", (field.allowed, "dim")))
                console.print(Padding(Text(field.description), (0, 0, 0, 6)))
        console.print()

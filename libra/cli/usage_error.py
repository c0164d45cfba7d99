"""A command that click refused, in one line instead of click's four."""

from __future__ import annotations

import click


def show_usage_error(error: click.ClickException) -> None:
    """Print what is wrong with the command, and where its usage is; a group without a command prints its help."""
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        error.show()
        return
    from libra.untrusted import shown  # here: `libra --help` imports only what it needs

    text = " ".join(shown(error.format_message()).split())
    context = getattr(error, "ctx", None)
    if context is not None:
        text = f"{text.removesuffix('.')}; type {context.command_path} --help for its usage"
    click.secho(f"libra: {text}", fg="red", err=True)

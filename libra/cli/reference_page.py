"""The command reference, made from the commands: ``python -m libra.cli.reference_page`` writes docs/cli.md."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from libra.cli.main import cli
from libra.cluster.readiness import NEEDED

_HEAD = """\
# Commands

<!-- Made by `make docs` from libra/cli/. Edit the docstrings there. -->

Libra's own errors are one message on standard error and exit code 2; `LIBRA_TRACEBACK=1` shows where they come from. Ctrl-C is
exit code 130. `libra doctor` exits with 1 where something is broken, `libra replay` where a decision differs.
"""

_CLUSTER = """\
## Your own Dask cluster

`libra run` makes a cluster of local processes. With `--scheduler` it uses one that is there, whose workers declare what they do:
`ROLLOUT` slots of an engine, `TOOL` actions and `GRADE` graders at once, `TRAIN` a replica, and on exactly one worker `COMMIT`, the
only writer of the store. The run directory has to be on storage that scheduler and workers reach.

```bash
libra doctor --settings > libra-dask.yaml        # Dask as Libra needs it
export DASK_CONFIG=$PWD/libra-dask.yaml          # on each machine, before starting these
dask scheduler --port 8786
{workers}
libra doctor --scheduler tcp://HOST:8786         # looks at versions, settings, roles and threads
libra run configs/quickstart.yaml --scheduler tcp://HOST:8786
```
"""


def reference_markdown() -> str:
    """The whole of docs/cli.md."""
    parts = [_HEAD]
    parent = click.Context(cli, info_name="libra", terminal_width=120, **cli.context_settings)
    for name, command in sorted(cli.commands.items()):
        parts += _sections(name, command, parent)
    workers = "\n".join(dict.fromkeys(f"dask worker tcp://HOST:8786 {options}" for _, options in NEEDED.values()))
    parts.append(_CLUSTER.format(workers=workers))
    return "\n".join(parts)


def _sections(name: str, command: click.Command, parent: click.Context) -> list[str]:
    """One section for a command; for a group of commands, one for each of them."""
    with click.Context(command, parent=parent, info_name=name) as context:
        if isinstance(command, click.Group):
            inner = sorted(command.commands.items())
            return [section for each, child in inner for section in _sections(each, child, context)]
        return [f"## {context.command_path}\n\n```text\n{command.get_help(context)}\n```\n"]


if __name__ == "__main__":
    target = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/cli.md")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(reference_markdown(), encoding="utf-8")

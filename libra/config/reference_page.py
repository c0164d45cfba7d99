"""The configuration reference, made from the models: ``python -m libra.config.reference_page`` writes docs/configuration.md."""

from __future__ import annotations

import sys
from pathlib import Path

from libra.config.field_help import field_references, sections

_HEAD = """\
# Configuration

<!-- Made by `make docs` from libra/config/models.py. Edit the docstrings there. -->

A run is described by a YAML file of sections and keys; everything has a default. `libra config CONFIG` prints the result,
and each run directory holds it as `config.resolved.yaml`, which is itself a configuration file.

```bash
libra run configs/quickstart.yaml trainer.lr=3e-4 run.seed=7    # overrides: section.key=value, the value in YAML
libra config configs/quickstart.yaml trainer.lr=3e-4            # what that resolves to
libra config --fields                                           # this page in the terminal
```

- **Deltas.** `extends: other.yaml` (relative to the file, or `libra/quickstart` for one that ships) lays a file over another one.
- **Nothing is dropped.** An unknown key, a wrong type or two fields that contradict each other stop the run before a worker starts,
  all problems at once, each with file and line.
- **Nothing is silently ignored.** A setting that was given and changes nothing in its combination is told in one line before
  anything starts, with what would make it effective (`libra.config.effects` has the table). What stands in a file is judged by the
  commands that read it at all, so that `planner` and `simulation` may lie beside a run's settings; what is typed for a command,
  or given to `libra.train`, is judged by that command.
- **YAML 1.2.** `1e-4` is a number; only `true` and `false` are truth values; a repeated key is an error.
"""


def reference_markdown() -> str:
    """The whole of docs/configuration.md."""
    parts = [_HEAD]
    for section_name, section in sections().items():
        summary = " ".join((section.__doc__ or "").split())
        rows = [
            f"| `{name}` | {field.allowed} | `{field.default}` | {field.description.replace('|', chr(92) + '|')} |"
            for name, field in field_references().items()
            if name.startswith(f"{section_name}.")
        ]
        parts.append("\n".join((f"## {section_name}", "", summary, "", _TABLE_HEAD, *rows, "")))
    return "\n".join(parts)


_TABLE_HEAD = "| key | allowed | default | what it is |\n|---|---|---|---|"


def write_reference(path: Path) -> None:
    """Write the reference to ``path``, making its directory."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(reference_markdown(), encoding="utf-8")


if __name__ == "__main__":
    write_reference(Path(sys.argv[1] if len(sys.argv) > 1 else "docs/configuration.md"))

"""docs/configuration.md, algorithms.md, cli.md, facts.md and benchmarks.md: ``python tests/config/doc_pages.py docs``."""

import sys
from dataclasses import asdict
from pathlib import Path

import click

from benchmarks import page
from libra.cli.main import cli
from libra.config.algorithms import (
    ALGORITHMS,
    DEFAULT_ALGORITHM,
    LOSS_ARGS,
    AdamArgs,
    Algorithm,
    CorrectionArgs,
    LateArgs,
    LoraArgs,
    Preset,
    RejectArgs,
)
from libra.config.field_help import field_references, sections
from libra.config.section import Section
from libra.config.yaml_text import one_line_yaml
from libra.facts import Signal, kinds, name_of

_REFERENCE_HEAD = """\
# Configuration

<!-- Made by `make docs` from libra/config/. Edit the docstrings there. -->

A YAML file with sections and keys describes a run. Every key has a default.

```bash
libra run configs/quickstart.yaml trainer.lr=3e-4 run.seed=7    # overrides: section.key=value
libra config configs/quickstart.yaml trainer.lr=3e-4            # print the result
libra config --fields                                           # print this page
```

- **Several files** are merged from left to right: `libra run workload.yaml cluster.yaml`. `extends: other.yaml`
  at the top of a file does the same; the path is relative to the file.
- **Errors come at once.** An unknown key, a wrong type, or two keys that contradict each other stop the command
  before a worker starts. Every problem is listed with its file and line.
- **Nothing is ignored silently.** If a key has no effect beside the others, one line names it and the key that
  would give it an effect.
- **YAML 1.2**: `1e-4` is a number, only `true` and `false` are truth values, and a repeated key is an error.
- Each run directory holds its configuration as `config.resolved.yaml`, which is a configuration file too.
"""


def reference_markdown() -> str:
    parts = [_REFERENCE_HEAD]
    for section_name, section in sections().items():
        summary = " ".join((section.__doc__ or "").split())
        rows = [
            f"| `{name}` | {field.allowed} | `{field.default}` | {field.description.replace('|', chr(92) + '|')} |"
            for name, field in field_references().items()
            if name.startswith(f"{section_name}.")
        ]
        parts.append("\n".join((f"## {section_name}", "", summary, "", _COLUMNS, *rows, "")))
    return "\n".join(parts)


_COLUMNS = "| key | allowed | default | what it is |\n|---|---|---|---|"


_ALGORITHMS_HEAD = f"""\
# Algorithms

<!-- Made by `make docs` from libra/config/algorithms.py. Edit the table there. -->

`trainer.algorithm` selects a preset for the keys in the second table. Keys that you give yourself win.
The default is `{DEFAULT_ALGORITHM}`.

```bash
libra run configs/quickstart.yaml trainer.algorithm=gspo                          # the paper's values
libra run configs/quickstart.yaml trainer.algorithm=gspo trainer.loss_args.clip_high=1e-3   # all but one
libra config configs/quickstart.yaml trainer.algorithm=ppo_decoupled              # print the result
make algorithms                                                                   # compare five of them
```

These keys work with every algorithm: `trainer.kl_coef`, `trainer.entropy_coef`, `trainer.loss_args`,
`trainer.drop_uniform_groups`, `trainer.drop_truncated`, and the masks `trainer.reject`,
`trainer.reject_args` (`off_policy`, `m2po`). The gradient does not depend on how a step
is cut into micro-batches. [Papers and agreement with other libraries](sources.md) names the code of each
paper and the functions that were compared.
"""


def algorithms_markdown() -> str:
    chosen = ["| `trainer.algorithm` | what | when | source |", "|---|---|---|---|"]
    chosen += [f"| `{name}` | {found.what} | {found.when} | {found.source} |" for name, found in ALGORITHMS.items()]
    knobs = ["| `trainer.algorithm` | keys of `trainer` it sets away from the plain clipped loss |", "|---|---|"]
    knobs += [f"| `{name}` | {_knobs(found)} |" for name, found in ALGORITHMS.items()]
    differs = ["| `trainer.algorithm` | differs from the paper |", "|---|---|"]
    differs += [f"| `{name}` | {found.differs} |" for name, found in ALGORITHMS.items() if found.differs]
    arguments = ["| mapping | keys and defaults |", "|---|---|"]
    arguments += [
        f"| `trainer.loss_args`, `trainer.loss={loss}` | {_defaults(kind)} |" for loss, kind in LOSS_ARGS.items()
    ]
    others = {"correction": CorrectionArgs, "reject": RejectArgs, "adam": AdamArgs, "lora": LoraArgs, "late": LateArgs}
    arguments += [f"| `trainer.{name}_args` | {_defaults(kind)} |" for name, kind in others.items()]
    plain = ", ".join(f"`{key}={one_line_yaml(value)}`" for key, value in asdict(Preset()).items())
    return "\n".join(
        [
            _ALGORITHMS_HEAD,
            *chosen,
            "",
            "## Knobs",
            "",
            f"The plain clipped loss is {plain}.",
            "",
            *knobs,
            "",
            "## Arguments",
            "",
            "A mapping of arguments is merged key by key: `trainer.loss_args.clip_high=0.3` changes one of them.",
            "",
            *arguments,
            "",
            "## Where a preset differs from its paper",
            "",
            *differs,
            "",
        ]
    )


def _defaults(kind: type[Section]) -> str:
    return ", ".join(f"`{key}: {one_line_yaml(value)}`" for key, value in kind().model_dump().items()) or "none"


def _knobs(algorithm: Algorithm) -> str:
    plain = asdict(Preset())
    given = [f"`{k}={one_line_yaml(v)}`" for k, v in asdict(algorithm.preset).items() if v != plain[k]]
    return ", ".join(given) or "none"


_FACTS_HEAD = """\
# Events

<!-- Made by `make docs` from libra/facts/. Edit the docstrings there. -->

`events.jsonl` and the segments in `events/` hold one JSON object per line: `name`, `run`, `t_s` (seconds since
the run started), and the fields below. `zcat -f RUN/events/* RUN/events.jsonl` prints them all, and
`libra replay RUN` makes the decisions again. Source: `libra.facts`.

| name | fields | meaning |
|---|---|---|
"""


def facts_markdown() -> str:
    logged = sorted((name_of(kind), kind) for kind in kinds() if not issubclass(kind, Signal))
    rows = (
        f"| `{name}` | {', '.join(f'`{field}`' for field in kind.__struct_fields__)} | {_first_line(kind)} |"
        for name, kind in logged
    )
    return _FACTS_HEAD + "\n".join(rows) + "\n"


def _first_line(kind: type) -> str:
    return " ".join((kind.__doc__ or "").partition("\n\n")[0].split()).replace("|", "\\|")


_COMMANDS_HEAD = """\
# Commands

<!-- Generated by `make docs` from libra/cli/. Edit the docstrings there. -->

Libra's own errors are one message on standard error and exit code 2; `LIBRA_TRACEBACK=1` adds the traceback. Ctrl-C is exit code
130. `libra run` exits with 1 if all trajectories of a batch failed and none because of the model, `libra doctor` if a check fails,
`libra replay` if a decision differs. `python -m libra` is the same command.
`--scheduler` names [your own Dask cluster](slurm.md#your-own-dask-cluster).
"""


def commands_markdown() -> str:
    parts = [_COMMANDS_HEAD]
    parent = click.Context(cli, info_name="libra", terminal_width=120, **cli.context_settings)
    for name, command in sorted(cli.commands.items()):
        parts += _command_sections(name, command, parent)
    return "\n".join(parts)


def _command_sections(name: str, command: click.Command, parent: click.Context) -> list[str]:
    """One section for a command; for a group of commands, one for each of them."""
    with click.Context(command, parent=parent, info_name=name) as context:
        if isinstance(command, click.Group):
            inner = sorted(command.commands.items())
            return [section for each, child in inner for section in _command_sections(each, child, context)]
        return [f"## {context.command_path}\n\n```text\n{command.get_help(context)}\n```\n"]


if __name__ == "__main__":
    docs = Path(sys.argv[1])
    (docs / "configuration.md").write_text(reference_markdown(), encoding="utf-8")
    (docs / "algorithms.md").write_text(algorithms_markdown(), encoding="utf-8")
    (docs / "cli.md").write_text(commands_markdown(), encoding="utf-8")
    (docs / "facts.md").write_text(facts_markdown(), encoding="utf-8")
    (docs / "benchmarks.md").write_text(page.page(), encoding="utf-8")

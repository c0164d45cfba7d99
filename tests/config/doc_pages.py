"""docs/configuration.md, algorithms.md, cli.md and benchmarks.md: ``PYTHONPATH=. python tests/config/doc_pages.py docs``."""

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

_REFERENCE_HEAD = """\
# Configuration

<!-- Made by `make docs` from libra/config/sections.py and the files it imports. Edit the docstrings there. -->

A run is described by a YAML file of sections and keys; everything has a default. `libra config CONFIG` prints the result,
and each run directory holds it as `config.resolved.yaml`, which is itself a configuration file.

```bash
libra run configs/quickstart.yaml trainer.lr=3e-4 run.seed=7    # overrides: section.key=value, the value in YAML
libra config configs/quickstart.yaml trainer.lr=3e-4            # what that resolves to
libra config --fields                                           # this page in the terminal
```

- **Deltas.** `extends: other.yaml` (relative to the file, or `libra/quickstart` for one that ships) puts a file over another one.
- **Nothing is dropped.** An unknown key, a wrong type or two fields that contradict each other stop the run before a worker starts,
  all problems at once, each with file and line.
- **Nothing is silently ignored.** A given setting without effect in its combination is reported in one line before anything
  starts, with what would make it effective (`libra.config.effects` has the table). A setting in a file is judged by the commands
  that read it, so that `planner` and `simulation` may stand beside a run's settings; a setting typed for a command, or given to
  `libra.train`, is judged by that command.
- **YAML 1.2.** `1e-4` is a number; only `true` and `false` are truth values; a repeated key is an error.
"""


def reference_markdown() -> str:
    """The whole of docs/configuration.md."""
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

`trainer.algorithm` chooses a preset: it fills the keys below that a configuration does not give. A key that is given wins, and
`libra config` shows what came out. A file or a command line that changes the algorithm starts from its preset, whatever a file
below it says of another one.

```bash
libra run configs/quickstart.yaml trainer.algorithm=gspo                          # the paper's values
libra run configs/quickstart.yaml trainer.algorithm=gspo trainer.loss_args.clip_high=1e-3   # all but one
libra config configs/quickstart.yaml trainer.algorithm=ppo_decoupled              # what that resolves to
make algorithms                                                                   # five of them on the quick start's model
```

The default is `{DEFAULT_ALGORITHM}`. Every loss runs on packed micro-batches; however a step is cut into them, its gradient is
that of one big batch. Whatever the algorithm, `trainer.kl_coef`, `trainer.entropy_coef`, `trainer.loss_args`,
`trainer.drop_uniform_groups` and `trainer.drop_truncated` add to it. So do the masks that
leave tokens out of the loss: `trainer.reject` (trainer and engine disagree), `trainer.off_policy_threshold` (DeepSeek-V3.2's
sequences) and `trainer.m2po_threshold` (M2PO). [configuration.md](configuration.md) explains each key,
[golden.md](golden.md) says whose numbers these functions reproduce, [paper_index.md](paper_index.md) where each one is.
"""


def algorithms_markdown() -> str:
    """The whole of docs/algorithms.md."""
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


_COMMANDS_HEAD = """\
# Commands

<!-- Generated by `make docs` from libra/cli/. Edit the docstrings there. -->

Libra's own errors are one message on standard error and exit code 2; `LIBRA_TRACEBACK=1` adds the traceback. Ctrl-C is exit code
130. `libra run` exits with 1 if all trajectories of a batch failed and none because of the model, `libra doctor` if a check fails,
`libra replay` if a decision differs. `python -m libra` is the same command.
`--scheduler` names [your own Dask cluster](own_cluster.md).
"""


def commands_markdown() -> str:
    """The whole of docs/cli.md."""
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
    (docs / "benchmarks.md").write_text(page.page(), encoding="utf-8")

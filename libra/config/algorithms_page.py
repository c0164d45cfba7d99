"""docs/algorithms.md, made from the table of presets: ``python -m libra.config.algorithms_page`` writes it."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path

from libra.config.algorithms import ALGORITHMS, DEFAULT_ALGORITHM, Algorithm, Preset
from libra.config.field_help import one_line_yaml

_HEAD = f"""\
# Algorithms

<!-- Made by `make docs` from libra/config/algorithms.py. Edit the table there. -->

`trainer.algorithm` chooses a preset: it fills the keys below that a configuration does not give. A key that is given wins, and
`libra config` shows what came out. A file or a command line that changes the algorithm starts from its preset, whatever a file
below it says of another one.

```bash
libra run configs/quickstart.yaml trainer.algorithm=gspo                          # the paper's values
libra run configs/quickstart.yaml trainer.algorithm=gspo trainer.clip_high=1e-3   # all but one
libra config configs/quickstart.yaml trainer.algorithm=ppo_decoupled              # what that resolves to
make algorithms                                                                   # five of them on the quick start's model
```

The default is `{DEFAULT_ALGORITHM}`. Every loss runs on packed micro-batches; however a step is cut into them, its gradient is
that of one big batch. Whatever the algorithm, `trainer.kl_coef`, `trainer.entropy_coef`, `trainer.dual_clip` (ppo, gspo),
`trainer.drop_uniform_groups` and `trainer.drop_truncated` add to it. [configuration.md](configuration.md) explains each key,
[golden.md](golden.md) says whose numbers these functions reproduce, [paper_index.md](paper_index.md) where each one is.
"""

_TAIL = """\
## What a run does not offer

These are functions of the library, with the same tests, that need what a run of Libra does not have:

| function | lacks |
|---|---|
| `libra.train.advantages.gae`, `libra.train.losses.value_loss` | a critic |
| `libra.train.advantages.remax` | the greedy answer to every prompt, as baseline |
| `libra.train.advantages.reinforce_pp` with `gamma` below 1 | rewards per token; a run has one per trajectory |
| `libra.train.corrections.m2po_mask` | a choice over the whole minibatch at once; micro-batches are scored one by one |
| `rejection_mask`, `binary_kl_mask`, `off_policy_sequence_mask` of `libra.train.corrections` | a key; a run masks by weight alone |
| `libra.train.losses.vespo_loss`, `dppo_loss` with KL divergence | a key |
| DAPO's dynamic sampling | prompts beyond the batch to replace what `libra.train.advantages.informative` leaves out |
"""


def algorithms_markdown() -> str:
    """The whole of docs/algorithms.md."""
    chosen = ["| `trainer.algorithm` | what | when | source |", "|---|---|---|---|"]
    chosen += [f"| `{name}` | {found.what} | {found.when} | {found.source} |" for name, found in ALGORITHMS.items()]
    knobs = ["| `trainer.algorithm` | keys of `trainer` it sets away from the plain clipped loss |", "|---|---|"]
    knobs += [f"| `{name}` | {_knobs(found)} |" for name, found in ALGORITHMS.items()]
    differs = ["| `trainer.algorithm` | differs from the paper |", "|---|---|"]
    differs += [f"| `{name}` | {found.differs} |" for name, found in ALGORITHMS.items() if found.differs]
    plain = ", ".join(f"`{key}={one_line_yaml(value)}`" for key, value in asdict(Preset()).items())
    return "\n".join(
        [
            _HEAD,
            *chosen,
            "",
            "## Knobs",
            "",
            f"The plain clipped loss is {plain}.",
            "",
            *knobs,
            "",
            "## Where a preset differs from its paper",
            "",
            *differs,
            "",
            _TAIL,
        ]
    )


def _knobs(algorithm: Algorithm) -> str:
    plain = asdict(Preset())
    given = [f"`{k}={one_line_yaml(v)}`" for k, v in asdict(algorithm.preset).items() if v != plain[k]]
    return ", ".join(given) or "none"


def write_page(path: Path) -> None:
    """Write the page to ``path``, making its directory."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(algorithms_markdown(), encoding="utf-8")


if __name__ == "__main__":
    write_page(Path(sys.argv[1] if len(sys.argv) > 1 else "docs/algorithms.md"))

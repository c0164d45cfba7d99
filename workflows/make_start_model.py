"""Makes a start for reinforcement learning on ``search`` or ``repair``: a model of under one million parameters, by supervision.

    python workflows/make_start_model.py search --out runs/start_models/search
    python workflows/make_start_model.py repair --out runs/start_models/repair

As the model that ships (workflows/make_tiny_model.py) it learns from demonstrations, last from an imperfect demonstrator, so that
reinforcement learning has something to unlearn. Those of ``search`` are of other worlds than a run's, so its names have to be read
and not remembered. For ``repair`` it learns first to copy lines of code by their numbers, then to edit; what repairs the run's own
tasks it is not told (workflows/repair_demonstrations.py). Some ten minutes on one core. The environment is that of
``examples/search.yaml`` or ``examples/repair.yaml``.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from copy_rate import copy_rate
from demonstrations import SEARCH_HABITS, Demonstrates, Searcher
from make_tiny_model import Examples, make_model, make_tokenizer, save, train
from repair_demonstrations import CODE_WORDS, REPAIR_HABITS, Copier, Repairer

from libra.config import load_config

WORDS = r"(?:assistant|user|system)\n|[A-Za-z]+| [A-Za-z]+|[0-9]| +|\n"
"""What tokens do not reach across."""
TASKS = ("repair", "search")
EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


class Phase(NamedTuple):
    """Steps of supervision by one demonstrator."""

    what: str
    demonstrator: Demonstrates
    steps: int
    batch: int
    lr: float
    stretch: int


class Plan(NamedTuple):
    """Tokens, layers and phases of a start model; tokens are made of the texts of one demonstrator."""

    words: str
    texts: Demonstrates
    vocabulary: int
    layers: int
    phases: list[Phase]


def plan_of(task: str, args: dict[str, Any], seed: int) -> Plan:
    """How the start model of a task is made; ``args`` are those of the environment."""
    if task == "search":
        flawless, imperfect = Searcher(seed, {}, args), Searcher(seed + 1, SEARCH_HABITS, args)
        phases = [Phase("skill", flawless, 900, 32, 2e-3, 16), Phase("habits", imperfect, 150, 32, 5e-4, 16)]
        return Plan(WORDS, imperfect, 960, 4, phases)
    copier, repairer = Copier(seed, args), Repairer(seed + 1, REPAIR_HABITS, args)
    phases = [Phase("copies", copier, 400, 16, 2e-3, 64), Phase("edits", repairer, 900, 16, 2e-3, 16)]
    return Plan(CODE_WORDS, repairer, 1024, 3, phases)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--args", type=json.loads, help="arguments of the environment, as JSON; default: the configuration's"
    )
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    args = chosen.args or dict(load_config(EXAMPLES / f"{chosen.task}.yaml").environment.args)
    make(chosen.task, chosen.out, args, chosen.seed)


def make(task: str, out: Path, args: dict[str, Any], seed: int = 0) -> None:
    """Make the model in ``out``; ``args`` are those of the environment."""
    torch.manual_seed(seed)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # sums in another order give other weights
    plan = plan_of(task, args, seed)
    conversations = [plan.texts.conversation(index) for index in range(2000)]
    tokenizer = make_tokenizer(conversations, plan.texts.environment.tool_schemas, plan.words, plan.vocabulary)
    model = make_model(tokenizer, hidden=128, layers=plan.layers)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{len(tokenizer)} tokens, {parameters} parameters", flush=True)
    for phase in plan.phases:
        examples = Examples(tokenizer, phase.demonstrator, min(20_000, phase.steps * phase.batch))
        print(f"{phase.what}: {phase.steps} steps of {phase.batch}", flush=True)
        train(model, examples, phase.steps, phase.batch, phase.lr, stretch=phase.stretch, seed=seed)
    save(model, tokenizer, out)
    if isinstance(plan.texts, Repairer):
        print(copy_rate(model, tokenizer, plan.texts.repair, 128), flush=True)
    torch.set_num_threads(threads)


if __name__ == "__main__":
    main()

"""How well a start model for ``repair`` copies: its first replies to training questions, by what kind of edit they are.

    python workflows/copy_rate.py runs/start_models/repair

`make_start_model.py` prints the same when it has made one.
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.repair.software import SoftwareRepair
from examples.repair.tasks import Task
from libra.config import load_config
from libra.types import ToolCall

CONFIG = Path(__file__).resolve().parent.parent / "examples" / "repair.yaml"


def kind_of(task: Task, calls: list[ToolCall]) -> str:
    """What a reply does: "no edit", "no copy" (of a piece that is not in the line), "copy", or "repair"."""
    given = [call.arguments for call in calls if call.name == "edit_line"]
    lines = task.files[task.path].splitlines()
    if not given or not isinstance(line := given[0].get("line"), int):
        return "no edit"
    old, new = str(given[0].get("old")), str(given[0].get("new"))
    if not 1 <= line <= len(lines) or old not in lines[line - 1]:
        return "no copy"
    repaired = lines[line - 1].replace(old, new, 1) == task.line(task.library.files)
    return "repair" if line == task.bug.line and repaired else "copy"


def copy_rate(model: Any, tokenizer: Any, repair: SoftwareRepair, questions: int, seed: int = 0) -> str:
    """A line about first replies, sampled at temperature 1, to as many training questions."""
    torch.manual_seed(seed)
    counts: Counter[str] = Counter()
    model.eval()
    for index in range(questions):
        prompt = repair.prompt("train", index)
        given = tokenizer.apply_chat_template(
            list(prompt.messages),
            tools=repair.tool_schemas,
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
        ids = model.generate(**given, max_new_tokens=96, do_sample=True, temperature=1.0, top_k=0)
        reply = tokenizer.decode(ids[0, given["input_ids"].shape[1] :], skip_special_tokens=True)
        counts[kind_of(repair.tasks[prompt.facts["task"]], repair.parse(reply))] += 1
    edits = questions - counts["no edit"]
    copies = counts["copy"] + counts["repair"]
    return (
        f"{questions} first replies to training questions: {edits} edits, {copies} of them of a piece that is in their line "
        f"({copies / max(edits, 1):.0%}), {counts['repair']} the repair"
    )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--config", type=Path, default=CONFIG)
    parser.add_argument("--questions", type=int, default=128)
    parser.add_argument("override", nargs="*", help="section.key=value")
    chosen = parser.parse_intermixed_args()
    args = load_config(chosen.config, overrides=chosen.override).environment.args
    model, tokenizer = (kind.from_pretrained(chosen.model) for kind in (AutoModelForCausalLM, AutoTokenizer))
    print(copy_rate(model, tokenizer, SoftwareRepair(**args), chosen.questions))


if __name__ == "__main__":
    main()

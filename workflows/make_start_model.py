"""Makes a start for reinforcement learning on ``search`` or ``repair``: a model of 0.7 million parameters, by supervision.

    python workflows/make_start_model.py search --out runs/start_models/search

As the model that ships (workflows/make_tiny_model.py) it learns first from flawless demonstrations, then from an imperfect
demonstrator (`HABITS`), so that reinforcement learning has something to unlearn. Demonstrations are of training questions only;
those of ``search`` are of other worlds than a run's, so its names have to be read and not remembered. Some ten minutes on one core.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any, Protocol

import torch
from make_tiny_model import Examples, make_model, make_tokenizer, save, train

from libra.envs.environment import Environment
from libra.envs.repair.bugs import bugs_of
from libra.envs.repair.environment import SoftwareRepair
from libra.envs.repair.tasks import Task
from libra.envs.search.environment import CorpusSearch

WORDS = r"(?:assistant|user|system)\n|[A-Za-z]+| [A-Za-z]+|[0-9]| +|\n"
"""What tokens do not reach across."""
WORLDS = 200
HABITS = {
    "search": {
        "guess": 0.15,  # answers before it has searched enough, with a name that it has seen
        "other_name": 0.15,  # answers with another name of the passage
        "wrong_query": 0.10,  # searches for the relation instead of the name
        "malformed": 0.06,  # writes a call that is no call, then tries again
    },
    "repair": {
        "skip": 0.12,  # says that it is repaired without an edit
        "other_line": 0.20,  # changes a line that is right
        "other_change": 0.20,  # changes the right line in another way
        "malformed": 0.06,
    },
}
Messages = list[dict[str, str]]


class Demonstrates(Protocol):
    """Writes conversations about an environment."""

    environment: Environment

    def conversation(self, index: int) -> Messages: ...


class Searcher:
    """Demonstrations of ``search``, each in one of many worlds."""

    def __init__(self, seed: int, habits: dict[str, float], args: dict[str, Any]) -> None:
        self.worlds = [CorpusSearch(**args, seed=1_000_000 + seed * WORLDS + number) for number in range(WORLDS)]
        self.environment: Environment = self.worlds[0]
        self.habits, self.random = habits, random.Random(f"searcher/{seed}")

    def conversation(self, index: int) -> Messages:
        world = self.worlds[index % WORLDS]
        prompt = world.prompt("train", index)
        messages = [dict(message) for message in prompt.messages]
        name, seen = prompt.facts["start"], [prompt.facts["start"]]
        for relation in prompt.facts["relations"]:
            if does(self, "guess"):
                name = self.random.choice(seen)
                break
            if does(self, "malformed"):
                exchange(messages, MALFORMED % "search", world_says(world))
            query = relation if does(self, "wrong_query") else name
            exchange(messages, call("search", query=query), world.search(query))
            facts = world.passages[name].facts if name in world.passages else {}
            if relation not in facts:  # it went another way before
                break
            seen += facts.values()
            name = self.random.choice(list(facts.values())) if does(self, "other_name") else facts[relation]
        last = f"<answer>{name}</answer>" if world.answer == "tags" else name
        return [*messages, {"role": "assistant", "content": last}]


class Repairer:
    """Demonstrations of ``repair`` on training tasks whose line can be replaced alone."""

    def __init__(self, seed: int, habits: dict[str, float], args: dict[str, Any]) -> None:
        self.repair = SoftwareRepair(**args, seed=seed)
        self.environment: Environment = self.repair
        self.habits, self.random = habits, random.Random(f"repairer/{seed}")

    def conversation(self, index: int) -> Messages:
        while True:
            prompt = self.repair.prompt("train", index)
            task = self.repair.tasks[prompt.facts["task"]]
            if task.repair is not None:
                break
            index += 1
        messages = [dict(message) for message in prompt.messages]
        if does(self, "malformed"):
            exchange(messages, MALFORMED % "edit", world_says(self.repair))
        if not does(self, "skip"):
            old, new = self._edit(task)
            exchange(messages, call("edit", old=old, new=new), f"edited {task.path}")
        return [*messages, {"role": "assistant", "content": "It is repaired."}]

    def _edit(self, task: Task) -> tuple[str, str]:
        assert task.repair is not None
        old, new = task.repair
        lines = [line.strip() for line in task.function.splitlines()[2:]]
        unlike = [each for each in lines if each != old and sum(text.count(each) for text in task.files.values()) == 1]
        if unlike and does(self, "other_line"):
            old = new = self.random.choice(unlike)
            return old, self._changed(new)
        return old, self._changed(new) if does(self, "other_change") else new

    def _changed(self, line: str) -> str:
        """A line with another bug, or as it is if none can be put in."""
        body = f"{line}\n    pass" if line.endswith(":") else line
        source = f"def f():\n  {body}\n"
        try:
            bugs = bugs_of(source)
        except SyntaxError:  # a part of a longer statement
            bugs = []
        return self.random.choice(bugs).put_in(source).splitlines()[1].strip() if bugs else line


DEMONSTRATORS: dict[str, Any] = {"search": Searcher, "repair": Repairer}
MALFORMED = '<tool_call>\n{"name": "%s", "arguments": \n</tool_call>'


def does(demonstrator: Any, habit: str) -> bool:
    """Whether the demonstrator gives in to a habit now."""
    return demonstrator.random.random() < demonstrator.habits.get(habit, 0.0)


def call(name: str, **arguments: str) -> str:
    """A call as the model writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def exchange(messages: Messages, text: str, returned: str) -> None:
    """A call and what came back."""
    messages += [{"role": "assistant", "content": text}, {"role": "tool", "content": returned}]


def world_says(environment: Environment) -> str:
    """What an environment says to a malformed call."""
    import asyncio

    from libra.envs import run_action

    (found,) = environment.parse(MALFORMED % environment.tools[0].name)
    return asyncio.run(run_action(environment, environment.prompt("train", 0), found, action_id="start")).content


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=sorted(DEMONSTRATORS))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--args", type=json.loads, default={}, help="arguments of the environment, as JSON")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--skill-steps", type=int, default=900)
    parser.add_argument("--habit-steps", type=int, default=150)
    parser.add_argument("--batch", type=int, default=32)
    chosen = parser.parse_args()
    make(chosen.task, chosen.out, chosen.args, (chosen.skill_steps, chosen.habit_steps), chosen.batch, chosen.seed)


def make(
    task: str, out: Path, args: dict[str, Any], steps: tuple[int, int] = (900, 150), batch: int = 32, seed: int = 0
) -> None:
    """Make the model in ``out``; ``args`` are those of the environment, ``steps`` of the two phases."""
    torch.manual_seed(seed)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # sums in another order give other weights
    flawless = DEMONSTRATORS[task](seed, {}, args)
    imperfect = DEMONSTRATORS[task](seed + 1, HABITS[task], args)
    conversations = [imperfect.conversation(index) for index in range(2000)]
    tokenizer = make_tokenizer(conversations, flawless.environment.tool_schemas, WORDS, 960)
    model = make_model(tokenizer, hidden=128, layers=4)
    print(
        f"{len(tokenizer)} tokens, {sum(parameter.numel() for parameter in model.parameters())} parameters", flush=True
    )
    for demonstrator, count, lr in ((flawless, steps[0], 2e-3), (imperfect, steps[1], 5e-4)):
        examples = Examples(tokenizer, demonstrator, min(20_000, count * batch))
        train(model, examples, count, batch, lr, stretch=16, seed=seed)
    save(model, tokenizer, out)
    torch.set_num_threads(threads)


if __name__ == "__main__":
    main()

"""Conversations that a start model learns from by supervision: what all demonstrators share, and those of ``search``."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any, Protocol

from examples.search.corpus import CorpusSearch
from libra.envs import run_action
from libra.envs.environment import Environment

WORLDS = 200
SEARCH_HABITS = {
    "guess": 0.15,  # answers before it has searched enough, with a name that it has seen
    "other_name": 0.15,  # answers with another name of the passage
    "wrong_query": 0.10,  # searches for the relation instead of the name
    "malformed": 0.06,  # writes a call that is no call, then tries again
}
MALFORMED = '<tool_call>\n{"name": "%s", "arguments": \n</tool_call>'
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


def does(demonstrator: Any, habit: str) -> bool:
    """Whether the demonstrator gives in to a habit now."""
    return demonstrator.random.random() < demonstrator.habits.get(habit, 0.0)


def call(name: str, **arguments: str | int) -> str:
    """A call as the model writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def exchange(messages: Messages, text: str, returned: str) -> None:
    """A call and what came back."""
    messages += [{"role": "assistant", "content": text}, {"role": "tool", "content": returned}]


def world_says(environment: Environment) -> str:
    """What an environment says to a malformed call."""
    (found,) = environment.parse(MALFORMED % environment.tools[0].name)
    return asyncio.run(run_action(environment, environment.prompt("train", 0), found, action_id="start")).content

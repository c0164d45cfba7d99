"""Environments of `benchmarks.live.gateway`, whose prompts tell its agents what to do."""

from __future__ import annotations

from typing import Any

from benchmarks.peers import even_words
from libra.envs.tool_arithmetic import ToolArithmetic
from libra.testing import FixedTurns
from libra.types import Prompt


class Questions(ToolArithmetic):
    """The quick start's task, whose agents write the token ids they were given to files in
    ``seen``."""

    def __init__(self, *, seen: str = "", **same: Any) -> None:
        super().__init__(**same)
        self.seen = seen

    def prompt(self, split: str, index: int) -> Prompt:
        given = super().prompt(split, index)
        return Prompt(given.prompt_id, given.messages, {**given.facts, "seen": self.seen})


class Turns(FixedTurns):
    """Questions for turns of a fixed length; ``turns`` is for the agent."""

    def __init__(self, *, turns: int = 4, **same: Any) -> None:
        super().__init__(**same)
        self.turns = turns

    def prompt(self, split: str, index: int) -> Prompt:
        given = super().prompt(split, index)
        asked = {"role": "user", "content": even_words.question(index)}  # words that its model's tokenizer has
        return Prompt(given.prompt_id, (asked,), {"turns": self.turns})

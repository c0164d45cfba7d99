"""Environments with no task in them. Declared emulations: they exercise the machinery, and no model learns from them."""

from __future__ import annotations

import hashlib
from typing import Any

from libra.envs import Environment, tool
from libra.types import Episode, Prompt, ToolCall


class FixedTurns(Environment):
    """Every turn is answered by a tool, so that each trajectory has ``rollout.max_turns`` turns.

    Reward is a number in [0, 1) drawn by the text of the last turn: it varies within a group, and means nothing.

    Parameters
    ----------
    prompt_chars, payload_chars : int
        Length of each question and of each observation.
    inline : bool
        Whether the tool runs within the generation quantum.
    """

    def __init__(self, *, prompt_chars: int = 16, payload_chars: int = 8, inline: bool = False, seed: int = 0) -> None:
        self.prompt_chars, self.payload_chars, self.seed = prompt_chars, payload_chars, seed
        self.tools = (tool(self.echo, inline=inline),)

    def prompt(self, split: str, index: int) -> Prompt:
        text = f"{split} {self.seed} {index} ".ljust(self.prompt_chars, "x")[: max(self.prompt_chars, 1)]
        return Prompt(f"{split}-{index}", ({"role": "user", "content": text},))

    def parse(self, text: str) -> tuple[ToolCall, ...]:
        return (ToolCall("echo", {"text": "y" * self.payload_chars}),)

    def grade(self, episode: Episode) -> float:
        return hashlib.blake2b(episode.answer.encode(errors="surrogatepass"), digest_size=1).digest()[0] / 256

    async def echo(self, text: str) -> str:
        """Give back the text.

        Args:
            text: What to give back.
        """
        return text


class DriftingPrompts(FixedTurns):
    """As `FixedTurns`, with questions that are long for every second stretch of questions: training outweighs rollout then.

    A long question should fill ``rollout.max_context_tokens`` nearly, so that little is generated after it.

    Parameters
    ----------
    stretch : int
        Questions in a row that are alike.
    long_chars : int
        Length of the long ones.
    """

    def __init__(self, *, stretch: int = 64, long_chars: int = 900, **same: Any) -> None:
        super().__init__(**same)
        self.stretch, self.long_chars = stretch, long_chars

    def prompt(self, split: str, index: int) -> Prompt:
        found = super().prompt(split, index)
        if index // self.stretch % 2 == 0:
            return found
        ((message),) = found.messages
        return Prompt(found.prompt_id, ({**message, "content": message["content"].ljust(self.long_chars, "x")},))


class GrowingPrompts(FixedTurns):
    """As `FixedTurns`, with questions that are longer from stretch to stretch: contexts grow as a run goes on.

    Parameters
    ----------
    stretch : int
        Questions in a row that are alike; those of one batch, for contexts that grow from iteration to iteration.
    first_chars, more_chars : int
        Length of the first ones, and by how much each stretch is longer than the one before.
    most_chars : int
        Length at which they stop growing.
    """

    def __init__(
        self, *, stretch: int, first_chars: int = 60, more_chars: int = 40, most_chars: int = 10_000, **same: Any
    ) -> None:
        super().__init__(**same)
        self.stretch, self.first_chars, self.more_chars, self.most_chars = stretch, first_chars, more_chars, most_chars

    def prompt(self, split: str, index: int) -> Prompt:
        found = super().prompt(split, index)
        ((message),) = found.messages
        length = min(self.first_chars + index // self.stretch * self.more_chars, self.most_chars)
        return Prompt(found.prompt_id, ({**message, "content": message["content"].ljust(length, "x")},))

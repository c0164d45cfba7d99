"""Tests of your own parts: contracts for engines and other parts, hostile text, and
`FixedTurns`."""

from __future__ import annotations

import hashlib

from libra.envs import Environment, tool
from libra.types import Episode, Prompt, ToolCall


class FixedTurns(Environment):
    """An environment without a task: a tool answers every turn, for ``rollout.max_turns`` turns.

    The reward, a hash of the last turn's text in [0, 1), varies within a group and has no meaning.

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
        """Return the text.

        Args:
            text: The text.
        """
        return text

"""Rollouts with a tail: the last group of each iteration is slow, so that an engine turns and returns in every one."""

import asyncio

from libra.envs import tool
from libra.testing import FixedTurns
from libra.types import Prompt


class SlowTail(FixedTurns):
    """`FixedTurns`; each call of the last group of ``groups`` is a program that takes ``seconds``."""

    def __init__(self, *, groups: int, seconds: float) -> None:
        super().__init__()
        self.groups, self.seconds = groups, seconds
        self.tools = (tool(self.echo, timeout_s=60.0),)

    def reset(self, prompt: Prompt) -> dict[str, bool]:
        return {"late": int(prompt.prompt_id.split("-")[1]) % self.groups == self.groups - 1}

    async def echo(self, text: str, *, trajectory_state: dict[str, bool]) -> str:  # type: ignore[override]
        """Return the text.

        Args:
            text: The text.
        """
        if trajectory_state["late"]:
            program = await asyncio.create_subprocess_exec("sleep", str(self.seconds))
            await program.wait()
        return text

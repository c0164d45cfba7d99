"""An environment in which everything goes wrong that a run has to go on with."""

import asyncio
import math
import zlib

import libra
from libra.testing import FixedTurns
from libra.types import Episode, ToolCall


class Troubled(FixedTurns):
    """Each call returns, raises, hangs, floods or names no tool, as the turn's text has it; samples 1 get the reward NaN."""

    def __init__(self, *, seed: int = 0) -> None:
        super().__init__(seed=seed)
        self.tools = (libra.tool(self.act, timeout_s=0.05, max_payload_chars=20),)

    def parse(self, text: str) -> tuple[ToolCall, ...]:
        how = ("returns", "raises", "hangs", "floods", "unknown")[zlib.crc32(text.encode(errors="replace")) % 5]
        return (ToolCall("nothing" if how == "unknown" else "act", {"how": how}),)

    def grade(self, episode: Episode) -> float:
        return math.nan if episode.trajectory_id.endswith("-1") else super().grade(episode)

    async def act(self, how: str) -> str:
        """Do something.

        Args:
            how: What.
        """
        if how == "hangs":
            await asyncio.Event().wait()
        if how == "raises":
            raise RuntimeError("the tool broke")
        return "z" * (10_000_000 if how == "floods" else 4)

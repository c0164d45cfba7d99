"""An environment whose tool returns more than a megabyte, and whose grader reads all of it."""

from __future__ import annotations

import libra
from libra.testing import FixedTurns

SIZE = 3_000_000


class LargeReturns(FixedTurns):
    """The reward is 1 if the last characters of the first return are there, by `libra.observation`."""

    def __init__(self, *, shown: int = 100, seed: int = 0) -> None:
        super().__init__(seed=seed)
        self.tools = (libra.tool(self.echo, max_payload_chars=shown),)

    async def echo(self, text: str) -> str:
        """Return much text.

        Args:
            text: Its end.
        """
        return "a" * SIZE + text

    def grade(self, episode) -> float:
        returned = episode.turns[0].returns[0]
        assert len(returned.content) < 9000
        whole = libra.observation(returned)
        return float(len(whole) == SIZE + 8 and whole.endswith("yyyyyyyy"))

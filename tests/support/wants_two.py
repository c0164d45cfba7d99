"""An environment whose actions need a second tool worker, for tests of those that come where actions wait."""

import os
import threading
from pathlib import Path

from libra.envs import tool
from libra.testing import FixedTurns
from libra.types import ToolCall


class WantsTwo(FixedTurns):
    """An action ends only when actions have begun on two workers; ``path`` is a directory of all of them."""

    def __init__(self, *, path: str, seed: int = 0) -> None:
        super().__init__(seed=seed)
        self.path = path
        self.tools = (tool(self.work, cores=1, timeout_s=120, fatal=("timeout",)),)

    def parse(self, text: str) -> tuple[ToolCall, ...]:
        return (ToolCall("work", {"text": "y"}),)

    def work(self, text: str) -> str:
        """Work.

        Args:
            text: Anything.
        """
        (Path(self.path) / str(os.getppid())).touch()  # the process that forks the calls of one worker
        while len(list(Path(self.path).iterdir())) < 2:
            threading.Event().wait(0.02)
        return text

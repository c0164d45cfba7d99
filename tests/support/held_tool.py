"""An environment one of whose trajectories waits in its first action until the test lets it go on."""

from __future__ import annotations

from pathlib import Path

import libra
from libra.testing import FixedTurns
from libra.types import ToolCall

HELD = "train-0-0-0"


class Held(FixedTurns):
    """Every turn calls `look`. In its first turn `HELD` reads ``gate``, a named pipe, which blocks until somebody has written."""

    def __init__(self, *, gate: str, seed: int = 0) -> None:
        super().__init__(seed=seed)
        self.gate = Path(gate)
        self.tools = (libra.tool(self.look, timeout_s=240.0),)

    def parse(self, text: str) -> tuple[ToolCall, ...]:
        return (ToolCall("look", {}),)

    def look(self, action_id: str) -> str:
        """Look.

        Returns:
            What there is.
        """
        if action_id.startswith(f"{HELD}/0/"):
            self.gate.read_text()
        return "yyyyyyyy"

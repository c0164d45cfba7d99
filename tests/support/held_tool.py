"""An environment some of whose trajectories wait in their first action until the test lets them go on."""

from pathlib import Path

import libra
from libra.testing import FixedTurns
from libra.types import ToolCall


class Held(FixedTurns):
    """Every turn calls `look`. In their first turn trajectories whose name begins with ``held`` read ``gate``, a named pipe, which
    blocks until somebody has opened it to write."""

    def __init__(self, *, gate: str, held: str = "train-0-0-0", seed: int = 0) -> None:
        super().__init__(seed=seed)
        self.gate, self.held = Path(gate), held
        self.tools = (libra.tool(self.look, timeout_s=240.0),)

    def parse(self, text: str) -> tuple[ToolCall, ...]:
        return (ToolCall("look", {}),)

    def look(self, action_id: str) -> str:
        """Look.

        Returns:
            What there is.
        """
        name, turn, *_ = action_id.split("/")
        if turn == "0" and name.startswith(self.held):
            self.gate.read_text()
        return "yyyyyyyy"

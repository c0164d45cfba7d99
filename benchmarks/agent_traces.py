"""Turns of real agents, for replay to a policy.

A set is a file of ``DIR/agent_turns`` (`libra.planner.agent_turns`) with at least the columns ``REQUIRED``. Its name is the file's,
or one of the prefixes in ``KNOWN``.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from libra.planner.agent_turns import AgentTurn, agent_turn_files, read_agent_turns
from libra.types import ToolOutcome

KNOWN = ("mini_swe", "agentcgroup", "tau")
"""Sets whose file name is longer, e.g. ``tau_airline_gpt4o.csv``."""

REQUIRED = ("source", "task", "sample", "tool", "status", "payload_chars", "completion_tokens")
TOKEN_S = 0.02
"""Seconds per generated token if the trace has none."""
TOOL_S = 0.1


@dataclass(frozen=True, slots=True)
class Turn:
    """One generation of ``tokens`` and its tool's result; `NO_TOOL`: the last turn."""

    tokens: int
    tool: str
    status: ToolOutcome
    payload_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Trace:
    """A recorded trajectory: its prompt (``group``), its environment (``family``), its turns."""

    key: str
    task: str
    group: str
    family: str
    turns: tuple[Turn, ...]

    @property
    def tokens(self) -> int:
        """Generated tokens in all."""
        return sum(turn.tokens for turn in self.turns)


def sets_in(data: Path) -> dict[str, Path]:
    """Every trace set of a data directory by name.

    Raises
    ------
    ConfigError
        The directory has no ``agent_turns`` with CSV files.
    """
    return {
        next((name for name in KNOWN if path.stem.startswith(name)), path.stem): path for path in agent_turn_files(data)
    }


def read_traces(path: Path) -> list[Trace]:
    """The trajectories of one file, in its order, without those that generated nothing."""
    return [
        Trace(
            "/".join(filter(None, (one.source, one.model, one.task, one.sample))),
            one.task,
            "/".join(filter(None, (one.source, one.model, one.task))),
            one.source,
            tuple(map(_turn, one.turns)),
        )
        for one in read_agent_turns(path, REQUIRED)
        if sum(turn.completion_tokens for turn in one.turns) > 0
    ]


def _turn(turn: AgentTurn) -> Turn:
    tokens = turn.completion_tokens
    seconds = turn.gap_s
    if seconds is None:
        seconds = (TOKEN_S * tokens if turn.llm_s is None else turn.llm_s) + (
            TOOL_S if turn.tool_s is None else turn.tool_s
        )
    return Turn(tokens, turn.tool, turn.status, turn.payload_tokens, max(seconds, 1e-3))

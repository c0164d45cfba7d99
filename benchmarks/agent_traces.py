"""Turns of real agents as the events that a policy hears.

A set is a CSV file of ``DIR/agent_turns`` with one row per turn: ``source, task, sample, turn, tool, status, payload_chars,
completion_tokens`` and any of ``llm_s, tool_s, gap_s``. Its name is the file's up to the known prefixes below.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

from libra.errors import ConfigError

KNOWN = ("mini_swe", "agentcgroup", "tau")
"""Names of sets whose file name goes on, e.g. ``tau_airline_gpt4o.csv``."""
EXCERPT = Path(__file__).parent / "data"
CHARS_PER_TOKEN = 4
TOKEN_S = 0.02
"""Seconds per generated token where the trace has none."""
TOOL_S = 0.1


@dataclass(frozen=True, slots=True)
class Turn:
    """One generation of ``tokens`` and what its tool returned; an empty tool: it called none and was over."""

    tokens: int
    tool: str
    status: str
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
        """Generated in all."""
        return sum(turn.tokens for turn in self.turns)


def sets_in(data: Path) -> dict[str, Path]:
    """Every trace set of a data directory by name.

    Raises
    ------
    ConfigError
        The directory has no ``agent_turns`` with CSV files.
    """
    files = sorted((data / "agent_turns").glob("*.csv"))
    if not files:
        raise ConfigError(
            f"--data: no *.csv in {data / 'agent_turns'}; give a directory with agent_turns/, or leave the option out"
        )
    return {next((name for name in KNOWN if path.stem.startswith(name)), path.stem): path for path in files}


def read_traces(path: Path) -> list[Trace]:
    """The trajectories of one file, in its order; those that generated nothing are left out."""
    turns: dict[tuple[str, str, str], list[Turn]] = {}
    with path.open(newline="") as lines:
        for row in csv.DictReader(lines):
            turns.setdefault((row["source"], row["task"], row["sample"]), []).append(_turn(row))
    return [
        Trace("/".join(names), names[1], "/".join(names[:2]), names[0], tuple(made))
        for names, made in turns.items()
        if sum(turn.tokens for turn in made) > 0
    ]


def _turn(row: dict[str, str]) -> Turn:
    tokens = int(float(row["completion_tokens"] or 0))
    seconds = row.get("gap_s") or ""
    if not seconds:
        seconds = float(row.get("llm_s") or TOKEN_S * tokens) + float(row.get("tool_s") or TOOL_S)
    over = row["tool"] == "none" and row["status"] == "end"
    return Turn(
        tokens,
        "" if over else row["tool"],
        "" if over else row["status"],
        int(float(row["payload_chars"] or 0)) // CHARS_PER_TOKEN,
        max(float(seconds), 1e-3),
    )

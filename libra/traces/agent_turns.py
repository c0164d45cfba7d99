"""Files of recorded agents, one row per turn: the one reader of planner, simulator and benchmarks.

Columns: ``source, model, task, sample, turn, tool, status, payload_chars, prompt_tokens, completion_tokens, llm_s, tool_s, gap_s``;
each reader says which it cannot do without, the others may be missing or empty. A data directory has its files in ``agent_turns``.
Words of ``status`` become `libra.types.ToolOutcome` here, by `libra.traces.outcome_words`.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import isfinite
from pathlib import Path
from typing import NamedTuple

from libra.errors import ConfigError
from libra.traces.outcome_words import AGENT_TURNS, outcome_of
from libra.types import NO_TOOL, ToolOutcome

CHARS_PER_TOKEN = 4


class AgentTurn(NamedTuple):
    """One generation and what its tool returned; None: the file does not say.

    Attributes
    ----------
    number : int
        Its place among the turns of its trajectory.
    prompt_tokens : int or None
        Context before it.
    completion_tokens, payload_tokens : int
        What it generated; characters that its tool returned over ``CHARS_PER_TOKEN``.
    tool : str
        The tool's name; empty where none came back, and where the file does not say.
    status : ToolOutcome
        How it came back; `NO_TOOL`: none did, the trajectory ended with this turn (or the file has no statuses at all).
    llm_s, tool_s, gap_s : float or None
        Seconds of the generation, of the tool, until the next turn began.
    """

    number: int
    prompt_tokens: int | None
    completion_tokens: int
    tool: str
    status: ToolOutcome
    payload_tokens: int
    llm_s: float | None
    tool_s: float | None
    gap_s: float | None


class Recorded(NamedTuple):
    """A trajectory: what tells it from others (empty: the file does not say), and its turns by number."""

    source: str
    model: str
    task: str
    sample: str
    turns: tuple[AgentTurn, ...]


def agent_turn_files(data: Path, option: str = "--data") -> list[Path]:
    """Every file of agents' turns of a data directory, by name; ConfigError where there is none."""
    found = sorted((data / "agent_turns").glob("*.csv"))
    if not found:
        raise ConfigError(f"{option} {data}: there is no {data / 'agent_turns'}/*.csv; give a directory that has some")
    return found


def read_agent_turns(path: Path, required: Sequence[str], where: str = "traces") -> list[Recorded]:
    """The trajectories of one file, in its order; ``where`` says what it was given as.

    Raises ConfigError where it cannot be read, a required column is missing, a number is none, or a status is no word of the
    format; where ``status`` is required, also where a turn that is not the last of its trajectory has none.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            return agent_turns(file, required, f"{where} {path}")
    except OSError as error:
        raise ConfigError(
            f"{where} {path}: it cannot be read: {error.strerror or error}; give a CSV with a row for each turn"
        ) from error


def agent_turns(lines: Iterable[str], required: Sequence[str], where: str) -> list[Recorded]:
    """`read_agent_turns` of lines that are at hand."""
    reader = csv.DictReader(lines)
    missing = [name for name in required if name not in (reader.fieldnames or ())]
    if missing:
        raise ConfigError(
            f"{where}: columns {', '.join(missing)} are missing; it has {', '.join(reader.fieldnames or ())}, and a trace has "
            f"{', '.join(required)}, one row per turn"
        )
    found: dict[tuple[str, str, str, str], list[AgentTurn]] = {}
    for row in reader:
        source, model, task, sample = (row.get(name) or "" for name in ("source", "model", "task", "sample"))
        try:
            turn = _turn(row)
        except ValueError as error:
            raise ConfigError(f"{where}, line {reader.line_num}, task {task!r}: {error}") from error
        found.setdefault((source, model, task, sample), []).append(turn)
    recorded = [Recorded(*names, tuple(sorted(turns, key=lambda turn: turn.number))) for names, turns in found.items()]
    if "status" in required:
        for one in recorded:
            _check_outcomes(one, where)
    return recorded


def _check_outcomes(one: Recorded, where: str) -> None:
    """ConfigError where a trajectory goes on after a turn from which no tool came back."""
    for turn, following in pairwise(one.turns):
        if turn.status == NO_TOOL:
            ends = " or ".join(repr(word) for word, outcome in AGENT_TURNS.items() if outcome == NO_TOOL)
            raise ConfigError(
                f"{where}, task {one.task!r}, sample {one.sample!r}, turn {turn.number}: status {ends}, which is for the last "
                f"turn; this one is followed by turn {following.number}"
            )


def _turn(row: dict[str, str]) -> AgentTurn:
    def number(name: str) -> float | None:
        text = (row.get(name) or "").strip()
        if not text:
            return None
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not isfinite(value):
            raise ValueError(f"{name} {text!r} is no number")
        return value

    prompt = number("prompt_tokens")
    status = outcome_of(row.get("status") or "", AGENT_TURNS)
    ends = status == NO_TOOL and "status" in row
    return AgentTurn(
        int(number("turn") or 0),
        None if prompt is None else int(prompt),
        int(number("completion_tokens") or 0),
        "" if ends else row.get("tool") or "",
        status,
        int(number("payload_chars") or 0) // CHARS_PER_TOKEN,
        *(number(name) for name in ("llm_s", "tool_s", "gap_s")),
    )

"""Reader of agent trace files: one row per turn, shared by planner, simulator and benchmarks.

Columns: ``source, model, task, sample, turn, tool, status, payload_chars, prompt_tokens,
completion_tokens, llm_s, tool_s, gap_s``. Each caller names the columns that it requires; others
may be missing or empty. `AGENT_TURNS` maps each ``status`` word to a `libra.types.ToolOutcome`; an
unknown word is an error.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from math import isfinite, nan
from pathlib import Path
from typing import NamedTuple

from libra.errors import ConfigError
from libra.types import NO_TOOL, ToolOutcome, ToolStatus

CHARS_PER_TOKEN = 4

AGENT_TURNS: Mapping[str, ToolOutcome] = {
    "success": ToolStatus.OK,  # return code 0, or a result that is not marked as an error
    "failure": ToolStatus.ERROR,
    "timeout": ToolStatus.TIMEOUT,
    "format_error": ToolStatus.MALFORMED,  # mini-swe-agent: the reply held no command, or more than one
    "end": NO_TOOL,  # the trajectory ended with this turn
    "": NO_TOOL,
    **{str(status): status for status in ToolStatus},
}
"""Tool outcome of each ``status`` word in agent trace files and in files of Libra's own runs."""


class AgentTurn(NamedTuple):
    """One generation and the result of its tool; a field is None without its column."""

    number: int  # position within the trajectory
    prompt_tokens: int | None  # context before this turn
    completion_tokens: int
    tool: str  # ``tool`` and ``status`` are empty if the trajectory ended with this turn
    status: ToolOutcome
    payload_tokens: int  # characters returned by the tool, divided by ``CHARS_PER_TOKEN``
    llm_s: float | None
    tool_s: float | None
    gap_s: float | None  # until the next turn started


class Recorded(NamedTuple):
    """A recorded trajectory: identity (empty strings if not in the file) and turns in order."""

    source: str
    model: str
    task: str
    sample: str
    turns: tuple[AgentTurn, ...]


def read_agent_turns(path: Path, required: Sequence[str], where: str = "traces") -> list[Recorded]:
    """The trajectories of one file, in file order; ``where`` names the option in errors.

    ConfigError if the file cannot be read, a required column is missing, a field is not a number or
    a status is unknown; if ``status`` is required, also for an empty status before the last turn of
    a trajectory.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            return agent_turns(file, required, f"{where} {path}")
    except OSError as error:
        raise ConfigError(
            f"{where} {path}: it cannot be read: {error.strerror or error}; give a CSV with a row for each turn"
        ) from error


def agent_turns(lines: Iterable[str], required: Sequence[str], where: str) -> list[Recorded]:
    """`read_agent_turns` for lines that are already in memory."""
    reader = csv.DictReader(lines)
    if missing := [name for name in required if name not in (reader.fieldnames or ())]:
        raise ConfigError(
            f"{where}: columns {', '.join(missing)} are missing; it has {', '.join(reader.fieldnames or ())}, and a trace has "
            f"{', '.join(required)}, one row per turn"
        )
    found: dict[tuple[str, ...], list[AgentTurn]] = {}
    for row in reader:
        try:
            turn = _turn(row)
        except ValueError as error:
            raise ConfigError(f"{where}, line {reader.line_num}, task {row.get('task')!r}: {error}") from error
        found.setdefault(tuple(row.get(name) or "" for name in Recorded._fields[:4]), []).append(turn)
    recorded = [
        Recorded(source, model, task, sample, tuple(sorted(turns, key=lambda turn: turn.number)))
        for (source, model, task, sample), turns in found.items()
    ]
    for one in recorded if "status" in required else ():
        for turn, following in pairwise(one.turns):
            if turn.status == NO_TOOL:
                ends = " or ".join(repr(word) for word, outcome in AGENT_TURNS.items() if outcome == NO_TOOL)
                raise ConfigError(
                    f"{where}, task {one.task!r}, sample {one.sample!r}, turn {turn.number}: status {ends}, which is for the last "
                    f"turn; this one is followed by turn {following.number}"
                )
    return recorded


def _number(row: dict[str, str], name: str) -> float | None:
    text = (row.get(name) or "").strip()
    try:
        value = float(text) if text else None
    except ValueError:
        value = nan
    if value is not None and not isfinite(value):
        raise ValueError(f"{name} {text!r} is not a number")
    return value


def _turn(row: dict[str, str]) -> AgentTurn:
    prompt, word = _number(row, "prompt_tokens"), row.get("status") or ""
    if word not in AGENT_TURNS:
        raise ValueError(
            f"status {word!r} is not a word of this format; it has {', '.join(known or 'nothing' for known in AGENT_TURNS)}; a new "
            "word needs a place in libra/planner/agent_turns.py"
        )
    ends = AGENT_TURNS[word] == NO_TOOL and "status" in row
    return AgentTurn(
        int(_number(row, "turn") or 0),
        None if prompt is None else int(prompt),
        int(_number(row, "completion_tokens") or 0),
        "" if ends else row.get("tool") or "",
        AGENT_TURNS[word],
        int(_number(row, "payload_chars") or 0) // CHARS_PER_TOKEN,
        *(_number(row, name) for name in ("llm_s", "tool_s", "gap_s")),
    )

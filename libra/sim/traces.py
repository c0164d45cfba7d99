"""Recorded trajectories as traces to draw workloads from: files of agent turns, one row per turn.

Columns: ``task, sample, turn, tool, status, payload_chars, prompt_tokens, completion_tokens``; optionally ``source, model`` (they
separate trajectories and name the family) and ``tool_s``. Where tools were not timed, their seconds are drawn from a
distribution (`tool_seconds`), with a seed, and are no measurement.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from libra.errors import ConfigError
from libra.sim.workload import Trace, TurnPlan

CHARS_PER_TOKEN = 4
REQUIRED = ("task", "turn", "tool", "status", "completion_tokens")
_ENDS = ("", "end", "none")


def tool_seconds(rng: np.random.Generator, count: int) -> np.ndarray:
    """Seconds of tool calls of a coding agent: three quarters are file tools (0.04 s), the rest tests and installs (mean 10 s).

    Shaped after what was measured on agentcgroup's runs: median 0.04 s, P90 9.1 s, P99 21 s; their timeouts are left out.
    """
    return np.where(rng.random(count) < 0.75, 0.04, np.minimum(rng.gamma(2.0, 5.0, count), 60.0))


def load_traces(path: Path, *, seed: int = 0) -> list[Trace]:
    """Trajectories of one file, in its order; ConfigError where columns are missing or a number is none."""
    try:
        with path.open(newline="") as file:
            reader = csv.DictReader(file)
            missing = [name for name in REQUIRED if name not in (reader.fieldnames or ())]
            if missing:
                raise ConfigError(
                    f"traces {path}: columns {', '.join(missing)} are missing; it has {reader.fieldnames}"
                )
            rows: dict[tuple[str, ...], list[dict[str, str]]] = {}
            for row in reader:
                place = tuple(row.get(name) or "" for name in ("source", "model", "task", "sample"))
                rows.setdefault(place, []).append(row)
    except OSError as error:
        raise ConfigError(f"traces {path}: {error.strerror or error}") from error
    rng = np.random.default_rng([seed, 0x7001])
    traces = []
    for (source, model, task, _), turns in rows.items():
        turns.sort(key=lambda row: _number(path, row, "turn"))
        traces.append(_trace(path, f"{model}/{task}" if model else task, source, turns, rng))
    return traces


def trace_files(data: Path) -> list[Path]:
    """Every file of agent turns under ``data``, by name; ConfigError where there is none."""
    found = sorted((data / "agent_turns").glob("*.csv"))
    if not found:
        raise ConfigError(f"--data {data}: there is no {data / 'agent_turns'}/*.csv")
    return found


def _trace(path: Path, task: str, source: str, rows: Sequence[dict[str, str]], rng: np.random.Generator) -> Trace:
    prompts = [_number(path, row, "prompt_tokens") for row in rows]
    new = [max(1, _number(path, row, "completion_tokens")) for row in rows]
    drawn = tool_seconds(rng, len(rows))
    turns = []
    for i, row in enumerate(rows):
        last = i + 1 == len(rows)
        payload = prompts[i + 1] - prompts[i] - new[i] if not last and prompts[i] and prompts[i + 1] else 0
        if payload <= 0:
            payload = _number(path, row, "payload_chars") // CHARS_PER_TOKEN
        timed = (row.get("tool_s") or "").strip()
        tool = row["tool"] or "tool"
        ends = last and (row["status"] in _ENDS or tool in _ENDS)
        turns.append(
            TurnPlan(new[i], "" if last else tool, "" if ends else row["status"], 0 if last else payload,
                     0.0 if last else float(timed) if timed else float(drawn[i]))
        )  # fmt: skip
    return Trace(task, next((prompt for prompt in prompts if prompt), 1), tuple(turns), source)


def _number(path: Path, row: dict[str, str], name: str) -> int:
    text = (row.get(name) or "0").strip() or "0"
    try:
        return int(float(text))
    except ValueError as error:
        raise ConfigError(f"traces {path}: {name} {text!r} of task {row.get('task')!r} is no number") from error

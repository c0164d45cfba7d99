"""One trajectory for a reader: its text by who wrote it, its turns, and every token on request."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from libra.observe.token_text import Decode
from libra.types import NO_TOOL, FailureClass, ToolStatus, Trajectory

STYLES: Mapping[str, str] = {"prompt": "dim", "generated": "bold green", "observation": "yellow"}


class Segment(NamedTuple):
    """A run of tokens of one origin: ``prompt``, ``generated`` or ``observation``, from ``start`` to before ``stop``."""

    origin: str
    start: int
    stop: int


def segments(trajectory: Trajectory) -> list[Segment]:
    """The tokens of a trajectory cut where the model's own begin and end; together they are all of them, in order."""
    action = trajectory.is_action
    cuts = [0, *(np.flatnonzero(np.diff(action)) + 1).tolist(), len(action)]
    found = []
    for start, stop in itertools.pairwise(cuts):
        if start < stop:
            origin = "generated" if action[start] else "observation" if start else "prompt"
            found.append(Segment(origin, start, stop))
    return found


def render(
    trajectory: Trajectory, row: Mapping[str, Any], *, place: str, decode: Decode | None, tokens: bool
) -> RenderableType:
    """The whole page of one trajectory.

    Parameters
    ----------
    row : mapping
        Its row of per-trajectory columns in the store.
    place : str
        Where it lies among those selected, e.g. ``3 of 40``.
    decode : callable or None
        None: token ids are shown instead of text.
    tokens : bool
        Also one line per token.
    """
    parts: list[RenderableType] = [_facts(trajectory, row, place), _text(trajectory, decode)]
    if trajectory.turns:
        parts.append(_turns(trajectory))
    if tokens:
        parts.append(_tokens(trajectory, decode))
    return Group(*parts)


def as_json(
    trajectory: Trajectory, row: Mapping[str, Any], *, index: int, decode: Decode | None, tokens: bool
) -> dict[str, Any]:
    """The same as one JSON-able object; numbers that are NaN are None, text is None without a tokenizer."""
    result: dict[str, Any] = {"index": index, "trajectory": str(trajectory.trajectory_id)}
    result |= {name: value for name, value in row.items() if name != "prompt_json"}
    result["prompt"] = {
        "messages": [dict(message) for message in trajectory.prompt.messages],
        "facts": dict(trajectory.prompt.facts),
    }
    result["segments"] = [
        {
            "origin": origin,
            "start": start,
            "stop": stop,
            "text": decode(_ids(trajectory, start, stop)) if decode else None,
        }
        for origin, start, stop in segments(trajectory)
    ]
    result["turns"] = trajectory.turns
    if tokens:
        result["tokens"] = [
            {
                "id": int(trajectory.token_ids[i]),
                "text": decode(_ids(trajectory, i, i + 1)) if decode else None,
                "generated": bool(trajectory.is_action[i]),
                "logprob": float(trajectory.behaviour_logprob[i]) if trajectory.is_action[i] else None,
                "version": int(trajectory.weight_version[i]),
                "kv_version": int(trajectory.kv_version[i]),
            }
            for i in range(len(trajectory.token_ids))
        ]
    plain: dict[str, Any] = _finite(result)
    return plain


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _ids(trajectory: Trajectory, start: int, stop: int) -> list[int]:
    ids: list[int] = trajectory.token_ids[start:stop].tolist()
    return ids


def _facts(trajectory: Trajectory, row: Mapping[str, Any], place: str) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column()
    consumed = f"batch {row['batch']}" if row["batch"] >= 0 else "no batch"
    table.add_row(
        "trajectory", Text(f"{trajectory.trajectory_id}  ({place}; consumed by {consumed}; epoch {trajectory.epoch})")
    )
    graded = "not graded" if math.isnan(trajectory.reward) else f"{trajectory.reward:g}"
    table.add_row("reward", Text(f"{graded}   advantage {trajectory.advantage:+.4f}"))
    ended = Text(str(trajectory.end_reason))
    if trajectory.failure is not FailureClass.NONE:
        ended.append(f"   failure: {trajectory.failure}", style="bold red")
        ended.append(f" {trajectory.failure_detail}" if trajectory.failure_detail else "")
    if trajectory.retried:
        ended.append(f"   attempt {trajectory.attempt + 1}, after: {trajectory.retried}", style="yellow")
    table.add_row("ended", ended)
    newest = int(trajectory.weight_version.max(initial=-1))
    versions = "nothing generated" if newest < 0 else f"weight versions {trajectory.oldest_version} to {newest}"
    table.add_row(
        "tokens", Text(f"{len(trajectory.token_ids)}, of which {trajectory.num_action_tokens} generated; {versions}")
    )
    table.add_row("prompt", Text(f"{trajectory.prompt.prompt_id}  {dict(trajectory.prompt.facts)}"))
    return table


def _text(trajectory: Trajectory, decode: Decode | None) -> RenderableType:
    text = Text("\n")
    for origin, start, stop in segments(trajectory):
        ids = _ids(trajectory, start, stop)
        text.append(decode(ids) if decode else " ".join(map(str, ids)) + "\n", style=STYLES[origin])
    text.append("\n\n")
    for origin, style in STYLES.items():
        text.append(f"[{origin}] ", style=style)
    return text


def _turns(trajectory: Trajectory) -> RenderableType:
    table = Table(title="turns", title_justify="left")
    names = (
        "turn",
        "tool",
        "status",
        "calls",
        "context",
        "generated",
        "observed",
        "stop",
        "generate s",
        "tool s",
        "worker",
    )
    for name in names:
        table.add_column(name)
    for turn in trajectory.turns:
        status = turn["status"]
        table.add_row(
            str(turn["turn"]),
            Text(turn["tool"]),
            Text(status, style="" if status in (NO_TOOL, ToolStatus.OK) else "red"),
            str(turn["num_calls"]),
            str(turn["prompt_tokens"]),
            str(turn["generated_tokens"]),
            str(turn["observation_tokens"]),
            Text(turn["stop_reason"]),
            f"{turn['generate_s']:.3f}",
            f"{turn['tool_s']:.3f}",
            Text(turn["worker"]),
        )
    return table


def _tokens(trajectory: Trajectory, decode: Decode | None) -> RenderableType:
    table = Table(title="tokens", title_justify="left")
    for name in ("position", "id", "text", "origin", "log-prob", "version", "kv version"):
        table.add_column(name)
    for origin, start, stop in segments(trajectory):
        for i in range(start, stop):
            generated = origin == "generated"
            table.add_row(
                str(i),
                str(trajectory.token_ids[i]),
                Text(repr(decode(_ids(trajectory, i, i + 1)))[1:-1] if decode else "", style=STYLES[origin]),
                origin,
                f"{trajectory.behaviour_logprob[i]:.4f}" if generated else "",
                str(trajectory.weight_version[i]) if generated else "",
                str(trajectory.kv_version[i]) if generated else "",
            )
    return table

"""One trajectory for a reader: text by origin, turns, and optionally every token."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from libra.config.model_paths import resolve_model
from libra.errors import ModelError
from libra.types import NO_TOOL, FailureClass, ToolStatus, Trajectory
from libra.untrusted import shown, shown_line

STYLES: Mapping[str, str] = {"prompt": "dim", "generated": "bold green", "observation": "yellow"}
Decode = Callable[[Sequence[int]], str]


class Segment(NamedTuple):
    """Tokens of one origin: ``prompt``, ``generated`` or ``observation``; ``stop`` is exclusive."""

    origin: str
    start: int
    stop: int


def segments(trajectory: Trajectory) -> list[Segment]:
    """All tokens of a trajectory in order, split where generated tokens start and end."""
    action = trajectory.is_action
    cuts = [0, *(np.flatnonzero(np.diff(action)) + 1).tolist(), len(action)]
    return [
        Segment("generated" if action[start] else "observation" if start else "prompt", start, stop)
        for start, stop in itertools.pairwise(cuts)
        if start < stop
    ]


def spelled(trajectory: Trajectory, start: int, stop: int, decode: Decode | None) -> str:
    """Text of tokens; without ``decode``, their ids on a line."""
    ids: list[int] = trajectory.token_ids[start:stop].tolist()
    return decode(ids) if decode else " ".join(map(str, ids)) + "\n"


def headline(trajectory: Trajectory) -> str:
    """One line about a trajectory: name, reward, end, failure."""
    reward = "not graded" if math.isnan(trajectory.reward) else f"reward {trajectory.reward:g}"
    ended = f"{trajectory.end_reason}, {len(trajectory.turns)} turns, {trajectory.num_action_tokens} generated tokens"
    failed = trajectory.failure is not FailureClass.NONE
    detail = f"; {trajectory.failure}: {shown_line(trajectory.failure_detail)}" if failed else ""
    return f"{trajectory.trajectory_id}, {reward}, {ended}{detail}"


def terminal_view(
    trajectory: Trajectory, row: Mapping[str, Any], *, place: str, decode: Decode | None, tokens: bool
) -> list[RenderableType]:
    """One trajectory for an 80-column terminal: facts, text by origin, turns, optionally tokens.

    ``row`` holds the trajectory's store columns; ``place`` is e.g. ``3 of 40``; without ``decode``,
    token ids replace text.
    """
    text = Text("\n")
    for origin, start, stop in segments(trajectory):
        text.append(shown(spelled(trajectory, start, stop, decode)), style=STYLES[origin])
    text.append("\n\n")
    for origin, style in STYLES.items():
        text.append(f"[{origin}] ", style=style)
    parts: list[RenderableType] = [_facts(trajectory, row, place), text]
    if trajectory.turns:
        parts.append(_turns(trajectory))
    return [*parts, _tokens(trajectory, decode)] if tokens else parts


def as_json(
    trajectory: Trajectory, row: Mapping[str, Any], *, index: int, decode: Decode | None, tokens: bool
) -> dict[str, Any]:
    """One trajectory as a JSON object; text is None without a tokenizer."""

    def text(start: int, stop: int) -> str | None:
        return spelled(trajectory, start, stop, decode) if decode else None

    prompt = trajectory.prompt
    result: dict[str, Any] = {"index": index, "trajectory": str(trajectory.trajectory_id)}
    result |= {name: value for name, value in row.items() if name != "prompt_json"}
    result |= {
        "prompt": {"messages": [dict(message) for message in prompt.messages], "facts": dict(prompt.facts)},
        "segments": [each._asdict() | {"text": text(each.start, each.stop)} for each in segments(trajectory)],
        "turns": trajectory.turns,
    }
    if tokens:
        result["tokens"] = [
            {
                "id": int(trajectory.token_ids[i]), "text": text(i, i + 1), "generated": bool(trajectory.is_action[i]),
                "logprob": float(trajectory.behaviour_logprob[i]) if trajectory.is_action[i] else None,
                "version": int(trajectory.weight_version[i]), "kv_version": int(trajectory.kv_version[i]),
            }
            for i in range(len(trajectory.token_ids))
        ]  # fmt: skip
    return result


def _facts(trajectory: Trajectory, row: Mapping[str, Any], place: str) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column()
    consumed = f"batch {row['batch']}" if row["batch"] >= 0 else "no batch"
    where = f"({place}; consumed by {consumed}; epoch {trajectory.epoch})"
    table.add_row("trajectory", Text(f"{trajectory.trajectory_id}  {where}"))
    graded = "not graded" if math.isnan(trajectory.reward) else f"{trajectory.reward:g}"
    table.add_row("reward", Text(f"{graded}   advantage {trajectory.advantage:+.4f}"))
    if "late_reward" in row:
        counts = "no batch has taken it" if row["late_batch"] is None else f"counts from batch {row['late_batch']} on"
        late = f", {row['late_delay']} versions late" if row["late_delay"] else ""
        table.add_row("late reward", Text(f"{row['late_reward']:g}, {counts}{late}"))
    for each in row.get("observations", ()):
        damaged = "" if each["sound"] else ", DAMAGED"
        table.add_row(
            f"turn {each['turn']}", Text(f"returned {each['num_bytes']:,} bytes{damaged}: {each['reference']}")
        )
    ended = Text(str(trajectory.end_reason))
    if trajectory.failure is not FailureClass.NONE:
        ended.append(f"   failure: {trajectory.failure}", style="bold red")
        ended.append(f" {shown(trajectory.failure_detail)}" if trajectory.failure_detail else "")
    if trajectory.retried:
        ended.append(f"   attempt {trajectory.attempt + 1}, after: {trajectory.retried}", style="yellow")
    table.add_row("ended", ended)
    newest = int(trajectory.weight_version.max(initial=-1))
    versions = "nothing generated" if newest < 0 else f"weight versions {trajectory.oldest_version} to {newest}"
    num = f"{len(trajectory.token_ids)}, of which {trajectory.num_action_tokens} generated"
    table.add_row("tokens", Text(f"{num}; {versions}"))
    table.add_row("prompt", Text(shown(f"{trajectory.prompt.prompt_id}  {dict(trajectory.prompt.facts)}")))
    return table


def _turns(trajectory: Trajectory) -> RenderableType:
    table = Table(title="turns", title_justify="left", box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for name in ("turn", "tool", "status", "calls", "context", "made", "read", "stop", "gen. s", "tool s", "worker"):
        is_word = name in ("tool", "status", "stop", "worker")
        table.add_column(
            name, overflow="fold", no_wrap=name not in ("tool", "worker"), justify="left" if is_word else "right"
        )
    for turn in trajectory.turns:
        counts = (str(turn[name]) for name in ("num_calls", "prompt_tokens", "generated_tokens", "observation_tokens"))
        status = Text(turn["status"], style="" if turn["status"] in (NO_TOOL, ToolStatus.OK) else "red")
        seconds = (f"{turn[name]:.3f}" for name in ("generate_s", "tool_s"))
        first = (str(turn["turn"]), Text(shown(turn["tool"])), status)
        table.add_row(*first, *counts, Text(turn["stop_reason"]), *seconds, Text(turn["worker"]))
    return table


def _tokens(trajectory: Trajectory, decode: Decode | None) -> RenderableType:
    table = Table(title="tokens", title_justify="left")
    for name in ("at", "id", "text", "origin", "log-prob", "ver.", "kv"):
        table.add_column(name, overflow="fold", no_wrap=name != "text")
    for origin, start, stop in segments(trajectory):
        for i in range(start, stop):
            text = Text(repr(spelled(trajectory, i, i + 1, decode))[1:-1] if decode else "", style=STYLES[origin])
            versions = (str(trajectory.weight_version[i]), str(trajectory.kv_version[i]))
            made = (f"{trajectory.behaviour_logprob[i]:.4f}", *versions) if origin == "generated" else ("", "", "")
            table.add_row(str(i), str(trajectory.token_ids[i]), text, origin, *made)
    return table


def load_decode(run_dir: Path) -> Decode:
    """Function from token ids to text, special tokens included, for a run's trajectories.

    Reads ``RUN/tokenizer``, else ``model.path`` of ``RUN/config.resolved.yaml``; downloads nothing.
    ModelError without a readable tokenizer.
    """
    kept = run_dir / "tokenizer"
    source = kept if kept.is_dir() else _model_of(run_dir)
    file = Path(source) / "tokenizer.json"
    try:
        if file.is_file():
            # The bare tokenizer loads in milliseconds; transformers would import torch.
            from tokenizers import Tokenizer

            fast = Tokenizer.from_file(str(file))
            return lambda ids: str(fast.decode(list(ids), skip_special_tokens=False))
        from transformers import AutoTokenizer

        slow = AutoTokenizer.from_pretrained(str(source), local_files_only=True)
        return lambda ids: str(slow.decode(list(ids), skip_special_tokens=False))
    except Exception as error:  # boundary: tokenizers raises bare Exception, transformers any error of the file
        raise ModelError(f"{source}: no tokenizer could be read from it ({error})") from error


def _model_of(run_dir: Path) -> Path | str:
    path = run_dir / "config.resolved.yaml"
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
        return resolve_model(str(config["model"]["path"]))
    except (OSError, ValueError, RecursionError, yaml.YAMLError, KeyError, TypeError) as error:
        raise ModelError(f"{path}: has no model.path of the run ({error!r})") from error

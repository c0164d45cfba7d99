"""Trajectories as HTML: `libra inspect --html`, and the samples of a report."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from libra.errors import ConfigError, disk_refusal
from libra.observe.html import STYLE, content_policy, table, text
from libra.observe.token_text import Decode
from libra.observe.trajectory_view import segments
from libra.store.trajectories import TrajectoryStore
from libra.types import FailureClass, Trajectory
from libra.untrusted import shown_line


def write_page(path: Path, store: TrajectoryStore, rows: Sequence[int], decode: Decode | None, title: str) -> None:
    """Write the trajectories in these rows of the store to ``path``; ConfigError if that is impossible."""
    body = "".join(_trajectory(store.trajectory(row), row, decode) for row in rows)
    page = (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f'{content_policy(scripts=False)}<link rel="icon" href="data:,">'
        f"<title>{text(title)}</title><style>{STYLE}</style></head><body><main>"
        f'<h1>{text(title)}</h1><p class="soft">Prompts and tool returns are grey; the rest was generated.</p>'
        f"{body}</main></body></html>\n"
    )
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        unfinished.write_text(page, encoding="utf-8")
        unfinished.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)
        raise ConfigError(f"--html {path}: {disk_refusal(path, error)}; name another file") from error


def headline(trajectory: Trajectory) -> str:
    """One line about a trajectory: name, reward, how it ended, failure."""
    reward = "not graded" if trajectory.reward != trajectory.reward else f"reward {trajectory.reward:g}"
    ended = f"{trajectory.end_reason}, {len(trajectory.turns)} turns, {trajectory.num_action_tokens} generated tokens"
    failed = trajectory.failure is not FailureClass.NONE
    detail = f"; {trajectory.failure}: {shown_line(trajectory.failure_detail)}" if failed else ""
    return f"{trajectory.trajectory_id}, {reward}, {ended}{detail}"


def trajectory_text(trajectory: Trajectory, decode: Decode | None, max_chars: int | None = None) -> str:
    """Its text as HTML, cut to ``max_chars``; what the model did not generate is marked."""
    made: list[str] = []
    left = max_chars
    for origin, start, stop in segments(trajectory):
        ids = trajectory.token_ids[start:stop].tolist()
        words = decode(ids) if decode else " ".join(map(str, ids)) + "\n"
        if left is not None:
            words, left = (words, left - len(words)) if len(words) <= left else (f"{words[:left]} ... (cut here)", 0)
        made.append(text(words) if origin == "generated" else f"<i>{text(words)}</i>")
        if left == 0:
            break
    return "".join(made)


def _trajectory(trajectory: Trajectory, row: int, decode: Decode | None) -> str:
    prompt = f"{trajectory.prompt.prompt_id}  {dict(trajectory.prompt.facts)}"
    versions = f"weight versions {trajectory.oldest_version} to {trajectory.weight_version.max(initial=-1)}"
    facts = f"index {row}; advantage {trajectory.advantage:+.4f}; {versions}; epoch {trajectory.epoch}; prompt {prompt}"
    names = (
        "turn",
        "tool",
        "status",
        "num_calls",
        "prompt_tokens",
        "generated_tokens",
        "observation_tokens",
        "stop_reason",
    )
    lines = [
        [*(turn[name] for name in names), f"{turn['generate_s']:.3f}", f"{turn['tool_s']:.3f}", turn["worker"]]
        for turn in trajectory.turns
    ]
    head = (
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
    turns = table(head, lines, (0, 3, 4, 5, 6, 8, 9)).source if lines else ""
    return (
        f'<section><h2>{text(headline(trajectory))}</h2><p class="what">{text(facts)}</p>'
        f"<pre>{trajectory_text(trajectory, decode)}</pre>{turns}</section>"
    )

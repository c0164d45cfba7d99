"""Trajectories as HTML: `libra inspect --html`, and the samples of a report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from markupsafe import Markup

from libra.observe.html import piece, render, table
from libra.observe.output_file import written
from libra.observe.token_text import Decode
from libra.observe.trajectory_view import segments
from libra.store.trajectory_store import TrajectoryStore
from libra.types import FailureClass, Trajectory
from libra.untrusted import shown_line

_COLUMNS: Final = {
    "turn": "turn", "tool": "tool", "status": "status", "num_calls": "calls", "prompt_tokens": "context",
    "generated_tokens": "generated", "observation_tokens": "observed", "stop_reason": "stop", "generate_s": "generate s",
    "tool_s": "tool s", "worker": "worker",
}  # fmt: skip


def write_page(path: Path, store: TrajectoryStore, rows: Sequence[int], decode: Decode | None, title: str) -> None:
    """Write the trajectories in these rows of the store to ``path``; ConfigError if that is impossible."""
    head = [piece("soft", "Prompts and tool returns are grey; the rest was generated.")]
    head += [_trajectory(store.trajectory(row), row, decode) for row in rows]
    page = render("report.html", title=title, head=Markup().join(head), sections=(), scripts="")
    with written(path, "--html") as file:
        file.write_text(page, encoding="utf-8")


def headline(trajectory: Trajectory) -> str:
    """One line about a trajectory: name, reward, how it ended, failure."""
    reward = "not graded" if trajectory.reward != trajectory.reward else f"reward {trajectory.reward:g}"
    ended = f"{trajectory.end_reason}, {len(trajectory.turns)} turns, {trajectory.num_action_tokens} generated tokens"
    failed = trajectory.failure is not FailureClass.NONE
    detail = f"; {trajectory.failure}: {shown_line(trajectory.failure_detail)}" if failed else ""
    return f"{trajectory.trajectory_id}, {reward}, {ended}{detail}"


def trajectory_text(trajectory: Trajectory, decode: Decode | None, max_chars: int | None = None) -> Markup:
    """Its text as HTML, cut to ``max_chars``; what the model did not generate is marked."""
    made: list[Markup] = []
    left = max_chars
    for origin, start, stop in segments(trajectory):
        ids = trajectory.token_ids[start:stop].tolist()
        words = decode(ids) if decode else " ".join(map(str, ids)) + "\n"
        if left is not None:
            words, left = (words, left - len(words)) if len(words) <= left else (f"{words[:left]} ... (cut here)", 0)
        made.append(piece("part", origin == "generated", words))
        if left == 0:
            break
    return Markup().join(made)


def _trajectory(trajectory: Trajectory, row: int, decode: Decode | None) -> Markup:
    prompt = f"{trajectory.prompt.prompt_id}  {dict(trajectory.prompt.facts)}"
    versions = f"weight versions {trajectory.oldest_version} to {trajectory.weight_version.max(initial=-1)}"
    facts = f"index {row}; advantage {trajectory.advantage:+.4f}; {versions}; epoch {trajectory.epoch}; prompt {prompt}"
    turns = [
        [f"{turn[name]:.3f}" if name.endswith("_s") else turn[name] for name in _COLUMNS] for turn in trajectory.turns
    ]
    shown = table(tuple(_COLUMNS.values()), turns, (0, 3, 4, 5, 6, 8, 9)) if turns else ""
    return piece("trajectory", headline(trajectory), facts, trajectory_text(trajectory, decode), shown)

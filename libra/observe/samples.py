"""Texts of trajectories for trackers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from libra.observe.inspect_page import headline
from libra.observe.token_text import Decode
from libra.types import Trajectory
from libra.untrusted import shown

EVERY: Final = 10
"""Iterations from one sample to the next; the last one has a sample too."""
MAX_CHARS: Final = 6000


def sample_texts(trajectories: Sequence[Trajectory], decode: Decode) -> dict[str, str]:
    """The best and the worst of these, as ``samples/best`` and ``samples/worst``."""
    graded = sorted((each for each in trajectories if each.reward == each.reward), key=lambda each: each.reward)
    if not graded:
        return {}
    chosen = {"samples/best": graded[-1], "samples/worst": graded[0]}
    return {name: f"{shown(headline(each))}\n\n{_text(each, decode)}" for name, each in chosen.items()}


def _text(trajectory: Trajectory, decode: Decode) -> str:
    words = shown(decode(trajectory.token_ids.tolist()))
    return words if len(words) <= MAX_CHARS else f"{words[:MAX_CHARS]} ... (cut here)"

"""Training sequences of a conversation with branches: one for each leaf, every generated token trained once.

A turn is a prompt part (all messages of a request, or the tail after the turn that it continues) and what was generated after it. A
sequence is the path to a turn that no other continues. A turn that several paths have is trained in the first of them; in the
others it is context.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Step:
    """One turn of a path; ``trained``: its tokens are trained in this sequence."""

    turn: int
    trained: bool


def paths(parents: Sequence[int]) -> list[list[Step]]:
    """The sequences of turns whose parents are these (-1: a turn begins a conversation), in the order of their last turns.

    ``parents[turn]`` is below ``turn``. The union of all steps with ``trained`` has every turn once.
    """
    for turn, parent in enumerate(parents):
        assert -1 <= parent < turn, f"turn {turn} continues turn {parent}"
    inner = set(parents)
    seen: set[int] = set()
    found = []
    for leaf in range(len(parents)):
        if leaf in inner:
            continue
        path = path_to(leaf, parents)
        found.append([Step(turn, turn not in seen) for turn in path])
        seen.update(path)
    return found


def path_to(turn: int, parents: Sequence[int]) -> list[int]:
    """The turns from the beginning of a conversation to ``turn``, which is the last; none for -1."""
    path = []
    while turn >= 0:
        path.append(turn)
        turn = parents[turn]
    return path[::-1]

"""How many tokens to draft per step: what was fastest, by batch size, as measured. Pure: seconds arrive as numbers.

Invariants
----------
1. Lengths are 0 or one of `LENGTHS`, and 0 for batches of more than `MOST_ROWS`.
2. Every length is tried again, so that one that became better is found, but half as often after each time that it was not the
   best; all other steps use the best of those measured.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

LENGTHS = (0, 2, 4, 8)
MOST_ROWS = 8
"""Largest batch for which drafts are made: a step of many rows is bound by arithmetic, and drafts add to it."""
TRIED_AFTER, TRIED_AFTER_MOST = 16, 4096
"""Steps of a batch size until a length that was not the best is tried again: at first, and at most."""
FORGETTING = 0.1
"""Weight of the newest step in the means."""


class Drafted(NamedTuple):
    """Counters of one batch size: steps with drafts, tokens drafted, accepted, and generated in these steps."""

    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    generated: int = 0


@dataclass(slots=True)
class _Size:
    """One batch size, by length: mean tokens and seconds of a step, the step of the next try, and how long it waits for that."""

    tokens: dict[int, float] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)
    next_try: dict[int, int] = field(default_factory=dict)
    waits: dict[int, int] = field(default_factory=dict)
    steps: int = 0

    @property
    def best(self) -> int:
        """The length with most tokens per second; every length was tried."""
        return max(LENGTHS, key=lambda length: self.tokens[length] / self.seconds[length])


@dataclass(slots=True)
class DraftLength:
    """The choice of an engine. ``by_rows`` has its counters by batch size, a power of two."""

    by_rows: dict[int, Drafted] = field(default_factory=dict)
    _sizes: dict[int, _Size] = field(default_factory=dict)

    def choose(self, num_rows: int) -> int:
        """Tokens to draft for each of so many sequences."""
        if num_rows > MOST_ROWS:
            return 0
        size = self._sizes.setdefault(_size(num_rows), _Size())
        size.steps += 1
        untried = [length for length in LENGTHS if length not in size.seconds]
        if untried:
            return untried[0]
        best = size.best
        size.waits[best] = TRIED_AFTER
        due = [length for length in LENGTHS if length != best and size.next_try.get(length, 0) <= size.steps]
        if not due:
            return best
        size.waits[due[0]] = wait = min(2 * size.waits.get(due[0], TRIED_AFTER // 2), TRIED_AFTER_MOST)
        size.next_try[due[0]] = size.steps + wait
        return due[0]

    def measured(self, num_rows: int, length: int, drafted: int, generated: int, seconds: float) -> None:
        """A step of so many sequences, for which ``length`` was chosen and ``drafted`` tokens were found."""
        if num_rows > MOST_ROWS:
            return
        rows = _size(num_rows)
        size = self._sizes.setdefault(rows, _Size())
        for means, value in ((size.tokens, generated / num_rows), (size.seconds, max(seconds, 1e-9))):
            before = means.get(length, value)
            means[length] = before + FORGETTING * (value - before)
        if drafted:
            steps, all_drafted, accepted, all_generated = self.by_rows.get(rows, Drafted())
            self.by_rows[rows] = Drafted(
                steps + 1, all_drafted + drafted, accepted + generated - num_rows, all_generated + generated
            )


def _size(num_rows: int) -> int:
    return 1 << (num_rows - 1).bit_length()

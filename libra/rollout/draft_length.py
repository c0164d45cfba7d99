"""How many tokens to draft per step: what was fastest, by batch size, as measured. Pure: seconds arrive as numbers.

Invariants
----------
1. Lengths are 0 or one of `LENGTHS`, and 0 for batches of more than `MOST_ROWS`.
2. Every length is tried, first after `FIRST_TRIED_AFTER` steps each, and again, so that one that became better is found, but half
   as often after each time that it was not the best; all other steps use the best of those measured.
3. Drafts are the best only where they give `MARGIN` more tokens per second than steps without.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

LENGTHS = (0, 2, 4, 8)
MOST_ROWS = 8
"""Largest batch for which drafts are made: a step of many rows is bound by arithmetic, and drafts add to it."""
TRIED_AFTER, TRIED_AFTER_MOST = 16, 4096
"""Steps of a batch size until a length that was not the best is tried again: at first, and at most."""
FIRST_TRIED_AFTER = 8
"""Steps of a batch size before each first try of a length: sizes with few steps, as between prompts, try next to nothing."""
MARGIN = 1.05
"""How many times the tokens per second of steps without drafts a length must give."""
FORGETTING = 0.1
"""Weight of the newest step in the means."""


class Drafted(NamedTuple):
    """Counters of one batch size: steps with drafts, tokens drafted, accepted, and generated in these steps, and their seconds;
    tokens and seconds of steps without drafts."""

    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    generated: int = 0
    seconds: float = 0.0
    plain_generated: int = 0
    plain_s: float = 0.0

    @property
    def gain(self) -> float | None:
        """Tokens per second of steps with drafts over those of steps without; None before there are both."""
        if not (self.steps and self.plain_generated):
            return None
        return (self.generated / self.seconds) / (self.plain_generated / self.plain_s)


DraftedByRows = dict[int, Drafted]
"""Counters by batch size, a power of two."""


def count(by_rows: DraftedByRows, num_rows: int, drafted: int, generated: int, seconds: float) -> None:
    """Count a step of so many sequences, for which ``drafted`` tokens were drafted, in which every sequence decoded."""
    seconds = max(seconds, 1e-9)
    steps, all_drafted, accepted, all_generated, spent_s, plain, plain_s = by_rows.get(_size(num_rows), Drafted())
    if drafted:
        steps, all_drafted, accepted = steps + 1, all_drafted + drafted, accepted + generated - num_rows
        all_generated, spent_s = all_generated + generated, spent_s + seconds
    else:
        plain, plain_s = plain + generated, plain_s + seconds
    by_rows[_size(num_rows)] = Drafted(steps, all_drafted, accepted, all_generated, spent_s, plain, plain_s)


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
        """The length with most tokens per second of those that were tried, 0 among them."""
        rates = {
            length: self.tokens[length] / self.seconds[length] / (MARGIN if length else 1) for length in self.seconds
        }
        return max(sorted(rates), key=lambda length: rates[length])


@dataclass(slots=True)
class DraftLength:
    """The choice of an engine. ``by_rows`` has its counters by batch size, a power of two."""

    by_rows: DraftedByRows = field(default_factory=dict)
    _sizes: dict[int, _Size] = field(default_factory=dict)

    def choose(self, num_rows: int) -> int:
        """Tokens to draft for each of so many sequences."""
        if num_rows > MOST_ROWS:
            return 0
        size = self._sizes.setdefault(_size(num_rows), _Size())
        size.steps += 1
        if 0 not in size.seconds:
            return 0
        tried = len(size.seconds)
        if tried < len(LENGTHS) and size.steps > tried * FIRST_TRIED_AFTER:
            return next(length for length in LENGTHS if length not in size.seconds)
        best = size.best
        size.waits[best] = TRIED_AFTER
        due = [length for length in size.seconds if length != best and size.next_try.get(length, 0) <= size.steps]
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
        count(self.by_rows, num_rows, drafted, generated, seconds)


def _size(num_rows: int) -> int:
    return 1 << (num_rows - 1).bit_length()

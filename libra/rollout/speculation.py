"""Group speculation: drafts from the other samples of a group, and how many of them pay off.

Samples of one prompt repeat each other's phrases, and their own. Seer (arXiv:2511.14617 v3) drafts
from a tree of a group's suffixes; here it is a table of the tokens after each 2, 4 and 8 tokens.

Invariants
1. A draft never changes the tokens: the engine keeps a drafted token only if it samples the same.
2. Each token of each sequence is counted once, and a prompt that sequences share once for all.
3. Lengths are 0 or one of `LENGTHS`, and 0 for batches of more than `MOST_ROWS`.
4. Every length is tried, first after `FIRST_TRIED_AFTER` steps each, then half as often after each
   time that it was not the best; all other steps use the best one. Drafts are the best only if they
   give `MARGIN` times the tokens per second of steps without.

Shapes: T tokens, R slots.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from libra.rollout.attention import Chunk, SlotKV, Step
from libra.rollout.slot_table import Job, SlotTable

SUFFIXES = (8, 4, 2)
"""Lengths of the suffixes that are looked up, the longest first: counting a token takes as many entries of a table."""
LONGEST = SUFFIXES[0]
MAX_GROUPS = 256
"""Groups whose tokens are kept; the one that was used least recently goes first."""

Tokens = Sequence[int] | NDArray[np.int64]


class GroupDrafts:
    """The tokens after each suffix in a group's sequences; counted when a draft is requested, which is
    rare."""

    def __init__(self) -> None:
        self._next: dict[tuple[int, ...], dict[int, int]] = {}
        self._counted: dict[str, int] = {}
        self._latest: dict[str, Tokens] = {}
        self._first: tuple[int, ...] = ()  # the sequence that was counted first, with the prompt of all

    def extend(self, name: str, tokens: Tokens) -> None:
        """The tokens of a trajectory so far, prompt included."""
        self._latest[name] = tokens

    def propose(self, tail: Sequence[int], count: int) -> list[int]:
        """Up to ``count`` tokens that may follow ``tail``, each the most frequent after the longest known
        suffix.

        The smallest id wins a tie.
        """
        for name, tokens in self._latest.items():
            self._count(name, tokens)
        self._latest.clear()
        recent, found = tuple(tail[-LONGEST:]), list[int]()
        while len(found) < count:
            seen = self._after(recent)
            if seen is None:
                break
            found.append(min(seen, key=lambda token: (-seen[token], token)) if len(seen) > 1 else next(iter(seen)))
            recent = (*recent[-(LONGEST - 1) :], found[-1])
        return found

    def _count(self, name: str, tokens: Tokens) -> None:
        begin = self._counted.get(name)
        if begin is None:
            begin = self._num_shared(tokens)
        elif begin >= len(tokens):
            return
        self._counted[name] = len(tokens)
        first = max(0, begin - LONGEST)
        part = tokens[first:]
        new = tuple(part.tolist() if isinstance(part, np.ndarray) else part)
        known = self._next
        for end in range(begin - first, len(new)):
            token = new[end]
            for length in SUFFIXES:
                if length <= end:
                    suffix = new[end - length : end]
                    seen = known.get(suffix)
                    if seen is None:
                        known[suffix] = {token: 1}
                    else:
                        seen[token] = seen.get(token, 0) + 1

    def _num_shared(self, tokens: Tokens) -> int:
        """Number of first tokens that a new sequence shares with the group's first one."""
        if not self._counted:
            self._first = tuple(tokens.tolist() if isinstance(tokens, np.ndarray) else tokens)
            return 0
        shared = 0
        for one, other in zip(self._first, tokens.tolist() if isinstance(tokens, np.ndarray) else tokens, strict=False):
            if one != other:
                break
            shared += 1
        return shared

    def _after(self, recent: tuple[int, ...]) -> dict[int, int] | None:
        for length in SUFFIXES:
            if length <= len(recent):
                seen = self._next.get(recent[-length:])
                if seen is not None:
                    return seen
        return None


class Drafts:
    """The drafts of an engine, group by group; requests without a group have none."""

    def __init__(self) -> None:
        self._groups: OrderedDict[str, GroupDrafts] = OrderedDict()

    def of(self, group: str) -> GroupDrafts:
        found = self._groups.setdefault(group, GroupDrafts())
        self._groups.move_to_end(group)
        if len(self._groups) > MAX_GROUPS:
            self._groups.popitem(last=False)
        return found


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
    """Counters of one batch size; ``drafted`` to ``seconds`` are of steps with drafts, ``plain`` without."""

    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    generated: int = 0
    seconds: float = 0.0
    plain_generated: int = 0
    plain_s: float = 0.0

    @property
    def gain(self) -> float | None:
        """Tokens per second of steps with drafts over those without; None before both exist."""
        if not (self.steps and self.plain_generated):
            return None
        return (self.generated / self.seconds) / (self.plain_generated / self.plain_s)


DraftedByRows = dict[int, Drafted]
"""Counters by batch size, a power of two."""


def count(by_rows: DraftedByRows, num_rows: int, drafted: int, generated: int, seconds: float) -> None:
    """Count a decoding step of so many sequences."""
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
    """One batch size, by length: mean tokens and seconds of a step, its next try, and the wait for that."""

    tokens: dict[int, float] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)
    next_try: dict[int, int] = field(default_factory=dict)
    waits: dict[int, int] = field(default_factory=dict)
    steps: int = 0

    @property
    def best(self) -> int:
        """The tried length with most tokens per second, possibly 0."""
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


class DraftedStep:
    """The slots of a step, ascending, and the drafts of each.

    ``drafts`` has the drafted tokens of each slot, ``length`` the number requested, ``rows`` and
    ``begins`` (R,) the tokens fed to each slot and the place of the first, and ``offsets`` (T,) each
    token's place in its slot.
    """

    def __init__(self, slots: NDArray[np.int64], drafts: list[list[int]], length: int) -> None:
        self.slots, self.drafts, self.length = slots, drafts, length
        self.rows = np.array([len(tokens) + 1 for tokens in drafts])
        self.begins = np.cumsum(self.rows) - self.rows
        self.offsets = np.arange(int(self.rows.sum())) - np.repeat(self.begins, self.rows)

    @property
    def longest(self) -> int:
        """Tokens of the longest draft."""
        return int(self.rows.max()) - 1

    def step(self, kv: SlotKV, tokens: NDArray[np.int64], cached: NDArray[np.int64]) -> tuple[NDArray[np.int64], Step]:
        """The tokens to feed (T,) and their places; ``tokens`` and ``cached`` are columns of the slot table."""
        starts = cached[self.slots]
        position_T = np.repeat(starts, self.rows) + self.offsets
        ids_T = np.empty(len(position_T), np.int64)
        ids_T[self.begins] = tokens[self.slots, starts]
        chunks = []
        for slot, start, begin, draft in zip(self.slots, starts, self.begins, self.drafts, strict=True):
            end = int(begin) + len(draft) + 1
            ids_T[begin + 1 : end] = draft
            chunks.append(Chunk(int(begin), end, int(slot), int(start), int(start) + len(draft) + 1))
        slot_T = np.repeat(self.slots, self.rows)
        return ids_T, Step(kv, torch.from_numpy(slot_T), torch.from_numpy(position_T), 0, chunks)


class GroupSpeculation:
    """The drafts of one engine, and their length."""

    def __init__(self) -> None:
        self.drafts, self.length = Drafts(), DraftLength()

    def draft(self, table: SlotTable) -> tuple[int, DraftedStep | None]:
        """The number of tokens to draft, and drafts if all running slots decode and drafts pay off."""
        running = table.running
        if (table.known[running] - table.cached[running] > 1).any():
            return 0, None
        length = self.length.choose(len(running))
        if not length:
            return 0, None
        found: list[list[int]] = []
        for slot in running:
            job, known = table.running_job(slot), int(table.known[slot])
            room = min(length, int(table.sampling.limit[slot] - table.generated[slot]) - 1)
            if not job.request.group or room < 1:
                found.append([])
                continue
            drafts = self.drafts.of(job.request.group)
            drafts.extend(job.name, table.tokens[slot, :known])
            found.append(drafts.propose(table.tokens[slot, max(0, known - LONGEST) : known].tolist(), room))
        return length, DraftedStep(running, found, length) if any(found) else None

    def finished(self, job: Job, table: SlotTable) -> None:
        """Let the group of an ended request use its tokens."""
        if job.request.group:
            tokens = table.tokens[job.slot, : table.known[job.slot]]
            self.drafts.of(job.request.group).extend(job.name, tokens.copy())


def accepted(draft: Sequence[int], sampled: Sequence[int], stops: Collection[int]) -> int:
    """Number of sampled tokens that count: up to the first that differs from its draft, or stops the turn."""
    for place, token in enumerate(draft):
        if sampled[place] != token or sampled[place] in stops:
            return place + 1
    return len(draft) + 1

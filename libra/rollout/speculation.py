"""Group speculation: drafts from the other samples of a group, and how many of them pay off.

Samples of one prompt repeat each other's phrases, and their own. Seer (arXiv:2511.14617 v3) drafts
from a tree of a group's suffixes; here it is a table of the tokens after each 2, 4 and 8 tokens.

1. A draft never changes the tokens: the engine keeps a drafted token only if it samples the same.
2. Each token of each sequence is counted once, and a prompt that sequences share once for all.
3. Lengths are 0 or one of `LENGTHS`, and 0 for batches of more than `MOST_ROWS`.
4. Every length is tried, first after `FIRST_TRIED_AFTER` steps each, then half as often after each
   time that it was not the best. All other steps use the best length; drafts count as best only
   with `MARGIN` times the tokens per second of steps without drafts.

Shapes: T tokens, R slots.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from operator import eq

import numpy as np
import torch
from numpy.typing import NDArray

from libra.rollout.attention import Chunk, SlotKV, Step
from libra.rollout.slot_table import Job, SlotTable

SUFFIXES = (8, 4, 2)
"""Lengths of the suffixes that are looked up, the longest first."""
LONGEST = SUFFIXES[0]
MAX_GROUPS = 256
"""Groups whose tokens are kept; the least recently used group is dropped first."""
LENGTHS = (0, 2, 4, 8)
MOST_ROWS = 8
"""Largest batch with drafts: large batches are bound by arithmetic, and drafts add to it."""
TRIED_AFTER, TRIED_AFTER_MOST = 16, 4096
"""Steps until a length that was not the best is tried again: at first, and at most."""
FIRST_TRIED_AFTER = 8
"""Steps of a batch size before each first try of a length, so that rare sizes try little."""
MARGIN = 1.05
FORGETTING = 0.1
"""Weight of the newest step in the means."""

Tokens = Sequence[int] | NDArray[np.int64]


def _listed(tokens: Tokens) -> Sequence[int]:
    return tokens.tolist() if isinstance(tokens, np.ndarray) else tokens


class GroupDrafts:
    """The tokens after each suffix in a group's sequences, counted when a draft is requested."""

    def __init__(self) -> None:
        self._next: dict[tuple[int, ...], dict[int, int]] = {}
        self._counted: dict[str, int] = {}
        self._latest: dict[str, Tokens] = {}
        self._first: Sequence[int] = ()  # the sequence counted first; its prompt is the prompt of all

    def extend(self, name: str, tokens: Tokens) -> None:
        """Note the tokens of a trajectory so far, prompt included."""
        self._latest[name] = tokens

    def propose(self, tail: Sequence[int], count: int) -> list[int]:
        """Up to ``count`` tokens after ``tail``, each most frequent after the longest suffix."""
        for name, tokens in self._latest.items():
            self._count(name, tokens)
        self._latest.clear()
        recent, found = tuple(tail[-LONGEST:]), list[int]()
        while len(found) < count:
            suffixes = (recent[-length:] for length in SUFFIXES if length <= len(recent))
            seen = next((self._next[suffix] for suffix in suffixes if suffix in self._next), None)
            if seen is None:
                break
            found.append(min(seen, key=lambda token: (-seen[token], token)) if len(seen) > 1 else next(iter(seen)))
            recent = (*recent[-(LONGEST - 1) :], found[-1])
        return found

    def _count(self, name: str, tokens: Tokens) -> None:
        begin = self._counted.get(name)
        if begin is None:
            if self._counted:
                begin = sum(1 for _ in takewhile(bool, map(eq, self._first, _listed(tokens))))
            else:
                begin, self._first = 0, _listed(tokens)
        self._counted[name] = len(tokens)
        first = max(0, begin - LONGEST)
        new = tuple(_listed(tokens[first:]))
        for end in range(begin - first, len(new)):
            token = new[end]
            for length in SUFFIXES:
                if length <= end:
                    seen = self._next.setdefault(new[end - length : end], {})
                    seen[token] = seen.get(token, 0) + 1


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


@dataclass(slots=True)
class Drafted:
    """Counters of one batch size; names in ``plain`` are of steps without drafts."""

    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    generated: int = 0
    seconds: float = 0.0
    plain_generated: int = 0
    plain_s: float = 0.0

    @property
    def gain(self) -> float | None:
        """Tokens per second with drafts over tokens per second without; None before both exist."""
        if not (self.steps and self.plain_generated):
            return None
        return (self.generated / self.seconds) / (self.plain_generated / self.plain_s)


DraftedByRows = dict[int, Drafted]
"""Counters by batch size, a power of two."""


@dataclass(slots=True)
class _Size:
    tokens: dict[int, float] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)
    next_try: dict[int, int] = field(default_factory=dict)
    waits: dict[int, int] = field(default_factory=dict)
    steps: int = 0

    def rate(self, length: int) -> float:
        return self.tokens[length] / self.seconds[length] / (MARGIN if length else 1)


@dataclass(slots=True)
class DraftLength:
    """The choice of the draft length of an engine."""

    by_rows: DraftedByRows = field(default_factory=dict)
    _sizes: dict[int, _Size] = field(default_factory=dict)

    def choose(self, num_rows: int) -> int:
        """Tokens to draft for each of ``num_rows`` sequences."""
        if num_rows > MOST_ROWS:
            return 0
        size = self._sizes.setdefault(_power(num_rows), _Size())
        size.steps += 1
        if 0 not in size.seconds:
            return 0
        tried = len(size.seconds)
        if tried < len(LENGTHS) and size.steps > tried * FIRST_TRIED_AFTER:
            return next(length for length in LENGTHS if length not in size.seconds)
        best = max(sorted(size.seconds), key=size.rate)
        size.waits[best] = TRIED_AFTER
        due = [length for length in size.seconds if length != best and size.next_try.get(length, 0) <= size.steps]
        if not due:
            return best
        size.waits[due[0]] = wait = min(2 * size.waits.get(due[0], TRIED_AFTER // 2), TRIED_AFTER_MOST)
        size.next_try[due[0]] = size.steps + wait
        return due[0]

    def measured(self, num_rows: int, length: int, drafted: int, generated: int, seconds: float) -> None:
        """Count a step for which ``length`` was chosen and ``drafted`` tokens were found."""
        if num_rows > MOST_ROWS:
            return
        rows, seconds = _power(num_rows), max(seconds, 1e-9)
        size, counters = self._sizes.setdefault(rows, _Size()), self.by_rows.setdefault(rows, Drafted())
        for means, value in ((size.tokens, generated / num_rows), (size.seconds, seconds)):
            before = means.get(length, value)
            means[length] = before + FORGETTING * (value - before)
        if drafted:
            counters.steps += 1
            counters.drafted += drafted
            counters.accepted += generated - num_rows
            counters.generated += generated
            counters.seconds += seconds
        else:
            counters.plain_generated += generated
            counters.plain_s += seconds


def _power(num_rows: int) -> int:
    return 1 << (num_rows - 1).bit_length()


class DraftedStep:
    """The slots of a step, ascending, and the drafts of each. ``length`` is the number of tokens
    requested, ``rows`` and ``begins`` (R,) the tokens fed to each slot and the place of the first,
    and ``offsets`` (T,) each token's place in its slot."""

    def __init__(self, slots: NDArray[np.int64], drafts: list[list[int]], length: int) -> None:
        self.slots, self.drafts, self.length = slots, drafts, length
        self.rows = np.array([len(tokens) + 1 for tokens in drafts])
        self.begins = np.cumsum(self.rows) - self.rows
        self.offsets = np.arange(int(self.rows.sum())) - np.repeat(self.begins, self.rows)
        self.longest = int(self.rows.max()) - 1

    def step(self, kv: SlotKV, tokens: NDArray[np.int64], cached: NDArray[np.int64]) -> tuple[NDArray[np.int64], Step]:
        """The tokens to feed (T,) and their places; ``tokens`` and ``cached`` are slot columns."""
        starts = cached[self.slots]
        position_T = np.repeat(starts, self.rows) + self.offsets
        ids_T = np.empty(len(position_T), np.int64)
        ids_T[self.begins] = tokens[self.slots, starts]
        chunks = []
        for slot, start, begin, draft in zip(self.slots, starts, self.begins, self.drafts, strict=True):
            end = int(begin) + len(draft) + 1
            ids_T[begin + 1 : end] = draft
            chunks.append(Chunk(int(begin), end, int(slot), int(start), int(start) + len(draft) + 1))
        slot_T = torch.from_numpy(np.repeat(self.slots, self.rows))
        return ids_T, Step(kv, slot_T, torch.from_numpy(position_T), 0, chunks)


class GroupSpeculation:
    """The drafts of one engine, and their length."""

    def __init__(self) -> None:
        self.drafts, self.length = Drafts(), DraftLength()

    def draft(self, table: SlotTable) -> tuple[int, DraftedStep | None]:
        """Tokens to draft, and drafts if all running slots decode and drafts pay off."""
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
        """Add the tokens of an ended request to its group."""
        if job.request.group:
            tokens = table.tokens[job.slot, : table.known[job.slot]]
            self.drafts.of(job.request.group).extend(job.name, tokens.copy())


def accepted(draft: Sequence[int], sampled: Sequence[int], stops: Collection[int]) -> int:
    """Number of sampled tokens kept: up to the first that is a stop or differs from its draft."""
    kept = takewhile(lambda place: sampled[place] == draft[place] not in stops, range(len(draft)))
    return sum(1 for _ in kept) + 1

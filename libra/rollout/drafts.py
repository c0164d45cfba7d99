"""Drafts of the next tokens from what other samples of the same group generated. Pure: tokens in, tokens out.

Samples of one prompt repeat each other's phrases, and their own (Seer, arXiv:2511.14617 v3, drafts from a tree of a group's
suffixes). Here that tree is a table of the 2, 4 and 8 tokens before each token: what came next the last times?

Invariants
----------
1. A draft never changes what is generated: the engine keeps a drafted token only where it equals the one that it samples itself.
2. Each token of each sequence is counted once, and what a sequence begins with as the first one does, the prompt, once for both.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

SUFFIXES = (8, 4, 2)
"""Lengths of the suffixes that are looked up, the longest first: counting a token takes as many entries of a table."""
LONGEST = SUFFIXES[0]
MAX_GROUPS = 256
"""Groups whose tokens are kept; the one that was used least recently goes first."""

Tokens = Sequence[int] | NDArray[np.int64]


class GroupDrafts:
    """What followed each suffix in the sequences of one group; counted when a draft is asked for, which most groups never are."""

    def __init__(self) -> None:
        self._next: dict[tuple[int, ...], dict[int, int]] = {}
        self._counted: dict[str, int] = {}
        self._latest: dict[str, Tokens] = {}
        self._first: tuple[int, ...] = ()  # the sequence that was counted first, with the prompt of all

    def extend(self, name: str, tokens: Tokens) -> None:
        """The tokens of a trajectory so far, all of it, prompt included; those that were counted are not counted again."""
        self._latest[name] = tokens

    def propose(self, tail: Sequence[int], count: int) -> list[int]:
        """Up to ``count`` tokens that may follow ``tail``, each the most frequent one after the longest known suffix; among equally
        frequent ones the smallest id."""
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
        """How many of the first tokens of a new sequence are those of the group's first one, and so were counted."""
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
        """The drafts of a group."""
        found = self._groups.setdefault(group, GroupDrafts())
        self._groups.move_to_end(group)
        if len(self._groups) > MAX_GROUPS:
            self._groups.popitem(last=False)
        return found

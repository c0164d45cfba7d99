"""Drafts of the next tokens from what other samples of the same group generated. Pure: tokens in, tokens out.

Samples of one prompt repeat each other's phrases, and their own (Seer, arXiv:2511.14617 v3, drafts from a tree of a group's
suffixes). Here that tree is a table of up to `LONGEST` tokens before each token: what came next the last times?

Invariants
----------
1. A draft never changes what is generated: the engine keeps a drafted token only where it equals the one that it samples itself.
2. Each token of each sequence is counted once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

LONGEST, SHORTEST = 8, 2
"""Tokens of the suffix that is looked up: the longest that is known, at least two."""
MAX_GROUPS = 256
"""Groups whose tokens are kept; the one that was used least recently goes first."""


class GroupDrafts:
    """What followed each suffix in the sequences of one group; counted when a draft is asked for, which most groups never are."""

    def __init__(self) -> None:
        self._next: dict[tuple[int, ...], dict[int, int]] = {}
        self._counted: dict[str, int] = {}
        self._latest: dict[str, Sequence[int]] = {}

    def extend(self, name: str, tokens: Sequence[int]) -> None:
        """The tokens of a trajectory so far, all of it, prompt included; those that were counted are not counted again."""
        self._latest[name] = tokens

    def propose(self, tail: Sequence[int], count: int) -> list[int]:
        """Up to ``count`` tokens that may follow ``tail``, each the most frequent one after the longest known suffix; among equally
        frequent ones the smallest id."""
        for name, tokens in self._latest.items():
            self._count(name, tokens)
        self._latest.clear()
        recent, found = list(tail[-LONGEST:]), list[int]()
        while len(found) < count:
            seen = self._after(recent)
            if seen is None:
                break
            found.append(min(seen, key=lambda token: (-seen[token], token)))
            recent = [*recent[-(LONGEST - 1) :], found[-1]]
        return found

    def _count(self, name: str, tokens: Sequence[int]) -> None:
        known, begin = self._next, self._counted.get(name, 1)
        self._counted[name] = max(begin, len(tokens))
        for end in range(begin, len(tokens)):
            token = tokens[end]
            for length in range(SHORTEST, min(LONGEST, end) + 1):
                suffix = tuple(tokens[end - length : end])
                seen = known.get(suffix)
                if seen is None:
                    known[suffix] = {token: 1}
                else:
                    seen[token] = seen.get(token, 0) + 1

    def _after(self, recent: list[int]) -> dict[int, int] | None:
        for length in range(min(LONGEST, len(recent)), SHORTEST - 1, -1):
            seen = self._next.get(tuple(recent[-length:]))
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

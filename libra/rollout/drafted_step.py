"""A step in which slots are fed drafted tokens after their last one.

Shapes: T tokens, R slots.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from libra.rollout.kv_slots import Chunk, SlotKV, Step


class DraftedStep:
    """The slots of a step, ascending, and the drafts of each.

    Attributes
    ----------
    slots : int64 array (R,)
    drafts : list of lists of int
        Drafted tokens of each slot; empty: none.
    length : int
        How many were asked for.
    rows, begins : int64 array (R,)
        Tokens that each slot is fed, one more than its drafts; and the place of the first one.
    offsets : int64 array (T,)
        Place of each token among those of its slot.
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
        """The tokens to feed (T,), and where they go; ``tokens`` and ``cached`` are the columns of the slot table."""
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


def accepted(draft: Sequence[int], sampled: Sequence[int], stops: Collection[int]) -> int:
    """How many of the sampled tokens count: up to the first one that differs from its draft, or stops the turn; at least one."""
    for place, token in enumerate(draft):
        if sampled[place] != token or sampled[place] in stops:
            return place + 1
    return len(draft) + 1

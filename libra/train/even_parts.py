"""Parts of even loads by local search: items are moved, and exchanged, while that lowers the cost and no part becomes too large.

What is made small is the sum over parts of their tokens and of the tokens through the busiest expert of a layer (mean over layers,
times experts over experts per token: as many as the part has, if the load is even). A prompt counts once for all its samples in a
part, so that its samples are parted where the loads gain more tokens than the repeated prompt has.

Invariants
----------
1. Every item is in exactly one part; no part is empty.
2. The cost never rises. No part has more tokens than ``capacity``, or is refused by ``fits``, if none of the given ones has or is.
3. Deterministic: the same items in the same order give the same parts.

Shape legend: S items, G prompts, D loads of an item (one per layer and expert), M parts, L layers, E experts, C candidates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MAX_SWEEPS = 8
"""Passes over all items that try to move or exchange one."""
MAX_LOADS = 400_000_000
"""Loads looked at, a few seconds; a search ends there, or where its share of them does."""
LOADS_AT_ONCE = 400_000
"""Loads of the candidates for one item; of more, some are left out, evenly."""
NUM_TRIED = 4
"""Best candidates whose rows are tried."""


@dataclass(frozen=True, slots=True, eq=False)
class Items:
    """What is put into parts: samples, or several of one prompt. What they have in common is the prompt's, counted once in a part.

    Attributes
    ----------
    loads_SD, sizes_S
        Without the prompt.
    prompt_S
        Index of each item's prompt.
    prompt_loads_GD, prompt_sizes_G
        0 where items share nothing.
    layers : int
    top_k : int
        Experts per token.
    """

    loads_SD: NDArray[np.float64]
    sizes_S: NDArray[np.int64]
    prompt_S: NDArray[np.int64]
    prompt_loads_GD: NDArray[np.float64]
    prompt_sizes_G: NDArray[np.int64]
    layers: int
    top_k: int

    def cost(self, loads_CD: NDArray[np.float64], sizes_C: NDArray[np.int64]) -> NDArray[np.float64]:
        """Tokens of each part plus those through its busiest expert, as the module says (C,)."""
        loads_CLE = loads_CD.reshape(len(loads_CD), self.layers, loads_CD.shape[1] // self.layers)
        busiest_C: NDArray[np.float64] = loads_CLE.max(-1).mean(-1) * (loads_CLE.shape[-1] / self.top_k)
        return busiest_C + sizes_C


def even_parts(
    items: Items,
    given: Sequence[Sequence[int]],
    capacity: int,
    fits: Callable[[list[int]], bool],
    most_loads: int = MAX_LOADS,
) -> tuple[list[list[int]], float]:
    """The ``given`` parts after moves of an item, and exchanges of two, each of which lowers the cost; and their cost.

    ``fits`` says whether the indices of a part fit into its rows. After ``most_loads`` loads looked at, the search ends.
    """
    parts = _Parts(items, given, capacity, fits)
    order = sorted(range(len(items.sizes_S)), key=lambda index: (-int(items.sizes_S[index]), index))
    for sweep in range(MAX_SWEEPS):
        if not sum([parts.improved(index, sweep) for index in order if parts.looked_at < most_loads]):
            break
    return [members for part in range(len(given)) if (members := parts.members(part))], float(parts.cost_M.sum())


class _Parts:
    """Parts in the midst of a search."""

    def __init__(
        self, items: Items, given: Sequence[Sequence[int]], capacity: int, fits: Callable[[list[int]], bool]
    ) -> None:
        self.items, self.capacity, self.fits = items, capacity, fits
        self.looked_at = 0
        self.part_S = np.zeros(len(items.sizes_S), np.int64)
        for part, members in enumerate(given):
            self.part_S[list(members)] = part
        self.count_MG = np.zeros((len(given), len(items.prompt_sizes_G)), np.int64)
        np.add.at(self.count_MG, (self.part_S, items.prompt_S), 1)
        present_MG = self.count_MG > 0
        self.loads_MD = present_MG @ items.prompt_loads_GD
        np.add.at(self.loads_MD, self.part_S, items.loads_SD)
        self.sizes_M = present_MG @ items.prompt_sizes_G
        np.add.at(self.sizes_M, self.part_S, items.sizes_S)
        self.cost_M = items.cost(self.loads_MD, self.sizes_M)

    def members(self, part: int) -> list[int]:
        return [int(index) for index in np.flatnonzero(self.part_S == part)]

    def improved(self, index: int, sweep: int) -> bool:
        """Move an item, or exchange it with one of another part, where that lowers the cost most; whether it did."""
        home = int(self.part_S[index])
        parts_C = np.delete(np.arange(len(self.sizes_M)), home)
        others_C = np.flatnonzero(self.part_S != home)
        changes = [self._moves(index, home, parts_C, sweep), self._exchanges(index, home, others_C, sweep)]
        at = np.concatenate([at_C for at_C, _ in changes])
        change = np.concatenate([change_C for _, change_C in changes])
        num_moves = len(changes[0][0])
        for best in np.argsort(change, kind="stable")[:NUM_TRIED]:
            if change[best] > -1e-6:
                return False
            partner = int(at[best]) if best >= num_moves else None
            target = int(at[best]) if partner is None else int(self.part_S[partner])
            if self._tried(index, home, target, partner):
                return True
        return False

    def _moves(
        self, index: int, home: int, parts_C: NDArray[np.int64], sweep: int
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Parts that have room for an item, and what the cost changes by if it moves there."""
        items, prompt = self.items, int(self.items.prompt_S[index])
        new_C = self.count_MG[parts_C, prompt] == 0
        sizes_C = self.sizes_M[parts_C] + items.sizes_S[index] + items.prompt_sizes_G[prompt] * new_C
        some = self._some(np.flatnonzero(sizes_C <= self.capacity), index + sweep)
        parts_C, new_C, sizes_C = parts_C[some], new_C[some], sizes_C[some]
        last = self.count_MG[home, prompt] == 1
        left_D = self.loads_MD[home] - items.loads_SD[index] - items.prompt_loads_GD[prompt] * last
        left = self.sizes_M[home] - items.sizes_S[index] - items.prompt_sizes_G[prompt] * last
        loads_CD = self.loads_MD[parts_C] + items.loads_SD[index] + items.prompt_loads_GD[prompt] * new_C[:, None]
        after = items.cost(left_D[None], np.array([left]))[0] + items.cost(loads_CD, sizes_C)
        return parts_C, after - self.cost_M[home] - self.cost_M[parts_C]

    def _exchanges(
        self, index: int, home: int, others_C: NDArray[np.int64], sweep: int
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Items of other parts that an item fits in the place of, and what the cost changes by if the two are exchanged."""
        items, prompt = self.items, int(self.items.prompt_S[index])
        theirs_C, there_C = items.prompt_S[others_C], self.part_S[others_C]
        differ_C = theirs_C != prompt  # of one prompt: it stays in both parts
        last_C = (self.count_MG[there_C, theirs_C] == 1) & differ_C  # it leaves theirs
        new_C = (self.count_MG[home, theirs_C] == 0) & differ_C  # it comes here
        leaves_C = (self.count_MG[home, prompt] == 1) & differ_C
        comes_C = (self.count_MG[there_C, prompt] == 0) & differ_C
        sizes, shared = items.sizes_S, items.prompt_sizes_G
        given_C = sizes[index] - sizes[others_C]
        here_C = self.sizes_M[home] - given_C - shared[prompt] * leaves_C + shared[theirs_C] * new_C
        other_C = self.sizes_M[there_C] + given_C + shared[prompt] * comes_C - shared[theirs_C] * last_C
        some = self._some(np.flatnonzero((here_C <= self.capacity) & (other_C <= self.capacity)), index + sweep)
        others_C, there_C = others_C[some], there_C[some]
        given_CD = items.loads_SD[index] - items.loads_SD[others_C]
        own_D, their_CD = items.prompt_loads_GD[prompt], items.prompt_loads_GD[theirs_C[some]]
        here_CD = self.loads_MD[home] - given_CD - own_D * leaves_C[some, None] + their_CD * new_C[some, None]
        other_CD = self.loads_MD[there_C] + given_CD + own_D * comes_C[some, None] - their_CD * last_C[some, None]
        after_C = items.cost(here_CD, here_C[some]) + items.cost(other_CD, other_C[some])
        return others_C, after_C - self.cost_M[home] - self.cost_M[there_C]

    def _some(self, candidates: NDArray[np.int64], offset: int) -> NDArray[np.int64]:
        """At most `LOADS_AT_ONCE` loads of the candidates, evenly, others in each sweep."""
        loads = self.loads_MD.shape[1]
        step = -(-len(candidates) * loads // LOADS_AT_ONCE) or 1
        some = candidates[offset % step :: step]
        self.looked_at += len(some) * loads
        return some

    def _tried(self, index: int, home: int, target: int, partner: int | None) -> bool:
        """Move, or exchange; back again if one of the two parts does not fit."""
        self.part_S[index] = target
        if partner is not None:
            self.part_S[partner] = home
        if all(not (members := self.members(part)) or self.fits(members) for part in (home, target)):
            for item, source, to in [(index, home, target), *([] if partner is None else [(partner, target, home)])]:
                self.count_MG[source, self.items.prompt_S[item]] -= 1
                self.count_MG[to, self.items.prompt_S[item]] += 1
            for part in (home, target):
                present_G = self.count_MG[part] > 0
                members = self.members(part)
                self.loads_MD[part] = present_G @ self.items.prompt_loads_GD + self.items.loads_SD[members].sum(0)
                self.sizes_M[part] = present_G @ self.items.prompt_sizes_G + self.items.sizes_S[members].sum()
            both = [home, target]
            self.cost_M[both] = self.items.cost(self.loads_MD[both], self.sizes_M[both])
            return True
        self.part_S[index] = home
        if partner is not None:
            self.part_S[partner] = target
        return False

"""Samples as rows and micro-batches of even loads of the experts, with prompts shared or not (`libra.train.expert_balance`).

With shared prompts a row may hold samples of several: ``prompt a, rests of a's samples, prompt b, rests of b's samples, ...``. So
rows of different prompts are filled like any others, and a micro-batch has samples of as many prompts as make its loads even. The
samples of a prompt are tried whole, in two, in four and one by one; what costs least is taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from libra.train.even_parts import MAX_LOADS, Items, even_parts
from libra.train.expert_balance import balanced_parts, loads_of
from libra.train.row_packing import FillRows
from libra.train.samples import Sample

Row = list[Sample]
PIECES = (1, 2, 4, 1 << 30)
"""In how many the samples of a prompt in one row are tried."""
NUM_STARTS = 2
"""Searches of each, at most: `_Layout.starts`."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Tokens of a row and of a micro-batch, and how rows are filled."""

    row_tokens: int
    micro_batch_tokens: int
    fill: FillRows


def even_micro_batches(
    samples: Sequence[Sample], *, share: bool, limits: Limits, num_experts: int, most: int
) -> list[list[Row]] | None:
    """Micro-batches of rows, in which samples of one prompt are side by side; None if routes are missing, or no search finds
    ``most`` of them or fewer.

    ``share``: samples with equal prompts share it.
    """
    if not samples or any(sample.routes is None for sample in samples):
        return None
    groups: dict[bytes, list[int]] = {}
    for index, sample in enumerate(samples):
        prompt = sample.token_ids[: sample.num_prompt_tokens].tobytes() if share else index.to_bytes(8, "big")
        groups.setdefault(prompt, []).append(index)
    found: tuple[float, list[list[Row]]] | None = None
    tried = PIECES if share else PIECES[:1]
    most_loads = MAX_LOADS // (NUM_STARTS * len(tried))  # so that one packing takes as long as one search may
    for pieces in tried:
        layout = _Layout(samples, list(groups.values()), share, limits, num_experts, pieces)
        for start in layout.starts(most):
            parts, cost = even_parts(layout.items, start, limits.micro_batch_tokens, layout.fits, most_loads)
            if found is None or cost < found[0]:
                found = cost, [layout.rows(part) for part in parts]
    return None if found is None else found[1]


class _Layout:
    """Items (of one prompt each) and the rows that they fill."""

    def __init__(
        self,
        samples: Sequence[Sample],
        groups: Sequence[Sequence[int]],
        share: bool,
        limits: Limits,
        num_experts: int,
        pieces: int,
    ) -> None:
        self.samples, self.limits = samples, limits
        shared = [samples[group[0]].num_prompt_tokens if share else 0 for group in groups]
        self.parts_of: list[list[int]] = []  # samples of each item
        prompt_of: list[int] = []
        for number, group in enumerate(groups):
            room = max(limits.row_tokens - shared[number], 1)
            for row in limits.fill([max(samples[i].num_tokens - shared[number], 1) for i in group], room):
                members = sorted(group[at] for at in row)
                for piece in np.array_split(members, min(pieces, len(members))):
                    self.parts_of.append([int(index) for index in piece])
                    prompt_of.append(number)
        routes = [
            _routes(samples, members, shared[number]) for members, number in zip(self.parts_of, prompt_of, strict=True)
        ]
        prompts = [_routes(samples, group[:1], 0)[:tokens] for group, tokens in zip(groups, shared, strict=True)]
        self.items = Items(
            loads_SD=loads_of(routes, num_experts),
            sizes_S=np.array([len(each) for each in routes]),
            prompt_S=np.array(prompt_of),
            prompt_loads_GD=loads_of(prompts, num_experts),
            prompt_sizes_G=np.array(shared),
            layers=routes[0].shape[1],
            top_k=routes[0].shape[2],
        )

    def starts(self, most: int) -> Iterator[list[list[int]]]:
        """At most ``most`` parts that fit, to begin a search with: by length alone, and by loads, where there are such."""
        parts: list[list[int]] = []
        width = num_rows = 0
        for length, row in self._fill(range(len(self.parts_of))):
            if not parts or width * (num_rows + 1) > self.limits.micro_batch_tokens:
                parts.append([])
                width, num_rows = length, 0
            parts[-1] += row
            num_rows += 1
        if len(parts) <= most:
            yield parts
        items = self.items
        loads_SD = items.loads_SD + items.prompt_loads_GD[items.prompt_S]
        sizes = (items.sizes_S + items.prompt_sizes_G[items.prompt_S]).tolist()
        for num_parts in range(min(len(parts), most), min(most, len(sizes)) + 1):
            parts = balanced_parts(loads_SD, sizes, num_parts)
            if all(self.fits(part) for part in parts):
                yield parts
                return

    def fits(self, part: list[int]) -> bool:
        """Whether the rows of a part are no more than a micro-batch holds."""
        rows = self._fill(part)
        return len(rows) * rows[0][0] <= self.limits.micro_batch_tokens

    def rows(self, part: list[int]) -> list[Row]:
        """Rows of samples, the widest first."""
        return [[self.samples[at] for index in row for at in self.parts_of[index]] for _, row in self._fill(part)]

    def _fill(self, part: Sequence[int]) -> list[tuple[int, list[int]]]:
        """Length and items of each row, the longest first; items of one prompt are side by side, as far as a row holds them."""
        sizes, prompts = self.items.sizes_S, self.items.prompt_S
        together: dict[int, list[int]] = {}
        for index in part:
            together.setdefault(int(prompts[index]), []).append(index)
        units: list[tuple[int, list[int]]] = []
        for prompt, members in together.items():
            shared = int(self.items.prompt_sizes_G[prompt])
            room = max(self.limits.row_tokens - shared, 1)
            for row in self.limits.fill([max(int(sizes[index]), 1) for index in members], room):
                chosen = [members[at] for at in row]
                units.append((shared + sum(int(sizes[index]) for index in chosen), chosen))
        rows = []
        for row in self.limits.fill([length for length, _ in units], self.limits.row_tokens):
            by_prompt = sorted((int(prompts[units[at][1][0]]), at) for at in row)
            rows.append((sum(units[at][0] for at in row), [index for _, at in by_prompt for index in units[at][1]]))
        return rows


def _routes(samples: Sequence[Sample], members: Sequence[int], skipped: int) -> NDArray[np.int16]:
    """Routes of the tokens of samples after those that they share."""
    parts = []
    for index in members:
        routes = samples[index].routes
        assert routes is not None, "checked for all samples"
        parts.append(routes[skipped:])
    return np.concatenate(parts)

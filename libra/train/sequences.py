"""The tokens of each sequence, packed or padded, so that every loss is written once for both layouts.

Losses, corrections and aggregation take tensors with one entry per token, in one of two layouts, and a `Sequences` that
knows the layout:

* `Packed`: the N action tokens of a micro-batch one after the other, as `libra.train.replica` has them;
* `Padded`: rows (B, T) with a mask, as most other libraries have them.

Sums, means and maxima over a sequence ignore the values in masked places. The aggregation drops the elementwise loss of a
masked place, whose gradient is 0 as long as the place is finite.

Shape legend: N tokens of either layout, S sequences, B rows, T places of a row (for `Padded`, S = B).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Sequences(Protocol):
    """The tokens of S sequences; see `Packed` and `Padded`."""

    @property
    def count_S(self) -> Tensor:
        """Tokens of each sequence, int64; 0 where all of them are masked."""
        ...

    def only(self, value_N: Tensor) -> Tensor:
        """``value_N`` with 0 in masked places."""
        ...

    def sum(self, value_N: Tensor) -> Tensor:
        """Sum over the tokens of each sequence (S,)."""
        ...

    def largest(self, value_N: Tensor) -> Tensor:
        """Largest value in each sequence (S,); 0 for an empty one."""
        ...

    def spread(self, value_S: Tensor) -> Tensor:
        """Each sequence's value at each of its tokens (N,)."""
        ...

    def where(self, keep_N: Tensor) -> Sequences:
        """The same sequences without the tokens that are False in ``keep_N``."""
        ...

    @property
    def mask_N(self) -> Tensor:
        """True where there is a token, in the shape of the layout."""
        ...


def sequence_mean(value_N: Tensor, sequences: Sequences, *, eps: float | None = None) -> Tensor:
    """Mean over the tokens of each sequence (S,); 0 for an empty one.

    ``eps`` None divides by max(tokens, 1) (TRL, AReaL, verl's GSPO); a number divides by tokens + eps (verl's GMPO).
    """
    total_S = sequences.sum(value_N)
    if eps is None:
        return total_S / sequences.count_S.clamp(min=1)
    return total_S / (sequences.count_S.to(total_S.dtype) + eps)  # an integer plus 1e-8 would be rounded in float32


@dataclass(frozen=True, slots=True, eq=False)
class Padded:
    """Rows of tokens with a mask.

    Parameters
    ----------
    mask : tensor (B, T)
        True or 1 where there is a token; anything else is padding, an observation, or rejected.
    """

    mask: Tensor

    @property
    def mask_N(self) -> Tensor:
        return self.mask if self.mask.dtype == torch.bool else self.mask > 0

    @property
    def count_S(self) -> Tensor:
        return self.mask_N.sum(-1)

    def only(self, value_N: Tensor) -> Tensor:
        return torch.where(self.mask_N, value_N, torch.zeros_like(value_N))

    def sum(self, value_N: Tensor) -> Tensor:
        return self.only(value_N).sum(-1)

    def largest(self, value_N: Tensor) -> Tensor:
        if not value_N.shape[-1]:
            return value_N.new_zeros(len(value_N))
        top_S = value_N.masked_fill(~self.mask_N, -torch.inf).amax(-1)
        return torch.where(self.count_S > 0, top_S, torch.zeros_like(top_S))

    def spread(self, value_S: Tensor) -> Tensor:
        return value_S[:, None].expand(self.mask.shape)

    def where(self, keep_N: Tensor) -> Padded:
        return Padded(self.mask_N & keep_N)


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """Tokens of all sequences in one row, without padding.

    Parameters
    ----------
    sequence : int64 tensor (N,)
        Number of the sequence a token belongs to, in [0, num_sequences).
    num_sequences : int
    kept : bool tensor (N,), optional
        False where a token was rejected. None: all are kept.
    """

    sequence: Tensor
    num_sequences: int
    kept: Tensor | None = None

    @property
    def mask_N(self) -> Tensor:
        return torch.ones_like(self.sequence, dtype=torch.bool) if self.kept is None else self.kept

    @property
    def count_S(self) -> Tensor:
        ones_N = self.mask_N.to(torch.int64)
        return ones_N.new_zeros(self.num_sequences).index_add(0, self.sequence, ones_N)

    def only(self, value_N: Tensor) -> Tensor:
        return value_N if self.kept is None else torch.where(self.kept, value_N, torch.zeros_like(value_N))

    def sum(self, value_N: Tensor) -> Tensor:
        return value_N.new_zeros(self.num_sequences).index_add(0, self.sequence, self.only(value_N))

    def largest(self, value_N: Tensor) -> Tensor:
        floor_N = value_N if self.kept is None else value_N.masked_fill(~self.kept, -torch.inf)
        start_S = value_N.new_full((self.num_sequences,), -torch.inf)
        top_S = start_S.scatter_reduce(0, self.sequence, floor_N, "amax")
        return torch.where(self.count_S > 0, top_S, torch.zeros_like(top_S))

    def spread(self, value_S: Tensor) -> Tensor:
        return value_S[self.sequence]

    def where(self, keep_N: Tensor) -> Packed:
        return Packed(self.sequence, self.num_sequences, self.mask_N & keep_N)

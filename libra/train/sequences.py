"""The tokens of each sequence, packed or padded, and how their losses become the loss of a minibatch.

Every loss is written once for both layouts: losses, corrections and `Aggregation` take tensors with one entry
per token, in one of two layouts, and a `Sequences` that knows the layout:

* `Packed`: the N action tokens of a micro-batch one after the other, as `libra.train.replica` has them;
* `Padded`: rows (B, T) with a mask, as most other libraries have them.

Sums, means and maxima over a sequence ignore the values in masked places. The aggregation drops the elementwise
loss of a masked place, whose gradient is 0 as long as the place is finite.

Invariants of `Aggregation`
---------------------------
1. A mode is a weight per token and a denominator. The weight of a token depends on its own sequence alone, the
   denominator on counts of the whole minibatch alone: the sum over any split into whole sequences, divided by the
   minibatch's denominator, is the loss of one big batch, gradient included.
2. Masked places are ignored, whatever their value; a minibatch without a token gives exactly 0.
3. The sum of weights is additive: over any split of a minibatch into whole sequences the weights of the parts add
   up, without rounding, to the whole. The denominator is a function of the whole sum, so parts are merged undivided.

Shape legend: N tokens of either layout, S sequences, B rows, T places of a row (for `Padded`, S = B).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, get_args

import torch
from torch import Tensor

from libra.config.algorithms import AggregationMode
from libra.errors import TrainError


def check_option(where: str, got: str, allowed: Iterable[str]) -> None:
    """TrainError naming ``where`` unless ``got`` is one of ``allowed``."""
    names = tuple(allowed)
    if got not in names:
        raise TrainError(f"{where}: got {got!r}; allowed are {', '.join(names)}")


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


AGGREGATIONS: tuple[str, ...] = (*get_args(AggregationMode), "constant")


@dataclass(frozen=True, slots=True)
class Aggregation:
    """How the losses of tokens become the loss of a minibatch.

    Attributes
    ----------
    mode : str
        ==========================  =====================  =======================================================
        mode                        weight of a token      denominator
        ==========================  =====================  =======================================================
        ``token-mean``              1                      tokens (DAPO; TRL ``bnpo``)
        ``seq-mean-token-sum``      1                      sequences (TRL ``luspo``)
        ``seq-mean-token-mean``     1 / its sequence's     sequences (GRPO; TRL ``grpo``, ``sapo``)
                                    tokens
        ``seq-mean-token-sum-norm`` 1                      sequences x ``horizon_tokens`` (Dr.GRPO; TRL ``dr_grpo``)
        ``constant``                1                      ``divisor`` (TRL ``dapo``, ``cispo``: items in the batch)
        ==========================  =====================  =======================================================
    horizon_tokens : float, optional
        Of ``seq-mean-token-sum-norm``: the generation budget, the same for every batch.
    divisor : float, optional
        Of ``constant``.
    count_empty : bool
        Whether a sequence without a token counts as a sequence (TRL), or not (verl).
    token_eps : float
        Of ``seq-mean-token-mean``: added to the token count, 1e-8 in verl.
    """

    mode: str = "token-mean"
    horizon_tokens: float | None = None
    divisor: float | None = None
    count_empty: bool = False
    token_eps: float = 0.0

    def __post_init__(self) -> None:
        check_option("aggregation", self.mode, AGGREGATIONS)
        needed = {"seq-mean-token-sum-norm": "horizon_tokens", "constant": "divisor"}.get(self.mode)
        if needed is not None and not (getattr(self, needed) or 0) > 0:
            raise TrainError(
                f"aggregation {self.mode}: {needed} is {getattr(self, needed)}; allowed is a number above 0"
            )

    def weighted_sum(self, loss_N: Tensor, sequences: Sequences) -> Tensor:
        """Sum of weight x loss, a scalar with gradient."""
        total_S = sequences.sum(loss_N)
        if self.mode == "seq-mean-token-mean":
            # in the dtype of the losses: in float32 a count plus 1e-8 rounds to the count
            total_S = total_S / (sequences.count_S.clamp(min=1).to(total_S.dtype) + self.token_eps)
        return total_S.sum()

    def weight_sum(self, *, num_tokens: float, num_sequences: float) -> float:
        """Sum of the weights of sequences with these counts: tokens for ``token-mean``, else sequences.

        A whole number, so that sums over slices are exact. ``seq-mean-token-sum-norm`` and ``constant`` divide by a constant;
        their sequences are still counted, to detect a missing or repeated slice.
        """
        return num_tokens if self.mode == "token-mean" else num_sequences

    def divisor_of(self, weight_sum: float) -> float:
        """The divisor of the merged sum of weight x gradient; 1 in place of a count of 0."""
        if self.mode == "constant":
            assert self.divisor is not None
            return self.divisor
        horizon = self.horizon_tokens if self.mode == "seq-mean-token-sum-norm" else None
        return (weight_sum or 1.0) * (horizon or 1.0)

    def denominator(self, *, num_tokens: float, num_sequences: float) -> float:
        """The divisor of the weighted sums of a minibatch with these counts."""
        return self.divisor_of(self.weight_sum(num_tokens=num_tokens, num_sequences=num_sequences))

    def __call__(
        self,
        loss_N: Tensor,
        sequences: Sequences,
        *,
        num_tokens: float | None = None,
        num_sequences: float | None = None,
    ) -> Tensor:
        """The loss (scalar). Counts are those of ``sequences`` unless given, e.g. for the whole minibatch."""
        count_S = sequences.count_S
        if num_sequences is None:
            num_sequences = len(count_S) if self.count_empty else int((count_S > 0).sum())
        num_tokens = int(count_S.sum()) if num_tokens is None else num_tokens
        return self.weighted_sum(loss_N, sequences) / self.denominator(
            num_tokens=num_tokens, num_sequences=num_sequences
        )

"""The tokens of each sequence, and how their losses become the loss of a minibatch.

Losses, corrections and `Aggregation` take tensors with one entry per token and a `Sequences` that knows which tokens
belong together. They use masks, of which a `Sequences` has none, so that the golden tests can pass padded rows instead.

Invariants of `Aggregation`
---------------------------
1. A mode is a weight per token and a denominator. The weight of a token depends on its own sequence alone, the
   denominator on counts of the whole minibatch alone: the sum over any split into whole sequences, divided by the
   minibatch's denominator, is the loss of one big batch, gradient included.
2. Masked places are ignored, even NaN; a minibatch without a token gives exactly 0.
3. The sum of weights is additive: over any split of a minibatch into whole sequences the weights of the parts add
   up, without rounding, to the whole. The denominator is a function of the whole sum, so parts are merged undivided.

Shape legend: N tokens, S sequences.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from libra.config.algorithms import AggregationMode
from libra.errors import TrainError


def check_option(where: str, got: str, allowed: Iterable[str]) -> None:
    """TrainError naming ``where`` unless ``got`` is one of ``allowed``."""
    names = tuple(allowed)
    if got not in names:
        raise TrainError(f"{where}: got {got!r}; allowed are {', '.join(names)}")


@dataclass(frozen=True, slots=True, eq=False)
class Sequences:
    """The tokens of S sequences, without padding: ``sequence`` int64 (N,) is the number of each token's
    sequence."""

    sequence: Tensor
    num_sequences: int

    @property
    def mask_N(self) -> Tensor:
        """True where there is a token: everywhere."""
        return torch.ones_like(self.sequence, dtype=torch.bool)

    @property
    def count_S(self) -> Tensor:
        """Tokens of each sequence, int64."""
        return self.sequence.new_zeros(self.num_sequences).index_add(0, self.sequence, torch.ones_like(self.sequence))

    def only(self, value_N: Tensor) -> Tensor:
        """``value_N`` with 0 in masked places, of which there are none."""
        return value_N

    def sum(self, value_N: Tensor) -> Tensor:
        """Sum over the tokens of each sequence (S,)."""
        return value_N.new_zeros(self.num_sequences).index_add(0, self.sequence, value_N)

    def largest(self, value_N: Tensor) -> Tensor:
        """Largest value in each sequence (S,); 0 for an empty one."""
        start_S = value_N.new_full((self.num_sequences,), -torch.inf)
        top_S = start_S.scatter_reduce(0, self.sequence, value_N, "amax")
        return torch.where(self.count_S > 0, top_S, torch.zeros_like(top_S))

    def spread(self, value_S: Tensor) -> Tensor:
        """Each sequence's value at each of its tokens (N,)."""
        return value_S[self.sequence]


def sequence_mean(value_N: Tensor, sequences: Sequences, *, eps: float | None = None) -> Tensor:
    """Mean over the tokens of each sequence (S,); 0 for an empty one.

    Without ``eps`` it divides by max(tokens, 1) (TRL, AReaL, verl's GSPO), else by tokens + eps (verl's
    GMPO).
    """
    total_S = sequences.sum(value_N)
    if eps is None:
        return total_S / sequences.count_S.clamp(min=1)
    return total_S / (sequences.count_S.to(total_S.dtype) + eps)  # an integer plus 1e-8 would be rounded in float32


AGGREGATIONS: tuple[str, ...] = (*get_args(AggregationMode), "constant")


@dataclass(frozen=True, slots=True)
class Aggregation:
    """The rule by which token losses become the loss of a minibatch.

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
        For ``seq-mean-token-sum-norm``: the generation budget, the same for every batch.
    divisor : float, optional
        For ``constant``.
    """

    mode: str = "token-mean"
    horizon_tokens: float | None = None
    divisor: float | None = None

    def __post_init__(self) -> None:
        check_option("aggregation", self.mode, AGGREGATIONS)
        needed = {"seq-mean-token-sum-norm": "horizon_tokens", "constant": "divisor"}.get(self.mode)
        if needed is not None and not (getattr(self, needed) or 0) > 0:
            raise TrainError(f"aggregation {self.mode}: {needed} is {getattr(self, needed)}; give a number above 0")

    def weighted_sum(self, loss_N: Tensor, sequences: Sequences) -> Tensor:
        """Sum of weight x loss, a scalar with gradient."""
        total_S = sequences.sum(loss_N)
        if self.mode == "seq-mean-token-mean":
            total_S = total_S / sequences.count_S.clamp(min=1)
        return total_S.sum()

    def weight_sum(self, *, num_tokens: float, num_sequences: float) -> float:
        """Sum of the weights of sequences with these counts: tokens for ``token-mean``, else sequences.

        A whole number, so that sums over slices are exact. Modes that divide by a constant still count
        sequences, to detect a missing or repeated slice.
        """
        return num_tokens if self.mode == "token-mean" else num_sequences

    def divisor_of(self, weight_sum: float) -> float:
        """The divisor of the merged sum of weight x gradient; a count of 0 becomes 1."""
        if self.mode == "constant":
            assert self.divisor is not None
            return self.divisor
        horizon = self.horizon_tokens if self.mode == "seq-mean-token-sum-norm" else None
        return (weight_sum or 1.0) * (horizon or 1.0)

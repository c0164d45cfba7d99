"""Aggregation of token losses to the loss of a minibatch: the weight of each token, and the divisor of the sum.

Invariants
----------
1. A mode is a weight per token and a denominator. The weight of a token depends on its own sequence alone, the denominator
   on counts of the whole minibatch alone: the sum over any split into whole sequences, divided by the minibatch's
   denominator, is the loss of one big batch, gradient included.
2. Masked places are ignored, whatever their value; a minibatch without a token gives exactly 0.
3. The sum of weights is additive: over any split of a minibatch into whole sequences the weights of the parts add up,
   without rounding, to that of the whole. The denominator is a function of the whole sum, so parts are merged undivided.

Shape legend: N tokens of a `libra.train.sequences.Sequences`, S sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from torch import Tensor

from libra.config.algorithms import AggregationMode
from libra.errors import TrainError
from libra.train.choice_check import check_option
from libra.train.sequences import Sequences

AGGREGATIONS: tuple[str, ...] = get_args(AggregationMode)


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

"""Log-probabilities of action tokens under a transformers model, for packed rows.

Shape legend: R rows, W width in tokens, V vocabulary, N action tokens, K columns (tokens of the vocabulary) asked of each.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from libra.errors import TrainError
from libra.heads import AfterHead, after_head, at_head, head_of
from libra.train.chunked_logprobs import CHUNK_TOKENS, chunked_columns


class Scorer:
    """A causal language model that scores given tokens only, and holds logits of at most ``chunk_tokens`` of them.

    Hidden states in front of the output head become log-probabilities chunk by chunk (`libra.train.chunked_logprobs`), with
    everything the architecture does after its head (caps, scales). The (R, W, V) logits never exist. Works with any transformers
    causal model whose ``get_output_embeddings()`` is its head, a linear map.
    """

    def __init__(self, model: Any, temperature: float = 1.0, chunk_tokens: int = CHUNK_TOKENS) -> None:
        self.model = model
        self.temperature = temperature
        self.chunk_tokens = chunk_tokens
        self._head = head_of(model)
        self._after: AfterHead | None = after_head(model)

    def logp(
        self,
        token_ids_RW: Tensor,
        position_ids_RW: Tensor,
        action_at_N: Tensor,
        target_N: Tensor,
        mask_R1WW: Tensor | None = None,
        *,
        entropy_gradient: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Log-probability of each target (N,), with gradient, and entropy (N,), with gradient on request; nats.

        At least float32 whatever the model's dtype. ``mask_R1WW`` (bool, True: reads) replaces the separation by positions.
        """
        inputs = (token_ids_RW, position_ids_RW, action_at_N, target_N, mask_R1WW)
        logp_NK, entropy_N, _ = self.columns(*inputs, entropy_gradient=entropy_gradient)
        return logp_NK[:, 0], entropy_N

    def columns(
        self,
        token_ids_RW: Tensor,
        position_ids_RW: Tensor,
        action_at_N: Tensor,
        target_N: Tensor,
        mask_R1WW: Tensor | None = None,
        *,
        columns_NK: Tensor | None = None,
        rest: bool = False,
        entropy_gradient: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As `logp`: log-probabilities of each target and of its K further columns (N, 1 + K), entropy (N,), and with ``rest`` the
        log-probability of all tokens but those columns (N,)."""
        head, further = self._head, columns_NK is not None
        wanted_NK = target_N[:, None]
        if columns_NK is not None:
            wanted_NK = torch.cat([wanted_NK, columns_NK], -1)

        def make(hidden_PH: Tensor) -> Tensor:
            logp_NK, entropy_N, rest_N = chunked_columns(
                hidden_PH[action_at_N],
                head.weight,
                wanted_NK,
                bias_V=head.bias,
                temperature=self.temperature,
                chunk_tokens=self.chunk_tokens,
                entropy_gradient=entropy_gradient,
                after_head=self._after,
                rest_from=1 if further and rest else None,
            )
            return torch.cat([logp_NK, entropy_N[:, None], rest_N[:, None]], -1)

        # Without a mask transformers derives segments from the restarts of position_ids; one of four axes it takes as is.
        made_NM = at_head(
            self.model,
            make,
            input_ids=token_ids_RW,
            attention_mask=mask_R1WW,
            position_ids=position_ids_RW,
            use_cache=False,
        )
        logp_NK, entropy_N, rest_N = made_NM[:, :-2], made_NM[:, -2], made_NM[:, -1]
        return logp_NK, entropy_N if entropy_gradient else entropy_N.detach(), rest_N


@torch.no_grad()
def check_packing(scorer: Scorer, tolerance: float) -> None:
    """TrainError if two sequences in one row do not score as they do alone: a model that ignores restarts."""
    lengths, vocabulary = (5, 7), int(scorer.model.config.get_text_config().vocab_size)
    sequences = [torch.arange(length) * 7 % vocabulary for length in lengths]
    device = next(scorer.model.parameters()).device

    def score(parts: list[Tensor]) -> Tensor:
        token_ids_W = torch.cat(parts)
        position_ids_W = torch.cat([torch.arange(len(part)) for part in parts])
        at_N = torch.arange(len(token_ids_W))
        rows = (token_ids_W[None], position_ids_W[None], at_N, (token_ids_W + 1) % vocabulary)
        return scorer.logp(*(tensor.to(device) for tensor in rows))[0]

    gap = float((score(sequences) - torch.cat([score([part]) for part in sequences])).abs().max())
    if gap > tolerance:
        raise TrainError(
            f"packing: two sequences in one row change each other's log-probabilities by {gap:.2g}, allowed {tolerance:g}: "
            f"{type(scorer.model).__name__} does not separate packed sequences; type trainer.max_row_tokens=1"
        )

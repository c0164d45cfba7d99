"""Log-probabilities of action tokens under a transformers model, for packed rows.

Shape legend: R rows, W width in tokens, V vocabulary, N action tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from libra.errors import TrainError


class Scorer:
    """A causal language model that scores only the tokens asked for.

    A hook in front of the output head hands it the hidden states of the wanted places and no others, so the (R, W, V)
    logits are never made, while everything the architecture does after its head (caps, scales) still happens.
    Works with any transformers causal model whose ``get_output_embeddings()`` is its head.
    """

    def __init__(self, model: Any, temperature: float = 1.0) -> None:
        self.model = model
        self.temperature = temperature
        self._wanted_N: Tensor | None = None
        model.get_output_embeddings().register_forward_pre_hook(self._select)

    def _select(self, module: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        return None if self._wanted_N is None else (args[0].flatten(0, 1)[self._wanted_N],)

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
        """Log-probability of each target (N,), with gradient, and entropy of its distribution (N,), where asked with; nats.

        At least float32 whatever the model's dtype. ``mask_R1WW`` (bool, True: sees) replaces what positions say.
        """
        self._wanted_N = action_at_N
        try:
            # Without a mask transformers derives segments from the restarts of position_ids; one of four axes it takes as is.
            output = self.model(
                input_ids=token_ids_RW, attention_mask=mask_R1WW, position_ids=position_ids_RW, use_cache=False
            )
        finally:
            self._wanted_N = None
        logits_NV = output.logits.to(torch.promote_types(output.logits.dtype, torch.float32))
        if self.temperature != 1.0:
            logits_NV = logits_NV / self.temperature
        logp_NV = torch.log_softmax(logits_NV, dim=-1)
        with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
            # 0 * log 0 is 0: a finite floor for log 0 makes it so, in the gradient too
            entropy_N = -(logp_NV.exp() * logp_NV.clamp(min=torch.finfo(logp_NV.dtype).min)).sum(-1)
        return logp_NV.gather(-1, target_N[:, None])[:, 0], entropy_N


@torch.no_grad()
def check_packing(scorer: Scorer, tolerance: float) -> None:
    """TrainError where two sequences in one row do not score as they do alone: a model that ignores restarts."""
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

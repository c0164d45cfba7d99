"""The forward pass of a step: fused if the model's family is supported, else by the model's own modules.

Invariant: before the first request, the log-probabilities of a short probe, prefilled and decoded through the slots, were compared
with those of the model as transformers runs it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from libra.errors import ModelError
from libra.rollout.fused_decoder import FusedDecoder, can_fuse
from libra.rollout.kv_slots import SLOT_ATTENTION, Chunk, SlotKV, Step
from libra.scoring import score_alone

TOLERANCE_NATS = {torch.float32: 1e-3, torch.bfloat16: 0.3}
"""Allowed difference of log-probabilities between the two passes: in float32 the largest of all; in bfloat16, which rounds at
1 part in 256, the median over positions of the expected difference. The largest difference is not meaningful there: over
the 49,152 tokens of SmolLM2-135M, transformers' own two attentions differ by 0.6 to 4 nats. Their median is 0.07, and above
0.5 with positions off by one or attention scores 1.2 times too high."""
PROBE_TOKENS = 7


class Forward:
    """From the token ids of a step to hidden states, and from hidden states to logits.

    ``model`` is a transformers causal LM; ``fused`` False keeps to its own modules, with only their attention replaced.
    """

    def __init__(self, model: Any, kv: SlotKV, *, fused: bool = True) -> None:
        self.model, self.kv = model, kv
        self.decoder, self.head = model.base_model, model.get_output_embeddings()
        self.fused = FusedDecoder(model, kv) if fused and can_fuse(model) else None
        self._compare_with_stock()

    def hidden(self, ids_T: Tensor, step: Step) -> Tensor:
        """Last hidden states (T, E); the step's keys and values are written on the way."""
        ids_T = ids_T.to(self.kv.device)
        if self.fused is not None:
            return self.fused(ids_T, step)
        return self.decoder(
            input_ids=ids_T[None], position_ids=step.position_T[None], use_cache=False, step=step
        ).last_hidden_state[0]

    def logits(self, hidden_NE: Tensor) -> Tensor:
        """Logits (N, V)."""
        return self.head(hidden_NE)

    def weights_changed(self) -> None:
        """Call after new weights were copied into the model."""
        if self.fused is not None:
            self.fused.refresh()

    def score_alone(self, token_ids: NDArray[np.int64], first: int, temperature: float) -> NDArray[np.float32]:
        """Log-probabilities from token ``first`` on by `libra.scoring.score_alone`: stock modules, no slots, no batch."""
        self.model.set_attn_implementation("sdpa")
        try:
            return score_alone(self.model, token_ids, first, temperature)
        finally:
            self.model.set_attn_implementation(SLOT_ATTENTION)

    @torch.inference_mode()
    def _compare_with_stock(self) -> None:
        vocabulary = int(
            self.model.config.vocab_size
        )  # not its first ids, which are special tokens that do not occur in text
        ids = (torch.arange(PROBE_TOKENS) * vocabulary + vocabulary // 2) // PROBE_TOKENS
        last = PROBE_TOKENS - 1
        slots, places = torch.zeros(last, dtype=torch.long), torch.arange(last)
        prefill = Step(self.kv, slots, places, 0, [Chunk(0, last, 0, 0, last)])
        decode = Step(self.kv, slots[:1], torch.tensor([last]), 1)
        decode.view_span(np.array([0]), np.array([last]))
        got = torch.cat([self.logits(self.hidden(ids[:last], prefill)), self.logits(self.hidden(ids[last:], decode))])
        self.model.set_attn_implementation("sdpa")
        expected = self.model(input_ids=ids[None].to(self.kv.device), use_cache=False).logits[0]
        self.model.set_attn_implementation(SLOT_ATTENTION)
        expected_logp = expected.float().log_softmax(-1)
        gaps_TV = (got.float().log_softmax(-1) - expected_logp).abs()
        narrow = self.kv.dtype != torch.float32
        gap = ((gaps_TV * expected_logp.exp()).sum(-1).median() if narrow else gaps_TV.max()).item()
        allowed = TOLERANCE_NATS[self.kv.dtype]
        if not gap <= allowed:
            raise ModelError(
                f"{self.model.config.name_or_path}: log-probabilities through slots differ by {gap:.2g} nats from those "
                f"of transformers (allowed: {allowed:g}); this engine cannot serve {self.model.config.model_type} models"
            )

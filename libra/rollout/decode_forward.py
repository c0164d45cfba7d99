"""The forward pass of a step: fused if the model's family is supported, else by the model's own modules.

Invariant: before the first request, the log-probabilities of a short probe, prefilled and decoded through the slots, were compared
with those of the model as transformers runs it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from libra.errors import ModelError
from libra.heads import after_head
from libra.model_loader import plain_attention
from libra.rollout.fused_decoder import FusedDecoder, can_fuse
from libra.rollout.kv_slots import SLOT_ATTENTION, Chunk, SlotKV, Step
from libra.rollout.layer_reads import not_served, reads_of
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
        kv.reads = reads_of(model, len(kv.positions), (kv.num_kv_heads, kv.head_dim))
        self.decoder, self.head = model.base_model, model.get_output_embeddings()
        self.fused = FusedDecoder(model, kv) if fused and can_fuse(model) else None
        try:
            with self._stock():
                self._after = after_head(model)
            gap = self._gap_to_stock()
        except (
            ModelError,
            RuntimeError,
            TypeError,
            ValueError,
            AttributeError,
        ) as error:  # the boundary to the model's code
            raise not_served(model, " ".join(str(error).split())) from error
        allowed = TOLERANCE_NATS[kv.dtype]
        if not gap <= allowed:
            raise not_served(
                model,
                f"log-probabilities through slots differ by {gap:.2g} nats from those of transformers (allowed: {allowed:g})",
            )

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
        logits_NV = self.head(hidden_NE)
        return logits_NV if self._after is None else self._after(logits_NV)

    def weights_changed(self) -> None:
        """Call after new weights were copied into the model."""
        if self.fused is not None:
            self.fused.refresh()

    def score_alone(self, token_ids: NDArray[np.int64], first: int, temperature: float) -> NDArray[np.float32]:
        """Log-probabilities from token ``first`` on by `libra.scoring.score_alone`: stock modules, no slots, no batch."""
        with self._stock():
            return score_alone(self.model, token_ids, first, temperature)

    @contextmanager
    def _stock(self) -> Iterator[None]:
        """The model as transformers runs it."""
        self.model.set_attn_implementation(plain_attention(self.model.config))
        try:
            yield
        finally:
            self.model.set_attn_implementation(SLOT_ATTENTION)

    @torch.inference_mode()
    def _gap_to_stock(self) -> float:
        """Nats by which a short probe differs from the model as transformers runs it."""
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
        with self._stock():
            expected = self.model(input_ids=ids[None].to(self.kv.device), use_cache=False).logits[0]
        expected_logp = expected.float().log_softmax(-1)
        gaps_TV = (got.float().log_softmax(-1) - expected_logp).abs()
        narrow = self.kv.dtype != torch.float32
        return ((gaps_TV * expected_logp.exp()).sum(-1).median() if narrow else gaps_TV.max()).item()

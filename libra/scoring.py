"""Log-probabilities of one sequence, computed alone and without a cache: same bits everywhere.

Without batch, padding or cache no shape changes the order of a sum, and attention is torch's scaled
dot product. So the same weights, tokens, thread count and machine give the same bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from libra.heads import after_head, at_head, head_of

CHUNK_TOKENS = 1024
"""Tokens whose logits are in memory at once. Not a setting: trainer and engine must cut at the same places."""


@torch.no_grad()
def score_alone(
    model: Any, token_ids: NDArray[np.integer], first: int = 1, temperature: float = 1.0
) -> NDArray[np.float32]:
    """Log-probability in nats of each token from ``first`` on given all before it (T - first,), float32.

    ``model`` is a transformers causal LM in evaluation mode with "sdpa"; ``first`` is at least 1.
    """
    ids = torch.from_numpy(np.asarray(token_ids, np.int64))
    ids = ids.to(next(model.parameters()).device)
    targets, head, after = ids[first:], head_of(model), after_head(model)

    def score(hidden_NH: Tensor) -> Tensor:
        wanted_NH = hidden_NH[first - 1 :]
        parts = []
        for at in range(0, len(wanted_NH), CHUNK_TOKENS):
            here = slice(at, at + CHUNK_TOKENS)
            logits_CV = torch.nn.functional.linear(wanted_NH[here], head.weight, head.bias)
            logits_CV = (logits_CV if after is None else after(logits_CV)).float()
            if temperature != 1.0:
                logits_CV = logits_CV / temperature
            parts.append(torch.log_softmax(logits_CV, dim=-1).gather(1, targets[here, None])[:, 0])
        return torch.cat(parts) if parts else wanted_NH.new_zeros(0)

    found: NDArray[np.float32] = at_head(model, score, input_ids=ids[None, :-1], use_cache=False).cpu().numpy()
    return found

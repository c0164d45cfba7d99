"""Log-probabilities of one sequence, computed alone and without a cache: the one way of scoring that trainer and engine share.

The same weights, tokens, thread count and machine give the same bits, wherever the model lives: there is no batch whose shape
could change the order of a sum, no padding, no cache, and the attention is torch's scaled dot product.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


@torch.no_grad()
def score_alone(
    model: Any, token_ids: NDArray[np.integer], first: int = 1, temperature: float = 1.0
) -> NDArray[np.float32]:
    """Log-probability in nats of each token from ``first`` on given all before it (T - first,), float32.

    ``model`` is a transformers causal LM in evaluation mode whose attention is "sdpa"; ``first`` is at least 1.
    """
    ids = torch.from_numpy(np.asarray(token_ids, np.int64))
    ids = ids.to(next(model.parameters()).device)
    wanted = len(ids) - first
    logits = model(input_ids=ids[None, :-1], use_cache=False, logits_to_keep=wanted).logits[0].float()
    if temperature != 1.0:
        logits = logits / temperature
    logp = torch.log_softmax(logits, dim=-1).gather(1, ids[first:, None])[:, 0]
    found: NDArray[np.float32] = logp.cpu().numpy()
    return found

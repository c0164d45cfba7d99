"""Sampling of the next tokens of a batch, with their log-probabilities. Randomness arrives as numbers.

A token is drawn by inverse CDF from one uniform number, fixed by the request's seed before its
first token. So the same seed, context and weights give the same tokens in any batch (up to floating
point).

The log-probability belongs to the distribution sampled from, after temperature and top_p. A greedy
token (temperature 0) has its log-probability at temperature 1, the model's own.

Further tokens at each place (``TurnRequest.draws``) have uniform numbers of their own, so they do
not change the generated ones.

Shapes: N rows, M draws, V vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def draw_uniforms(seed: int, num_tokens: int, first: int = 0) -> NDArray[np.float32]:
    """The uniform numbers in [0, 1) of tokens ``first``, ``first + 1``, ... of a turn (num_tokens,)."""
    return np.random.default_rng(seed).random(first + num_tokens, dtype=np.float32)[first:]


def sample(
    logits_NV: Tensor, uniforms_N: Tensor, temperature_N: Tensor | None, top_p_N: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Next token ids (N,) int64 and their log-probabilities (N,) float32.

    Shortcuts: no ``temperature_N`` is 1 everywhere, and no ``top_p_N`` cuts no row.
    """
    logits_NV = logits_NV.float()
    greedy_N = None
    if temperature_N is not None:
        greedy_N = temperature_N == 0
        logits_NV = logits_NV / torch.where(greedy_N, 1.0, temperature_N)[:, None]
    logprobs_NV = torch.log_softmax(logits_NV, dim=-1)
    if top_p_N is not None:
        cut_N = top_p_N if greedy_N is None else torch.where(greedy_N, 1.0, top_p_N)
        logprobs_NV = _keep_top_p(logprobs_NV, cut_N)
    cdf_NV = logprobs_NV.exp().cumsum_(dim=-1)
    total_N1 = cdf_NV[:, -1:]
    # Rounding may make u * total equal to the total, past the last token that has any probability.
    aim_N1 = torch.minimum(uniforms_N[:, None] * total_N1, torch.nextafter(total_N1, torch.zeros_like(total_N1)))
    tokens_N1 = torch.searchsorted(cdf_NV, aim_N1, right=True)
    # Only a row of NaN is searched to its end; the index is made valid, and its log-probability is NaN.
    tokens_N1.clamp_(max=logits_NV.shape[-1] - 1)
    if greedy_N is not None:
        tokens_N1 = torch.where(greedy_N[:, None], logits_NV.argmax(dim=-1, keepdim=True), tokens_N1)
    return tokens_N1[:, 0], logprobs_NV.gather(1, tokens_N1)[:, 0]


def _keep_top_p(logprobs_NV: Tensor, top_p_N: Tensor) -> Tensor:
    """Log-probabilities renormalised over the fewest likeliest tokens that reach top_p; else -inf."""
    sorted_NV, order_NV = logprobs_NV.sort(dim=-1, descending=True, stable=True)
    probs_NV = sorted_NV.exp()
    before_NV = probs_NV.cumsum(dim=-1) - probs_NV
    # A token stays while the mass before it is short of top_p; rows at 1 keep everything, rounding or not.
    drop_NV = (before_NV >= top_p_N[:, None]) & (top_p_N < 1)[:, None]
    drop_NV = torch.zeros_like(drop_NV).scatter_(1, order_NV, drop_NV)
    kept_NV = logprobs_NV.masked_fill(drop_NV, -torch.inf)
    return torch.where((top_p_N < 1)[:, None], kept_NV - kept_NV.logsumexp(dim=-1, keepdim=True), kept_NV)


def draw_further(logits_NV: Tensor, uniforms_NM: Tensor, temperature_N: Tensor | None) -> tuple[Tensor, Tensor]:
    """M further tokens of each row (N, M) int64, by inverse CDF, and their log-probabilities (N, M)
    float32.

    No request wants them at temperature 0 or with top_p below 1; such rows are drawn at 1 and uncut.
    """
    logits_NV = logits_NV.float()
    if temperature_N is not None:
        logits_NV = logits_NV / torch.where(temperature_N == 0, 1.0, temperature_N)[:, None]
    logprobs_NV = torch.log_softmax(logits_NV, dim=-1)
    cdf_NV = logprobs_NV.exp().cumsum_(dim=-1)
    total_N1 = cdf_NV[:, -1:]
    aim_NM = torch.minimum(uniforms_NM * total_N1, torch.nextafter(total_N1, torch.zeros_like(total_N1)))
    tokens_NM = torch.searchsorted(cdf_NV, aim_NM, right=True).clamp_(max=logits_NV.shape[-1] - 1)
    return tokens_NM, logprobs_NV.gather(1, tokens_NM)


def further_uniforms(seed: int, place: int, draws: int) -> NDArray[np.float32]:
    """The uniform numbers in [0, 1) of a turn's further tokens at a place (draws,)."""
    return np.random.default_rng((seed, place, 1)).random(draws, dtype=np.float32)

"""Log-probabilities from hidden states without the (N, V) logits: chunk by chunk, recomputed in the backward pass.

Memory grows with ``chunk_tokens`` x V instead of N x V; the price is one more product with the output matrix.

Shape legend: N tokens, C tokens of a chunk, H hidden size, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from libra.errors import TrainError


def chunked_logp(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    target_N: Tensor,
    *,
    bias_V: Tensor | None = None,
    temperature: float = 1.0,
    chunk_tokens: int = 1024,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target (N,), with gradient to hidden states, weight and bias; entropy (N,), without; nats.

    For output heads that are one linear map; the logits are made in the dtype of ``hidden_NH`` and normalised in at least
    float32. `libra.train.logprobs.Scorer` does not use it: it has to serve heads that cap or scale their logits too.
    """
    if chunk_tokens < 1:
        raise TrainError(f"chunked_logp: chunk_tokens is {chunk_tokens}; allowed is 1 or more")
    return _ChunkedLogp.apply(hidden_NH, weight_VH, bias_V, target_N, temperature, chunk_tokens)  # type: ignore[no-any-return]


def _logits(hidden_CH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, temperature: float) -> Tensor:
    logits_CV = torch.nn.functional.linear(hidden_CH, weight_VH, bias_V)
    logits_CV = logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32))
    return logits_CV if temperature == 1.0 else logits_CV.div_(temperature)


class _ChunkedLogp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        target_N: Tensor,
        temperature: float,
        chunk_tokens: int,
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(hidden_NH.dtype, torch.float32)
        logp_N, entropy_N, norm_N = (hidden_NH.new_empty(len(hidden_NH), dtype=dtype) for _ in range(3))
        for at in range(0, len(hidden_NH), chunk_tokens):
            here = slice(at, at + chunk_tokens)
            logits_CV = _logits(hidden_NH[here], weight_VH, bias_V, temperature)
            norm_N[here] = torch.logsumexp(logits_CV, -1)
            logp_N[here] = logits_CV.gather(-1, target_N[here, None])[:, 0] - norm_N[here]
            logits_CV.clamp_(min=torch.finfo(dtype).min)  # so that 0 * log 0 is 0
            p_CV = (logits_CV - norm_N[here, None]).exp_()
            entropy_N[here] = norm_N[here] - p_CV.mul_(logits_CV).sum(-1)
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V, target_N, norm_N)
        ctx.options = (temperature, chunk_tokens)
        ctx.mark_non_differentiable(entropy_N)
        return logp_N, entropy_N

    @staticmethod
    def backward(ctx: Any, grad_N: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden_NH, weight_VH, bias_V, target_N, norm_N = ctx.saved_tensors
        temperature, chunk_tokens = ctx.options
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        grad_hidden_NH = torch.empty_like(hidden_NH) if wants_hidden else None
        grad_weight_VH = torch.zeros_like(weight_VH, dtype=norm_N.dtype) if wants_weight else None
        grad_bias_V = torch.zeros_like(bias_V, dtype=norm_N.dtype) if wants_bias else None
        for at in range(0, len(hidden_NH), chunk_tokens):
            here = slice(at, at + chunk_tokens)
            slope_C = grad_N[here, None] / temperature
            grad_CV = _logits(hidden_NH[here], weight_VH, bias_V, temperature)
            grad_CV = grad_CV.sub_(norm_N[here, None]).exp_().mul_(-slope_C)  # d log p_t = 1[v = t] - p_v
            grad_CV.scatter_add_(1, target_N[here, None], slope_C.to(grad_CV.dtype))
            if grad_bias_V is not None:
                grad_bias_V += grad_CV.sum(0)
            grad_CV = grad_CV.to(hidden_NH.dtype)
            if grad_hidden_NH is not None:
                grad_hidden_NH[here] = grad_CV @ weight_VH
            if grad_weight_VH is not None:
                if grad_weight_VH.dtype == grad_CV.dtype:
                    grad_weight_VH.addmm_(grad_CV.T, hidden_NH[here])
                else:
                    grad_weight_VH += grad_CV.T @ hidden_NH[here]
        return (
            grad_hidden_NH,
            None if grad_weight_VH is None else grad_weight_VH.to(weight_VH.dtype),
            None if grad_bias_V is None else grad_bias_V.to(bias_V.dtype),
            None,
            None,
            None,
        )

"""Log-probabilities of action tokens of packed rows, without an array of (R, W, V) logits.

Hidden states become log-probabilities chunk by chunk, and again in the backward pass. Two arrays of
``chunk_tokens`` x V exist at once, in at least float32, and a third if the model's dtype is
narrower.

Shape legend: R rows, W width in tokens, N action tokens, C tokens of a chunk, H hidden size, V
vocabulary, K columns (tokens of the vocabulary) of each token.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from libra.errors import TrainError
from libra.heads import AfterHead, after_head, at_head, head_of
from libra.model_loader import build_model, plain_attention

CHUNK_TOKENS = 1024


def load_model(model_dir: Path, dtype: torch.dtype, loader: str | None = None) -> Any:
    """The causal model of a directory, without dropout, with torch's SDPA; or ModelError."""
    model = build_model(loader, model_dir, dtype=dtype, attention="sdpa")
    if (attention := plain_attention(model.config)) != "sdpa":
        model.set_attn_implementation(attention)
    if dtype is torch.float64:
        _keep_double(model)
    return model.eval()


class _KeepDouble(TorchFunctionMode):  # casts of float64 tensors to float32 have no effect
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        narrows = func is Tensor.float or (func is Tensor.to and torch.float32 in (*args[1:], given.get("dtype")))
        return args[0] if narrows and args[0].dtype is torch.float64 else func(*args, **given)


def _keep_double(model: Any) -> None:
    # transformers has norms in float32, torch no grouped product in float64
    if getattr(model.config, "num_experts", 0):
        model.set_experts_implementation("eager")
    forward = model.forward

    @functools.wraps(forward)
    def in_double(*args: Any, **kwargs: Any) -> Any:
        with _KeepDouble():
            return forward(*args, **kwargs)

    model.forward = in_double


class Scorer:
    """A causal language model that scores given tokens, with logits of ``chunk_tokens`` at a time.
    The model's head must be a linear map; a transformation of its logits is applied."""

    def __init__(self, model: Any, temperature: float = 1.0, chunk_tokens: int = CHUNK_TOKENS) -> None:
        self.model = model
        self.temperature = temperature
        self.chunk_tokens = chunk_tokens
        self._head = head_of(model)
        self._after: AfterHead | None = after_head(model)

    def logp(self, *inputs: Tensor | None, entropy_gradient: bool = False) -> tuple[Tensor, Tensor]:
        """Log-probability of each target and entropy, both (N,) in nats; arguments as `columns`."""
        logp_NK, entropy_N, _ = self.columns(*inputs, entropy_gradient=entropy_gradient)  # type: ignore[arg-type]
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
        """Log-probabilities of each target and its K columns (N, 1 + K), entropy (N,) and rest
        (N,).

        All are in nats, in at least float32. Log-probabilities have a gradient; the entropy has a
        gradient on request. With ``rest``, the third array is the log-probability of all tokens but
        the K columns. ``mask_R1WW`` (bool, True: may be read) replaces the separation of sequences
        by positions.
        """
        head, wanted_NK = self._head, target_N[:, None]
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
                rest_from=1 if columns_NK is not None and rest else None,
            )
            return torch.cat([logp_NK, entropy_N[:, None], rest_N[:, None]], -1)

        # Without a mask transformers derives segments from the restarts of position_ids; a mask of four axes is used unchanged.
        places = {"input_ids": token_ids_RW, "attention_mask": mask_R1WW, "position_ids": position_ids_RW}
        made_NM = at_head(self.model, make, **places, use_cache=False)
        logp_NK, entropy_N, rest_N = made_NM[:, :-2], made_NM[:, -2], made_NM[:, -1]
        return logp_NK, entropy_N if entropy_gradient else entropy_N.detach(), rest_N


@torch.no_grad()
def check_packing(scorer: Scorer, tolerance: float) -> None:
    """TrainError if two sequences in one row do not score as each does alone."""
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
            f"packing: two sequences in one row change each other's log-probabilities by {gap:.2g} (allowed: {tolerance:g}): "
            f"{type(scorer.model).__name__} does not separate packed sequences; type trainer.max_row_tokens=1"
        )


def chunked_columns(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    columns_NK: Tensor,
    *,
    bias_V: Tensor | None = None,
    temperature: float = 1.0,
    chunk_tokens: int = CHUNK_TOKENS,
    entropy_gradient: bool = False,
    after_head: AfterHead | None = None,
    rest_from: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities (N, K) of ``columns_NK``, entropy (N,) and rest (N,), all in nats.

    They have a gradient to hidden states, weight and bias, the entropy only with
    ``entropy_gradient``. Logits are computed in the dtype of ``hidden_NH``, go through
    ``after_head`` and are normalised in at least float32. The rest is the log-probability of all
    tokens but the columns from ``rest_from`` on, which must differ; -inf if no other token exists,
    0 without ``rest_from``.
    """
    if chunk_tokens < 1:
        raise TrainError(f"chunked_columns: chunk_tokens is {chunk_tokens}; give 1 or more")
    return _ChunkedLogp.apply(  # type: ignore[no-any-return]
        hidden_NH, weight_VH, bias_V, columns_NK, temperature, chunk_tokens, entropy_gradient, after_head, rest_from
    )


def _own_logits(hidden_CH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, after_head: AfterHead | None) -> Tensor:
    logits_CV = torch.nn.functional.linear(hidden_CH, weight_VH, bias_V)
    return logits_CV if after_head is None else after_head(logits_CV)


def _normal(logits_CV: Tensor, temperature: float) -> Tensor:
    logits_CV = logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32))
    return logits_CV if temperature == 1.0 else logits_CV.div_(temperature)


class _ChunkedLogp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        columns_NK: Tensor,
        temperature: float,
        chunk_tokens: int,
        entropy_gradient: bool,
        after_head: AfterHead | None,
        rest_from: int | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        dtype = torch.promote_types(hidden_NH.dtype, torch.float32)
        logp_NK = hidden_NH.new_empty(columns_NK.shape, dtype=dtype)
        entropy_N, norm_N = (hidden_NH.new_empty(len(hidden_NH), dtype=dtype) for _ in range(2))
        rest_N = hidden_NH.new_zeros(len(hidden_NH), dtype=dtype)
        for at in range(0, len(hidden_NH), chunk_tokens):
            here = slice(at, at + chunk_tokens)
            logits_CV = _normal(_own_logits(hidden_NH[here], weight_VH, bias_V, after_head), temperature)
            norm_N[here] = torch.logsumexp(logits_CV, -1)
            logp_CV = logits_CV.sub_(norm_N[here, None])
            del logits_CV
            logp_NK[here] = logp_CV.gather(-1, columns_NK[here])
            if rest_from is not None:
                rest_N[here] = torch.logsumexp(logp_CV.scatter(1, columns_NK[here, rest_from:], -torch.inf), -1)
            p_CV = logp_CV.exp()
            # a finite floor for log 0, so that 0 * log 0 is 0
            entropy_N[here] = -p_CV.mul_(logp_CV.clamp_(min=torch.finfo(dtype).min)).sum(-1)
            del logp_CV, p_CV  # before the next chunk is made
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V, columns_NK, norm_N, entropy_N, rest_N)
        ctx.options = (temperature, chunk_tokens, entropy_gradient, after_head, rest_from)
        if without := [*([] if entropy_gradient else [entropy_N]), *([rest_N] if rest_from is None else [])]:
            ctx.mark_non_differentiable(*without)
        return logp_NK, entropy_N, rest_N

    @staticmethod
    def backward(ctx: Any, grad_NK: Tensor, grad_entropy_N: Tensor, grad_rest_N: Tensor) -> tuple[Tensor | None, ...]:
        hidden_NH, weight_VH, bias_V = ctx.saved_tensors[:3]
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        wide = torch.promote_types(hidden_NH.dtype, torch.float32)
        grad_hidden_NH = torch.empty_like(hidden_NH) if wants_hidden else None
        grad_weight_VH = torch.zeros_like(weight_VH, dtype=wide) if wants_weight else None
        grad_bias_V = torch.zeros_like(bias_V, dtype=wide) if wants_bias else None
        for at in range(0, len(hidden_NH), ctx.options[1]):
            here = slice(at, at + ctx.options[1])
            grad_CV = _grad_of_logits(ctx, here, grad_NK, grad_entropy_N, grad_rest_N)
            if grad_bias_V is not None:
                grad_bias_V += grad_CV.sum(0)
            grad_CV = grad_CV.to(hidden_NH.dtype)
            if grad_hidden_NH is not None:
                torch.mm(grad_CV, weight_VH, out=grad_hidden_NH[here])
            if grad_weight_VH is not None:
                if grad_weight_VH.dtype == grad_CV.dtype:
                    grad_weight_VH.addmm_(grad_CV.T, hidden_NH[here])
                else:
                    grad_weight_VH += grad_CV.T @ hidden_NH[here]
            del grad_CV
        return (
            grad_hidden_NH,
            None if grad_weight_VH is None else grad_weight_VH.to(weight_VH.dtype),
            None if grad_bias_V is None else grad_bias_V.to(bias_V.dtype),
            *[None] * 6,
        )


def _grad_of_logits(ctx: Any, here: slice, grad_NK: Tensor, grad_entropy_N: Tensor, grad_rest_N: Tensor) -> Tensor:
    hidden_NH, weight_VH, bias_V, columns_NK, norm_N, entropy_N, rest_N = ctx.saved_tensors
    temperature, _, entropy_gradient, after_head, rest_from = ctx.options
    raw_CV = torch.nn.functional.linear(hidden_NH[here], weight_VH, bias_V)
    if after_head is None:
        logits_CV, own_CV = _normal(raw_CV, temperature), None
    else:
        with torch.enable_grad():
            own_CV = after_head(raw_CV.requires_grad_())
        copied_CV = own_CV.detach().to(norm_N.dtype, copy=True)  # the code below changes it in place
        logits_CV = _normal(copied_CV, temperature)
    slope_CK = grad_NK[here] / temperature
    slope_C = slope_CK.sum(-1, keepdim=True)
    logp_CV = logits_CV.sub_(norm_N[here, None])
    of_rest_CV = None
    if rest_from is not None:  # d log p_rest = 1[v in rest] p_v / p_rest - p_v
        rest_slope_C = grad_rest_N[here, None] / temperature
        slope_C = slope_C + rest_slope_C
        from_C = rest_N[here, None].masked_fill(rest_N[here, None] == -torch.inf, 0.0)
        of_rest_CV = logp_CV.scatter(1, columns_NK[here, rest_from:], -torch.inf).sub_(from_C).exp_().mul_(rest_slope_C)
    if entropy_gradient:  # d entropy = -p_v (log p_v + entropy)
        weight_CV = logp_CV.clamp(min=torch.finfo(logp_CV.dtype).min).add_(entropy_N[here, None])
        weight_CV.mul_(grad_entropy_N[here, None] / temperature).add_(slope_C)
        grad_CV = logp_CV.exp_().mul_(weight_CV).neg_()
        del weight_CV
    else:
        grad_CV = logp_CV.exp_().mul_(-slope_C)  # d log p_t = 1[v = t] - p_v
    grad_CV.scatter_add_(1, columns_NK[here], slope_CK.to(grad_CV.dtype))
    if of_rest_CV is not None:
        grad_CV.add_(of_rest_CV)
        del of_rest_CV
    if own_CV is None:
        return grad_CV
    (through_CV,) = torch.autograd.grad(own_CV, raw_CV, grad_CV.to(own_CV.dtype))
    return through_CV.to(grad_CV.dtype)

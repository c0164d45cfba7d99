"""The forward pass of Llama-shaped decoders with fewer, larger operations than their modelling code.

On a CPU the time of a small model depends on the number of operations, not on their size, and the event loop waits for every
Python instruction of the engine's thread. This computes what the stock modules compute, from the same storage: their projections
become views into one joint matrix per layer, so weights can be loaded in place.

Invariants
1. The stock modules stay whole, and ``forward`` compares both passes before the engine serves anything.
2. No weight is stored twice.

Shapes: T tokens, E hidden size, H heads, K KV heads, D head size, C positions.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from libra.rollout.kv_slots import SlotKV, Step, attend

FUSED_MODEL_TYPES = frozenset({"llama", "qwen2", "qwen3"})
_STATIC_ROPE = frozenset({"default", "linear", "llama3", "yarn"})


def can_fuse(model: Any) -> bool:
    """Whether this pass computes what the model's own does: family, activation and rotary embedding of a known kind."""
    config = model.config
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    return config.model_type in FUSED_MODEL_TYPES and config.hidden_act == "silu" and rope in _STATIC_ROPE


def _join(linears: list[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """One matrix (and bias) whose row blocks are those of the given layers, which become views of it."""
    weight = torch.cat([linear.weight.data for linear in linears])
    bias = None if linears[0].bias is None else torch.cat([linear.bias.data for linear in linears])
    begin = 0
    for linear in linears:
        end = begin + linear.out_features
        linear.weight.data = weight[begin:end]
        if bias is not None:
            linear.bias.data = bias[begin:end]
        begin = end
    return weight, bias


class FusedLayer:
    """The weights of one decoder layer, joined, and its pass."""

    def __init__(self, layer: Any, index: int, kv: SlotKV) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.index, self.kv = index, kv
        self.heads, self.kv_heads, self.head_dim = kv.num_heads, kv.num_kv_heads, kv.head_dim
        self.rotated = self.heads + self.kv_heads
        self.qkv, self.qkv_bias = _join([attention.q_proj, attention.k_proj, attention.v_proj])
        self.gate_up, self.gate_up_bias = _join([mlp.gate_proj, mlp.up_proj])
        self.out, self.down = attention.o_proj, mlp.down_proj
        self.out_t, self.down_t = self.out.weight.t(), self.down.weight.t()
        self.norm1, self.norm2 = layer.input_layernorm, layer.post_attention_layernorm
        self.eps, self.shape = self.norm1.variance_epsilon, tuple(self.norm1.weight.shape)
        self.q_norm, self.k_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
        self.refresh()

    def refresh(self) -> None:
        """Recompute what is derived from the weights: the scale of queries and keys, head norms included (H + K, D)."""
        like = self.qkv
        q, k = (
            like.new_full((self.heads, self.head_dim), self.head_dim**-0.5),
            like.new_ones(self.kv_heads, self.head_dim),
        )
        if self.q_norm is not None and self.k_norm is not None:
            q, k = q * self.q_norm.weight, k * self.k_norm.weight
        self.scale_RD = torch.cat([q, k]).detach()

    def __call__(self, h_TE: Tensor, cos_T1D: Tensor, sin_T1D: Tensor, step: Step) -> None:
        """Add this layer's two residuals to ``h_TE`` in place."""
        x_TE = F.rms_norm(h_TE, self.shape, self.norm1.weight, self.eps)
        qkv = F.linear(x_TE, self.qkv, self.qkv_bias).view(h_TE.shape[0], -1, self.head_dim)
        turn = qkv[:, : self.rotated]
        if self.q_norm is not None:
            turn = F.rms_norm(turn, (self.head_dim,), None, self.eps)
        turn = turn * self.scale_RD
        half = self.head_dim // 2
        swapped = torch.cat((turn[..., half:], turn[..., :half]), dim=-1)
        turn.mul_(cos_T1D).addcmul_(swapped, sin_T1D)
        keys, values = self.kv.layers[self.index]
        keys[step.slot_T, :, step.position_T] = turn[:, self.heads :]
        values[step.slot_T, :, step.position_T] = qkv[:, self.rotated :]
        out_TE = attend(turn[:, : self.heads], step, self.index, 1.0).reshape(h_TE.shape[0], -1)
        h_TE.addmm_(out_TE, self.out_t)
        if self.out.bias is not None:
            h_TE.add_(self.out.bias)
        x_TE = F.rms_norm(h_TE, self.shape, self.norm2.weight, self.eps)
        gate, up = F.linear(x_TE, self.gate_up, self.gate_up_bias).chunk(2, dim=-1)
        h_TE.addmm_(F.silu(gate).mul_(up), self.down_t)
        if self.down.bias is not None:
            h_TE.add_(self.down.bias)


class FusedDecoder:
    """Token ids in, last hidden states out: the stock decoder's pass over a step's flat tokens."""

    def __init__(self, model: Any, kv: SlotKV) -> None:
        decoder = model.base_model
        self.embedding, self.norm = decoder.embed_tokens, decoder.norm
        self.layers = [FusedLayer(layer, index, kv) for index, layer in enumerate(decoder.layers)]
        like = self.embedding.weight
        cos, sin = decoder.rotary_emb(like, kv.positions[None])
        half = kv.head_dim // 2
        self.cos_C1D = cos[0][:, None].clone()
        self.sin_C1D = torch.cat((-sin[0, :, :half], sin[0, :, half:]), dim=-1)[:, None].clone()

    def refresh(self) -> None:
        """Call after new weights were copied in."""
        for layer in self.layers:
            layer.refresh()

    def __call__(self, ids_T: Tensor, step: Step) -> Tensor:
        """Hidden states after the last norm (T, E); writes the step's keys and values."""
        h_TE = F.embedding(ids_T, self.embedding.weight)
        cos, sin = self.cos_C1D.index_select(0, step.position_T), self.sin_C1D.index_select(0, step.position_T)
        for layer in self.layers:
            layer(h_TE, cos, sin, step)
        return F.rms_norm(h_TE, tuple(self.norm.weight.shape), self.norm.weight, self.norm.variance_epsilon)

"""The forward pass of a step, and its answers to the version check, by the same matrices.

The pass is fused for Llama-shaped decoders; other models run their own modules with another
attention. The fused pass has fewer, larger operations. It computes what the stock modules compute,
from the same storage: their projections become views into one joint matrix per layer.

1. The stock modules remain whole, and no weight is stored twice.
2. Before the first request, the log-probabilities of a short probe, prefilled and decoded through
   the slots, are compared with transformers' own.

Shapes: T tokens, E hidden size, H heads, K KV heads, D head size, C positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from libra.errors import EngineError, ModelError
from libra.heads import after_head, score_alone
from libra.model_loader import plain_attention
from libra.projections import is_embedding, project_layer
from libra.rollout.attention import SLOT_ATTENTION, Chunk, SlotKV, Step, attend, not_served, reads_of

FUSED_MODEL_TYPES = frozenset({"llama", "qwen2", "qwen3"})
_STATIC_ROPE = frozenset({"default", "linear", "llama3", "yarn"})


def can_fuse(model: Any) -> bool:
    """Whether the fused pass supports the model's family, activation and rotary embedding."""
    config = model.config
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    return config.model_type in FUSED_MODEL_TYPES and config.hidden_act == "silu" and rope in _STATIC_ROPE


def _join(linears: list[nn.Linear]) -> tuple[Tensor, Tensor | None]:
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
        """Recompute the scale of queries and keys, head norms included (H + K, D)."""
        like = self.qkv
        q = like.new_full((self.heads, self.head_dim), self.head_dim**-0.5)
        k = like.new_ones(self.kv_heads, self.head_dim)
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
        """Update copies after new weights were copied in."""
        for layer in self.layers:
            layer.refresh()

    def __call__(self, ids_T: Tensor, step: Step) -> Tensor:
        """Hidden states after the last norm (T, E); writes the step's keys and values."""
        h_TE = F.embedding(ids_T, self.embedding.weight)
        cos, sin = self.cos_C1D.index_select(0, step.position_T), self.sin_C1D.index_select(0, step.position_T)
        for layer in self.layers:
            layer(h_TE, cos, sin, step)
        return F.rms_norm(h_TE, tuple(self.norm.weight.shape), self.norm.weight, self.norm.variance_epsilon)


TOLERANCE_NATS = {torch.float32: 1e-3, torch.bfloat16: 0.3}
"""Allowed difference of log-probabilities between the two passes.

In float32 the largest difference; in bfloat16 the median, over positions, of the expected
difference.
"""
PROBE_TOKENS = 7


Apply = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class UsedLayer:
    """One layer: number of inputs (rows of an embedding), and map of (N, inputs), without bias."""

    inputs: int
    apply: Apply


class Forward:
    """From the token ids of a step to hidden states, and from hidden states to logits. ``model`` is
    a transformers causal LM; ``fused=False`` replaces only its attention."""

    def __init__(self, model: Any, kv: SlotKV, *, fused: bool = True) -> None:
        self.model, self.kv = model, kv
        kv.reads = reads_of(model, len(kv.positions), (kv.num_kv_heads, kv.head_dim))
        self.decoder, self.head = model.base_model, model.get_output_embeddings()
        self.fused = FusedDecoder(model, kv) if fused and can_fuse(model) else None
        try:
            with self._stock():
                self._after = after_head(model)
            gap = self._gap_to_stock()
        except (ModelError, RuntimeError, TypeError, ValueError, AttributeError) as error:  # of the model's code
            raise not_served(model, " ".join(str(error).split())) from error
        allowed = TOLERANCE_NATS[kv.dtype]
        if not gap <= allowed:
            why = f"log-probabilities through slots are {gap:.2g} nats off transformers' (allowed: {allowed:g})"
            raise not_served(model, why)

    def hidden(self, ids_T: Tensor, step: Step) -> Tensor:
        """Last hidden states (T, E); writes the step's keys and values."""
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
        """Update copies after new weights were copied into the model."""
        if self.fused is not None:
            self.fused.refresh()

    def score_alone(self, token_ids: NDArray[np.int64], first: int, temperature: float) -> NDArray[np.float32]:
        """Log-probabilities from token ``first`` on by `libra.heads.score_alone`."""
        with self._stock():
            return score_alone(self.model, token_ids, first, temperature)

    @contextmanager
    def _stock(self) -> Iterator[None]:
        self.model.set_attn_implementation(plain_attention(self.model.config))
        try:
            yield
        finally:
            self.model.set_attn_implementation(SLOT_ATTENTION)

    @torch.inference_mode()
    def _gap_to_stock(self) -> float:
        vocabulary = int(self.model.config.vocab_size)  # its first ids are special tokens, which text does not have
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

    def project(self, seed: int) -> dict[str, tuple[float, ...]]:
        """The numbers of `libra.projections` for every layer, as the pass uses it."""
        return {
            name: project_layer(name, seed, inputs=layer.inputs, dtype=self.kv.dtype, apply=layer.apply)
            for name, layer in self._layers().items()
        }

    @torch.inference_mode()
    def columns(self, wanted: Mapping[str, tuple[int, ...]]) -> dict[str, NDArray[np.float32]]:
        """Columns for ReadsColumns: outputs for one-hot inputs, which are exact."""
        layers, vectors = self._layers(), self._vectors()
        found: dict[str, NDArray[np.float32]] = {}
        for name, places in wanted.items():
            if name in vectors:
                found[name] = vectors[name].detach()[None].float().cpu().numpy()
            elif name in layers and is_embedding(name):
                found[name] = layers[name].apply(torch.tensor(places)).float().cpu().numpy()
            elif name in layers:
                one_hot = F.one_hot(torch.tensor(places), layers[name].inputs).to(self.kv.dtype)
                found[name] = layers[name].apply(one_hot).float().cpu().numpy()
            else:
                raise EngineError(f"columns: this model has no {name}; it has {', '.join(list(layers)[:4])}, ...")
        return found

    def _layers(self) -> dict[str, UsedLayer]:
        found: dict[str, UsedLayer] = {}
        for name, weight in self.model.named_parameters(remove_duplicate=False):
            if weight.ndim == 2 and name.endswith(".weight"):
                table = is_embedding(name)
                found[name] = UsedLayer(weight.shape[0 if table else 1], _lookup(weight) if table else _linear(weight))
        stock = self.model.get_output_embeddings()
        head = next(name for name, module in self.model.named_modules() if module is stock)
        found[f"{head}.weight"] = UsedLayer(stock.in_features, _linear(self.head.weight))
        for prefix, layer in self._fused_layers():
            joined = zip(_QKV, _blocks(layer, layer.qkv), strict=True)
            gate, up = layer.gate_up.chunk(2)
            for name, matrix in (*joined, ("mlp.gate_proj", gate), ("mlp.up_proj", up)):
                found[f"{prefix}.{name}.weight"] = UsedLayer(matrix.shape[1], _linear(matrix))
            for name, transposed in (("self_attn.o_proj", layer.out_t), ("mlp.down_proj", layer.down_t)):
                found[f"{prefix}.{name}.weight"] = UsedLayer(transposed.shape[0], _product(transposed))
        return found

    def _vectors(self) -> dict[str, Tensor]:
        found = {name: tensor for name, tensor in self.model.named_parameters() if tensor.ndim == 1}
        for prefix, layer in self._fused_layers():
            if layer.q_norm is not None and layer.k_norm is not None:
                query = layer.q_norm.weight * layer.head_dim**-0.5
                if not bool((layer.scale_RD[: layer.heads] == query).all()):
                    found[f"{prefix}.self_attn.q_norm.weight"] = layer.scale_RD[0] * layer.head_dim**0.5
                found[f"{prefix}.self_attn.k_norm.weight"] = layer.scale_RD[-1]
            if layer.qkv_bias is not None:
                for name, bias in zip(_QKV, _blocks(layer, layer.qkv_bias), strict=True):
                    found[f"{prefix}.{name}.bias"] = bias
        return found

    def _fused_layers(self) -> Iterator[tuple[str, FusedLayer]]:
        if self.fused is not None:
            stock = self.model.base_model.layers
            prefix = next(name for name, module in self.model.named_modules() if module is stock)
            for index, layer in enumerate(self.fused.layers):
                yield f"{prefix}.{index}", layer


_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


def _blocks(layer: FusedLayer, joined: Tensor) -> tuple[Tensor, ...]:
    sizes = [heads * layer.head_dim for heads in (layer.heads, layer.kv_heads, layer.kv_heads)]
    return joined.split(sizes)


def _linear(weight: Tensor) -> Apply:
    return lambda x: F.linear(x.to(weight.device), weight)


def _product(transposed: Tensor) -> Apply:
    return lambda x: x.to(transposed.device) @ transposed


def _lookup(table: Tensor) -> Apply:
    return lambda ids: F.embedding(ids.to(table.device), table)

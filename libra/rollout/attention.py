"""The KV cache as slots, and the attention by which stock Hugging Face models use it.

A step is one forward pass over a flat list of T tokens: one per decoding row, a chunk per
prefilling row. Linear layers see one sequence; only attention separates slots. transformers builds
each layer's mask from a function of two positions; a pass with a recording attention collects these
functions, so no list of model families is needed.

1. Position p of slot s holds key and value of token p of one trajectory, or finite numbers that no
   token attends to.
2. A token attends to the positions of its own slot that its layer reads.
3. Decoding reads the slots as one strided view (no gather). Slots within the span that do not
   decode cost attention, so the batch swaps slots to keep the span short.

Shapes: T tokens, R decoding rows, S slots in their span, H heads, K KV heads, G = H / K, C context
read, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from libra.errors import EngineError, ModelError
from libra.model_loader import check_lengths

Reads = Callable[[int, int, Tensor, Tensor], Tensor]
"""``(batch, head, query, key)``: whether the token at ``query`` reads the token at ``key``."""
_NOTES = "libra_notes"
_KINDS = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
_SERVED = {"softcap", "sliding_window"}  # the window is in the mask too
_WITHOUT_EFFECT = {"step", "dropout", "position_ids", "cache_position", "use_cache", "is_causal", "return_dict"}


def reads_before(batch: int, head: int, query: Tensor, key: Tensor) -> Tensor:
    """Full causal attention."""
    return key <= query


def reads_of(model: Any, max_context_tokens: int, heads: tuple[int, int]) -> list[Reads]:
    """The positions that each layer reads; ModelError if slots cannot serve the model. ``heads`` is
    the number of key-value heads and their size. Empty for a model on "meta" whose code needs
    weights."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import causal_mask_function

    found: dict[int, Reads] = {}

    def note(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, scaling: Any = None, **given: Any
    ) -> tuple[Tensor, None]:
        for name, argument in given.items():
            if argument is not None and name not in _SERVED | _WITHOUT_EFFECT and not name.startswith("output_"):
                raise ModelError(f"layer {module.layer_idx} has {name} in its attention")
        shapes = {(each.shape[1], each.shape[3]) for each in (key, value)}
        if shapes != {heads}:
            raise ModelError(f"layer {module.layer_idx} has keys and values of {sorted(shapes)}; the model has {heads}")
        found[module.layer_idx] = reads_before if attention_mask is causal_mask_function else attention_mask
        return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[3]), None

    AttentionInterface.register(_NOTES, note)
    AttentionMaskInterface.register(_NOTES, lambda *_, mask_function, **__: mask_function)
    config = model.config
    check_lengths(config.to_dict(), max_context_tokens, f"{config.name_or_path}/config.json")
    before, why = config._attn_implementation, ""
    model.set_attn_implementation(_NOTES)
    try:
        with torch.inference_mode():
            ids = torch.zeros(1, 4, dtype=torch.long, device=model.device)
            model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
        without = sorted(set(range(config.num_hidden_layers)) - found.keys())
        if without or not all(map(callable, found.values())):
            kinds = getattr(config, "layer_types", None)
            kind = f" ({kinds[without[0]]} in layer_types)" if without and kinds else ""
            why = f"layer {without[0] if without else 0}{kind} has an attention of its own"
    except Exception as error:  # noqa: BLE001  the boundary to the model's code
        why = " ".join(str(error).split())
        if model.device.type == "meta" and not isinstance(error, ModelError):
            others = set(getattr(config, "layer_types", None) or ()) - _KINDS
            if not others:
                return []
            why = f"it has {min(others)} in layer_types"
    finally:
        model.set_attn_implementation(before)
    if why:
        raise not_served(model, why)
    return [found[layer] for layer in range(config.num_hidden_layers)]


def not_served(model: Any, why: str) -> ModelError:
    """The error for a model that slots cannot serve."""
    return ModelError(
        f"rollout.engine: transformers cannot serve {model.config.name_or_path} ({model.config.model_type} in its config.json): "
        f"{why}; type rollout.engine=vllm"
    )


SLOT_ATTENTION = "libra_slots"
"""Name under which the attention is registered with transformers."""
CONTEXT_STEP_TOKENS = 16
"""Decoding reads the longest context in the batch, rounded up to this many positions."""
GROWTH_TOKENS = 32
"""The cache holds a multiple of this many positions per slot."""
WHOLE_FRAC = 0.75
"""Share of the cache's length from which decoding reads all of it (contiguous memory)."""


class SlotKV:
    """Keys and values: per layer one tensor (2, slots, K, context_tokens, D). The tensor is only as
    long as the longest context: closer rows are faster to read."""

    def __init__(
        self, config: Any, slots: int, max_context_tokens: int, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> None:
        self.num_heads: int = config.num_attention_heads
        self.num_kv_heads: int = getattr(config, "num_key_value_heads", None) or self.num_heads
        self.head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // self.num_heads
        self.slots, self.dtype = slots, dtype
        self.positions = torch.arange(_round_up(max_context_tokens, GROWTH_TOKENS), device=device)
        self.context_tokens = 0
        self.reads: list[Reads] = [reads_before] * config.num_hidden_layers
        empty = torch.zeros(2, slots, self.num_kv_heads, 0, self.head_dim, dtype=dtype, device=device)
        self._rebind([empty] * config.num_hidden_layers)
        try:
            self.resize(1)
        except RuntimeError as error:  # torch raises this without memory
            raise EngineError(
                f"rollout.slots: there is no memory for the KV of {slots - 1} trajectories at once, {GROWTH_TOKENS} tokens each; "
                "type a smaller one"
            ) from error

    @property
    def device(self) -> torch.device:
        return self.positions.device

    def reserve(self, num_tokens: int) -> None:
        """Grow to contexts of this length, by at least an eighth, so that copies are rare."""
        if num_tokens > self.context_tokens:
            self.resize(min(max(num_tokens, self.context_tokens * 9 // 8), len(self.positions)))

    def resize(self, num_tokens: int) -> None:
        """Resize to contexts of this length, rounded up; positions beyond it are lost."""
        old, new = self.context_tokens, _round_up(num_tokens, GROWTH_TOKENS)
        if new == old:
            return
        kept = min(old, new)
        for index, layer in enumerate(self.data):
            self.data[index] = layer.new_zeros(2, self.slots, self.num_kv_heads, new, self.head_dim)
            self.data[index][:, :, :, :kept] = layer[:, :, :, :kept]
        self.context_tokens = new
        self._rebind(self.data)

    def _rebind(self, data: list[Tensor]) -> None:
        self.data = data
        self.layers = [(layer[0], layer[1]) for layer in data]
        self.folded = [(keys.flatten(0, 1), values.flatten(0, 1)) for keys, values in self.layers]  # (slots * K, C, D)

    def swap(self, one: int, other: int, num_tokens: int) -> None:
        """Exchange the first ``num_tokens`` positions of two slots, in every layer."""
        for layer in self.data:
            first, second = layer[:, one, :, :num_tokens], layer[:, other, :, :num_tokens]
            kept = first.clone()
            first.copy_(second)
            second.copy_(kept)

    def copy(self, source: int, slots: list[int], num_tokens: int) -> None:
        """Copy the first ``num_tokens`` positions of ``source`` to ``slots``, in every layer."""
        for layer in self.data:
            layer[:, slots, :, :num_tokens] = layer[:, source : source + 1, :, :num_tokens]

    @property
    def layout(self) -> str:
        """The properties that two caches must share to exchange data by `read` and `write`."""
        dtype = str(self.dtype).removeprefix("torch.")
        return f"slots-{len(self.data)}x2x{self.num_kv_heads}x{self.head_dim}-{dtype}"

    def read(self, slot: int, num_tokens: int) -> NDArray[np.uint8]:
        """The first positions of a slot, as bytes of (layers, 2, K, ``num_tokens``, D)."""
        whole = torch.stack([layer[:, slot, :, :num_tokens] for layer in self.data]).cpu()
        return whole.view(torch.uint8).numpy().reshape(-1)

    def write(self, slot: int, num_tokens: int, data: NDArray[np.uint8], held_tokens: int) -> None:
        """Fill the first positions of a slot from a `read` of ``held_tokens`` >= ``num_tokens``."""
        self.reserve(num_tokens)
        shape = (len(self.data), 2, self.num_kv_heads, held_tokens, self.head_dim)
        for layer, held in zip(self.data, torch.from_numpy(data).view(self.dtype).view(shape), strict=True):
            layer[:, slot, :, :num_tokens] = held[:, :, :num_tokens].to(layer.device)

    def clear(self) -> None:
        """Set all to zero: after a fault, NaN must not reach a masked position (0 * NaN is NaN)."""
        self._rebind([torch.zeros_like(layer) for layer in self.data])


def _round_up(num: int, step: int) -> int:
    return -(-num // step) * step


@dataclass(slots=True)
class Chunk:
    """Tokens ``begin:end`` of a step: positions ``start:stop`` of one slot being prefilled."""

    begin: int
    end: int
    slot: int
    start: int
    stop: int
    _masks: dict[Reads, Tensor | None] = field(default_factory=dict)

    def mask(self, reads: Reads, positions: Tensor) -> Tensor | None:
        """The mask of a layer with these ``reads``; None if causal from position 0 on."""
        if reads not in self._masks:
            tokens = positions[: self.stop]
            mask = None
            if self.start or reads is not reads_before:
                mask = masked(reads, tokens[self.start :], tokens)
                if not self.start and torch.equal(mask, torch.ones_like(mask).tril()):
                    mask = None
            self._masks[reads] = mask
        return self._masks[reads]


def masked(reads: Reads, queries_Q: Tensor, keys_C: Tensor) -> Tensor:
    """Whether each position reads each other (Q, C)."""
    return reads(0, 0, queries_Q[:, None], keys_C[None])


@dataclass(slots=True)
class Step:
    """The tokens of one forward pass: where each is written, and which positions it reads. The
    first ``num_rows`` tokens decode (one per slot, ascending); the rest are chunks."""

    kv: SlotKV
    slot_T: Tensor
    position_T: Tensor
    num_rows: int
    chunks: list[Chunk] = field(default_factory=list)
    rows_R: Tensor | None = None  # place of each decoding row in the span; None if the rows fill the span
    masks_S1C: dict[Reads, Tensor] = field(default_factory=dict)  # by what a layer reads
    spans: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # per layer: keys (S*K, D, C), values (S*K, C, D)

    def __post_init__(self) -> None:
        device = self.kv.device
        self.slot_T, self.position_T = self.slot_T.to(device), self.position_T.to(device)

    def view_span(self, slots_R: NDArray[np.int64], positions_R: NDArray[np.int64]) -> None:
        """Prepare decoding: the span of slots, the context of its longest row, and the mask."""
        kv, first = self.kv, int(slots_R[0])
        span = int(slots_R[-1]) - first + 1
        longest = int(positions_R.max()) + 1
        context = _round_up(longest, CONTEXT_STEP_TOKENS)
        if context > WHOLE_FRAC * kv.context_tokens:
            context = kv.context_tokens
        last_S = torch.from_numpy(positions_R).to(kv.device)
        if span != len(slots_R):
            self.rows_R = torch.from_numpy(slots_R - first).to(kv.device)
            last_S = last_S.new_zeros(span).index_copy_(0, self.rows_R, last_S)
        for reads in dict.fromkeys(kv.reads):
            open_SC = torch.zeros(span, context, dtype=kv.dtype, device=kv.device)
            read_SC = masked(reads, last_S, kv.positions[:context])
            self.masks_S1C[reads] = open_SC.masked_fill_(~read_SC, -torch.inf)[:, None]
        begin, end = first * kv.num_kv_heads, (first + span) * kv.num_kv_heads
        self.spans = [(k[begin:end, :context].transpose(1, 2), v[begin:end, :context]) for k, v in kv.folded]


def slot_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    step: Any = None,
    softcap: float | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it: (1, H, T, D) in, (1, T, H, D) out; writes the KV of its
    Step. `reads_of` has checked all further arguments."""
    if step is None:
        raise TypeError("its layers do not hand keywords on to their attention")
    kv, layer = step.kv, module.layer_idx
    keys, values = kv.layers[layer]
    keys[step.slot_T, :, step.position_T] = key[0].transpose(0, 1)
    values[step.slot_T, :, step.position_T] = value[0].transpose(0, 1)
    scale = kv.head_dim**-0.5 if scaling is None else scaling
    return attend(query[0].transpose(0, 1), step, layer, scale, softcap)[None], None


def attend(query_THD: Tensor, step: Step, layer: int, scale: float, softcap: float | None = None) -> Tensor:
    """Attention of each token over its slot (T, H, D); keys and values are already written."""
    kv = step.kv
    parts = [_decode(query_THD[: step.num_rows], step, layer, scale, softcap)] if step.num_rows else []
    keys, values = kv.layers[layer]
    for chunk in step.chunks:
        query_1HQD = query_THD[chunk.begin : chunk.end].transpose(0, 1)[None]
        key_1KCD, value_1KCD = (each[chunk.slot : chunk.slot + 1, :, : chunk.stop] for each in (keys, values))
        if softcap is not None:
            read_QC = masked(kv.reads[layer], kv.positions[chunk.start : chunk.stop], kv.positions[: chunk.stop])
            parts.append(_capped(query_1HQD[0], key_1KCD[0], value_1KCD[0], read_QC, scale, softcap).transpose(0, 1))
            continue
        mask = chunk.mask(kv.reads[layer], kv.positions)
        grouped = kv.num_heads != kv.num_kv_heads
        out = F.scaled_dot_product_attention(
            query_1HQD, key_1KCD, value_1KCD, mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
        )
        parts.append(out[0].transpose(0, 1))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _capped(
    query_HQD: Tensor, key_KCD: Tensor, value_KCD: Tensor, read_QC: Tensor, scale: float, softcap: float
) -> Tensor:
    grouped = query_HQD.unflatten(0, (key_KCD.shape[0], -1))
    scores = softcap * torch.tanh(grouped @ key_KCD[:, None].transpose(2, 3) * scale / softcap)
    weights = scores.masked_fill(~read_QC, -torch.inf).softmax(-1)
    return (weights @ value_KCD[:, None]).flatten(0, 1)


def _decode(query_RHD: Tensor, step: Step, layer: int, scale: float, softcap: float | None) -> Tensor:
    kv = step.kv
    mask_S1C = step.masks_S1C[kv.reads[layer]]
    if step.rows_R is None:
        query_SHD = query_RHD if scale == 1 else query_RHD * scale
    else:
        span = mask_S1C.shape[0]
        query_SHD = query_RHD.new_zeros(span, kv.num_heads, kv.head_dim).index_copy_(0, step.rows_R, query_RHD * scale)
    keys, values = step.spans[layer]
    folded = query_SHD.reshape(-1, kv.num_heads // kv.num_kv_heads, kv.head_dim)
    scores = torch.bmm(folded, keys)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores.view(-1, kv.num_heads, scores.shape[-1]).add_(mask_S1C)
    out_SHD = torch.bmm(torch.softmax(scores, dim=-1), values).view(-1, kv.num_heads, kv.head_dim)
    return out_SHD if step.rows_R is None else out_SHD.index_select(0, step.rows_R)


def register() -> None:
    """Register ``attn_implementation=SLOT_ATTENTION`` with transformers; may be called again."""
    from transformers import AttentionInterface

    AttentionInterface.register(SLOT_ATTENTION, slot_attention)

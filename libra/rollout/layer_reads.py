"""Which positions each layer of a model reads (all before, a sliding window, a chunk), taken from the model's own code.

transformers builds the mask of each layer from a function of two positions. A pass over a few tokens, with an attention that only
takes notes, collects these functions; so no list of families or settings is needed. Any other argument of the attention that slots
do not implement refuses the model before it serves anything.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from libra.errors import ModelError
from libra.model_loader import check_lengths

Reads = Callable[[int, int, Tensor, Tensor], Tensor]
"""``(batch, head, query, key)``: whether the token at ``query`` reads the one at ``key``; transformers' mask function."""
_NOTES = "libra_notes"
_KINDS = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
_SERVED = frozenset({"softcap", "sliding_window"})  # the window is in the mask too
_WITHOUT_EFFECT = frozenset(
    {"step", "dropout", "position_ids", "cache_position", "use_cache", "is_causal", "return_dict"}
)


def reads_before(batch: int, head: int, query: Tensor, key: Tensor) -> Tensor:
    """Full causal attention."""
    return key <= query


def reads_of(model: Any, max_context_tokens: int, heads: tuple[int, int]) -> list[Reads]:
    """What each layer reads; ModelError if slots cannot hold the model.

    ``heads``: key-value heads and their size, the same in every layer. Of a model without weights (on "meta") nothing, if its code
    depends on them.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import causal_mask_function

    found: dict[int, Reads] = {}

    def note(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, scaling: Any = None, **given: Any
    ) -> tuple[Tensor, None]:
        known = _SERVED | _WITHOUT_EFFECT
        odd = [n for n, value in given.items() if value is not None and n not in known and not n.startswith("output_")]
        if odd:
            raise ModelError(f"layer {module.layer_idx} has {odd[0]} in its attention")
        shapes = {(each.shape[1], each.shape[3]) for each in (key, value)}
        if shapes != {heads}:
            raise ModelError(
                f"layer {module.layer_idx} has keys and values of {sorted(shapes)}, where the model has {heads}"
            )
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
    """The error of a model that slots cannot serve."""
    return ModelError(
        f"rollout.engine: transformers cannot serve {model.config.name_or_path} ({model.config.model_type} in its config.json): "
        f"{why}; type rollout.engine=vllm"
    )

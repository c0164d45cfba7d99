"""Named tensors: which of them share storage, and one content digest that trainer, registry and engines agree on."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor


def untied(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Every storage once, and for each name left out the name that holds the same elements.

    The first name in the order of ``tensors`` keeps the elements; in a Hugging Face state dict that is the input
    embedding, and ``lm_head.weight`` is the alias.
    """
    kept: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    holder: dict[tuple[object, ...], str] = {}
    for name, tensor in tensors.items():
        place = (str(tensor.device), tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
        if tensor.numel() and place in holder:
            aliases[name] = holder[place]
        else:
            holder[place] = name
            kept[name] = tensor
    return kept, aliases


def digest(tensors: Mapping[str, Tensor]) -> str:
    """Hexadecimal blake2b-128 over names, dtypes, shapes and elements, in the order of the names.

    Tied names are hashed once (see `untied`), so a tied model has the digest of what is written to disk.
    """
    kept, _ = untied(tensors)
    state = hashlib.blake2b(digest_size=16)
    for name in sorted(kept):
        tensor = kept[name].detach().cpu().contiguous()
        state.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)};".encode())
        state.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return state.hexdigest()

"""Named tensors: shared storage, and the digest that trainer, registry and engines agree on."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from libra.errors import ConfigError
from libra.tensor_files import hash_parts


def compute_device(wanted: str) -> torch.device:
    """The device of this process; ``auto`` is the first visible GPU, else the CPU. ConfigError for
    ``cuda`` without a GPU."""
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if wanted not in ("auto", "cuda"):
        raise ConfigError(f"cluster.device: got {wanted!r}; allowed are auto, cpu and cuda")
    if not torch.cuda.is_available():
        raise ConfigError(
            "cluster.device: cuda, but torch sees no GPU here (driver, CUDA_VISIBLE_DEVICES, or a build of torch for CPUs); "
            "type cluster.device=auto"
        )
    return torch.device("cuda", 0)


def untied(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Every storage once under its first name, and for each other name (alias) that first name. In
    a Hugging Face state dict the input embedding is first, and ``lm_head.weight`` is the alias."""
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
    """`libra.tensor_files.hash_parts` over names, dtypes, shapes and elements, in the order of the
    names. Tied names are hashed once (see `untied`), so a tied model has the digest of its file."""
    kept, _ = untied(tensors)
    labels = {f"{name}:{kept[name].dtype}:{tuple(kept[name].shape)};": kept[name] for name in sorted(kept)}
    return hash_parts((label, _elements(tensor)) for label, tensor in labels.items())


def _elements(tensor: Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data

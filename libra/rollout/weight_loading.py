"""Weights on disk and the module they belong to: loading a model, and copying a version into it in place.

Invariants
1. ``copy_weights`` changes nothing where it raises: names and shapes are checked before the first byte is copied.
2. Tensors that share storage (a head tied to the embedding) need one of their names in the file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from libra.errors import ModelError, WeightsError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
WEIGHTS_FILE = "model.safetensors"


def named_weights(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter and saved buffer under every name it has, tied ones included."""
    return dict(model.state_dict(keep_vars=True))


def copy_weights(model: nn.Module, directory: Path) -> None:
    """Copy ``directory/model.safetensors`` into the model, tensor by tensor, casting to its dtype.

    Raises
    ------
    WeightsError
        The file is missing or unreadable, or its names or shapes are not the model's.
    """
    path = Path(directory) / WEIGHTS_FILE
    own = named_weights(model)
    try:
        with safe_open(path, framework="pt") as file:
            names = set(file.keys())
            _check_names(own, names, path)
            wrong = [
                f"{name}: file {tuple(file.get_slice(name).get_shape())}, model {tuple(own[name].shape)}"
                for name in sorted(names)
                if tuple(file.get_slice(name).get_shape()) != tuple(own[name].shape)
            ]
            if wrong:
                raise WeightsError(f"{path}: {len(wrong)} tensors of another shape: {_first(wrong)}")
            sources: dict[int, str] = {}
            for name in sorted(names):
                twin = sources.setdefault(own[name].data_ptr(), name)
                if twin != name and not torch.equal(file.get_tensor(twin), file.get_tensor(name)):
                    raise WeightsError(f"{path}: {name} and {twin} differ, but this model ties them into one tensor")
            with torch.no_grad():
                for name in sources.values():
                    own[name].copy_(file.get_tensor(name))
    except (SafetensorError, OSError) as error:
        raise WeightsError(f"{path}: cannot be read as safetensors: {error}") from error


def _check_names(own: dict[str, Tensor], names: set[str], path: Path) -> None:
    unknown = sorted(names - own.keys())
    tied = {own[name].data_ptr() for name in names & own.keys()}
    missing = sorted(name for name, tensor in own.items() if name not in names and tensor.data_ptr() not in tied)
    if missing or unknown:
        raise WeightsError(
            f"{path}: not this model's weights: {len(missing)} missing ({_first(missing)}), "
            f"{len(unknown)} unknown ({_first(unknown)})"
        )


def _first(items: list[str], count: int = 4) -> str:
    return ", ".join(items[:count]) + (", ..." if len(items) > count else "") if items else "none"


def load_causal_lm(model_dir: Path, dtype: str, attention: str) -> Any:
    """A Hugging Face causal LM in evaluation mode, with the named attention; ModelError where it cannot be served."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    if dtype not in DTYPES:
        raise ModelError(f"dtype: got {dtype!r}; allowed: {', '.join(DTYPES)}")
    if not (Path(model_dir) / "config.json").is_file():
        raise ModelError(f"{model_dir}: no config.json there; give a directory in Hugging Face layout")
    transformers_logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=DTYPES[dtype], attn_implementation=attention)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise ModelError(f"{model_dir}: transformers cannot load this as a causal LM: {error}") from error
    model.eval().requires_grad_(False)
    kinds = set(getattr(model.config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        raise ModelError(
            f"{model_dir}: layers of kind {sorted(kinds)}; slots hold full attention only "
            "(for sliding or linear attention use another engine)"
        )
    return model

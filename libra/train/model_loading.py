"""The model of a replica, from a directory in Hugging Face layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from libra.errors import ModelError
from libra.train.float64_mode import keep_double


def load_model(model_dir: Path, dtype: torch.dtype) -> Any:
    """The causal model of a directory, dropout off, attention by torch's scaled dot product."""
    from transformers import AutoModelForCausalLM  # here: the driver, which reads checkpoints only, does without it

    if not (model_dir / "config.json").is_file():
        raise ModelError(f"model: {model_dir} holds no config.json; type model.path=DIR of a Hugging Face model")
    try:
        model = AutoModelForCausalLM.from_pretrained(
            model_dir, dtype=dtype, attn_implementation="sdpa", local_files_only=True
        )
    except (OSError, ValueError, RuntimeError, KeyError) as fault:
        raise ModelError(f"model: {model_dir} cannot be loaded as a causal language model: {fault}") from fault
    if dtype is torch.float64:
        keep_double(model)
    return model.eval()

"""The model of a replica, from a directory in Hugging Face layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from libra.model_loader import build_model, plain_attention
from libra.train.float64_mode import keep_double


def load_model(model_dir: Path, dtype: torch.dtype, loader: str | None = None) -> Any:
    """The causal model of a directory, dropout off, attention by torch's scaled dot product; ModelError as `build_model`."""
    model = build_model(loader, model_dir, dtype=dtype, attention="sdpa")
    if (attention := plain_attention(model.config)) != "sdpa":
        model.set_attn_implementation(attention)
    if dtype is torch.float64:
        keep_double(model)
    return model.eval()

"""Adapters in the format of `peft`: ``adapter/`` in a checkpoint, for use with the model that the run began with.

The checkpoint itself holds the merged model, so nothing needs this to use it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from libra.train.low_rank import LORA_A, LORA_B, LowRankWeights

ADAPTER_DIR = "adapter"


def adapter_config(adapters: LowRankWeights, base: str) -> str:
    """The content of ``adapter_config.json``; ``base`` is the model that the adapters belong to."""
    layers = sorted({name.removesuffix(f".weight.{LORA_A}") for name in adapters.tensors if name.endswith(LORA_A)})
    values = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": adapters.rank,
        "lora_alpha": adapters.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": layers,
    }
    return json.dumps(values, indent=2) + "\n"


def write_adapter(directory: Path, config: str, tensors: Mapping[str, Tensor]) -> None:
    """Write ``directory``, which is made: ``config`` and the adapters, by the names of `LowRankWeights.tensors`."""
    directory.mkdir()
    (directory / "adapter_config.json").write_text(config, encoding="utf-8")
    renamed = {}
    for name, tensor in tensors.items():
        layer, _, kind = name.rpartition(".")
        assert kind in (LORA_A, LORA_B), name
        renamed[f"base_model.model.{layer.removesuffix('.weight')}.{kind}.weight"] = tensor.contiguous()
    save_file(renamed, directory / "adapter_model.safetensors", metadata={"format": "pt"})

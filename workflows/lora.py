"""LoRA: adapters of low rank are trained, merged, verified and served. ``python workflows/lora.py [section.key=value ...]``

CHECKPOINT holds the merged model, and CHECKPOINT/adapter the adapters in the format of `peft`.
"""

from __future__ import annotations

import sys

import libra
from libra.config import typed_settings

LORA = {
    "trainer__lora_rank": 8,
    "trainer__lora_args": {"alpha": 16.0, "targets": ["q_proj", "v_proj", "down_proj"]},
}

if __name__ == "__main__":
    settings = {"run__iterations": 5, "trainer__lr": 2e-3} | typed_settings(sys.argv[1:])
    summary = libra.train(**LORA, **settings)
    print(summary, f"adapters: {summary.checkpoint}/adapter", sep="\n")

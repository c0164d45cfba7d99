"""LoRA: adapters of low rank are trained, merged, verified and served. ``python workflows/lora.py [section__name=value ...]``

CHECKPOINT holds the merged model, and CHECKPOINT/adapter the adapters in the format of `peft`.
"""

from __future__ import annotations

import sys

import yaml

import libra

LORA = {
    "trainer__lora_rank": 8,
    "trainer__lora_alpha": 16.0,
    "trainer__lora_targets": ["q_proj", "v_proj", "down_proj"],
}

if __name__ == "__main__":
    given = (argument.split("=", 1) for argument in sys.argv[1:])
    settings = {"run__iterations": 5, "trainer__lr": 2e-3} | {name: yaml.safe_load(value) for name, value in given}
    summary = libra.train(**LORA, **settings)
    print(summary, f"adapters: {summary.checkpoint}/adapter", sep="\n")

"""Random models and random trajectories, for benchmarks that need their size only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from libra.types import EndReason, Prompt, Trajectory, TrajectoryId


def save_random_model(config: Any, directory: Path, *, dtype: str = "float32", device: str = "cpu") -> None:
    """Save a random causal model of a transformers configuration in Hugging Face layout; seed 0."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    model.save_pretrained(directory, max_shard_size="20GB")


def random_trajectories(
    count: int, tokens: int, prompt_tokens: int, vocab: int, iteration: int = 0
) -> list[Trajectory]:
    """Random tokens: a prompt and one generation each, with advantages of both signs."""
    made = []
    for index in range(count):
        rng = np.random.default_rng((iteration, index))
        is_action = np.arange(tokens) >= prompt_tokens
        versions = np.where(is_action, iteration, -1).astype(np.int32)
        made.append(
            Trajectory(
                trajectory_id=TrajectoryId(iteration, index, 0), prompt=Prompt("random", ()),
                token_ids=rng.integers(0, vocab, tokens).astype(np.int32), is_action=is_action,
                behaviour_logprob=np.where(is_action, -np.log(vocab), 0).astype(np.float32), weight_version=versions,
                kv_version=versions.copy(), turns=[], end_reason=EndReason.ANSWERED, reward=0.0,
                advantage=1.0 if index % 2 else -1.0,
            )
        )  # fmt: skip
    return made

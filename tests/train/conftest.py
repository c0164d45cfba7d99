"""A random Qwen3 of a few thousand parameters, made once, and trajectories to train it on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from libra.train import Replica, Sample, TrainSettings, pack
from libra.types import EndReason, Prompt, Trajectory, TrajectoryId

VOCABULARY = 48


@pytest.fixture(scope="session")
def golden(repository: Path) -> Callable[[str], list[tuple[dict[str, Any], dict[str, torch.Tensor]]]]:
    """Cases of one .npz of tests/golden: (parameters, arrays by name)."""

    def cases(name: str) -> list[tuple[dict[str, Any], dict[str, torch.Tensor]]]:
        archive = np.load(repository / "tests" / "golden" / f"{name}.npz")
        result = []
        for index, parameters in enumerate(json.loads(str(archive["params_json"]))):
            prefix = f"c{index}_"
            names = [key for key in archive.files if key.startswith(prefix)]
            result.append((parameters, {key.removeprefix(prefix): torch.as_tensor(archive[key]) for key in names}))
        return result

    return cases


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of the model: two layers, hidden size 32, tied embeddings."""
    directory = tmp_path_factory.mktemp("model")
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=True,
        max_position_embeddings=512,
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():  # the initial 0.02 gives nearly uniform logits, where many mistakes would not show
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=0.3)
    model.save_pretrained(directory)
    (directory / "tokenizer.json").write_text("{}", encoding="utf-8")
    return directory


@pytest.fixture
def trajectory() -> Callable[..., Trajectory]:
    """Maker of one trajectory: prompt, generation, observation, generation, ... of given lengths, random tokens."""

    def make(
        seed: int, advantage: float = 1.0, lengths: tuple[int, ...] = (5, 4, 3, 6), version: int = 0, **changes: Any
    ) -> Trajectory:
        rng = np.random.default_rng(seed)
        num_tokens = sum(lengths)
        is_action = np.concatenate([np.full(length, part % 2 == 1) for part, length in enumerate(lengths)])
        versions = np.where(is_action, version, -1).astype(np.int32)
        return Trajectory(
            trajectory_id=TrajectoryId(0, 0, seed),
            prompt=Prompt("p", ()),
            token_ids=rng.integers(0, VOCABULARY, num_tokens).astype(np.int32),
            is_action=is_action,
            behaviour_logprob=np.where(is_action, rng.uniform(-4, -0.5, num_tokens), 0).astype(np.float32),
            weight_version=versions,
            kv_version=versions.copy(),
            turns=[],
            end_reason=EndReason.ANSWERED,
            reward=advantage,
            advantage=advantage,
            **changes,
        )

    return make


@pytest.fixture
def batch(trajectory: Callable[..., Trajectory]) -> list[Trajectory]:
    """Twelve trajectories of 7 to 40 tokens with advantages of both signs."""
    rng = np.random.default_rng(1)
    made = []
    for index in range(12):
        lengths = tuple(int(n) for n in rng.integers(1, 11, 2 * int(rng.integers(1, 3))))
        made.append(trajectory(index, float(rng.normal()), (lengths[0] + 4, *lengths[1:])))
    return made


@pytest.fixture
def replica(model_dir: Path) -> Callable[..., Replica]:
    """Maker of replicas of the model; keyword arguments are those of TrainSettings, ``dtype`` and ``seed``."""

    def make(dtype: torch.dtype = torch.float32, seed: int = 0, **settings: Any) -> Replica:
        return Replica(model_dir, TrainSettings(**{"lr": 1e-3, **settings}), dtype=dtype, seed=seed)

    return make


@pytest.fixture
def score() -> Callable[[Replica, list[Sample]], list[torch.Tensor]]:
    """Log-probabilities of the actions of each sample, each alone in a forward pass."""

    def logprobs(replica: Replica, samples: list[Sample]) -> list[torch.Tensor]:
        result = []
        for sample in samples:
            (one,) = pack([sample], max_row_tokens=1, micro_batch_tokens=10**6)
            with torch.no_grad():
                logits = replica.model(input_ids=one.token_ids_RW).logits[0]
            result.append(logits.log_softmax(-1)[one.action_at_N].gather(-1, one.target_N[:, None])[:, 0])
        return result

    return logprobs

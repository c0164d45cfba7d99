"""Tiny random models, references computed with plain transformers, and engines that close themselves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from libra.rollout.transformers_engine import TransformersEngine
from libra.types import TurnRequest

VOCAB = 48


def _save(directory: Path, family: str, seed: int) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    shape = {
        "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
        "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0, "initializer_range": 0.2,
    }  # fmt: skip
    if family == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**shape, head_dim=16, tie_word_embeddings=True))
    elif family == "qwen2":
        model = Qwen2ForCausalLM(Qwen2Config(**shape, tie_word_embeddings=True))
    else:
        model = LlamaForCausalLM(LlamaConfig(**shape, tie_word_embeddings=False))
    for name, parameter in model.named_parameters():  # zeros and ones would hide a bias or a norm left out
        if name.endswith(".bias"):
            parameter.data.normal_(std=0.5)
        elif "norm" in name:
            parameter.data.uniform_(0.5, 1.5)
    model.save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``make_model(family, seed)``: a directory with a random two-layer model, made once per session."""
    made: dict[tuple[str, int], Path] = {}

    def make(family: str = "qwen3", seed: int = 0) -> Path:
        if (family, seed) not in made:
            made[family, seed] = _save(tmp_path_factory.mktemp(f"{family}-{seed}"), family, seed)
        return made[family, seed]

    return make


@pytest.fixture(scope="session")
def reference() -> Callable[[Path], torch.nn.Module]:
    """``reference(directory)``: the same model in plain transformers with its own sdpa attention."""
    from transformers import AutoModelForCausalLM

    loaded: dict[Path, torch.nn.Module] = {}

    def load(directory: Path) -> torch.nn.Module:
        if directory not in loaded:
            loaded[directory] = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="sdpa").eval()
        return loaded[directory]

    return load


@pytest.fixture(scope="session")
def reference_logprobs(reference: Callable[[Path], torch.nn.Module]) -> Callable[..., np.ndarray]:
    """``reference_logprobs(directory, context, new)``: log-probability of each new token by one full forward pass."""

    def score(directory: Path, context: np.ndarray, new: np.ndarray, temperature: float = 1.0) -> np.ndarray:
        ids = torch.from_numpy(np.concatenate([context, new]).astype(np.int64))[None]
        with torch.no_grad():
            logits = reference(directory)(ids).logits[0, len(context) - 1 : -1]
        table = torch.log_softmax(logits.float() / temperature, -1)
        return table.gather(1, ids[0, len(context) :, None])[:, 0].numpy()

    return score


@pytest.fixture
def make_engine(make_model: Callable[..., Path]) -> Callable[..., TransformersEngine]:
    """``make_engine(slots=...)``: an engine that is not started; tests start and close it in their own event loop."""

    def make(
        directory: Path | None = None, *, slots: int = 8, max_context_tokens: int = 128, **more: Any
    ) -> TransformersEngine:
        return TransformersEngine(
            directory or make_model(), slots=slots, max_context_tokens=max_context_tokens, threads=1, **more
        )

    return make


@pytest.fixture(scope="session")
def make_request() -> Callable[..., TurnRequest]:
    """``make_request("a", length=9, new=5)``: a request with a random context, the same for the same name."""

    def make(name: str, *, length: int = 9, new: int = 8, context: np.ndarray | None = None, **fields) -> TurnRequest:
        if context is None:
            rng = np.random.default_rng([ord(letter) for letter in name])
            context = rng.integers(0, VOCAB, length).astype(np.int32)
        return TurnRequest(name, fields.pop("turn", 0), np.asarray(context, np.int32), new, **fields)

    return make

"""Random models for tests of engines, their outputs under plain transformers, and requests."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from libra.types import TurnRequest

VOCAB = 48


@dataclass
class Models:
    """Directories of random two-layer float32 models with a tied head: two of one shape, and one of
    another."""

    directory: Path
    _loaded: dict[Path, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.first, self.second = self._save("first", 0), self._save("second", 1)
        self.other = self._save("other", 2, hidden_size=96)

    def _save(self, name: str, seed: int, **changed: Any) -> Path:
        import torch
        from transformers import Qwen3Config, Qwen3ForCausalLM

        torch.manual_seed(seed)
        shape = {
            "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 32,
            "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024, "bos_token_id": None,
            "eos_token_id": None, "pad_token_id": 0, "initializer_range": 0.2, "tie_word_embeddings": True,
        }  # fmt: skip
        model = Qwen3ForCausalLM(Qwen3Config(**(shape | changed)))
        for parameter_name, parameter in model.named_parameters():  # ones would hide a missing norm
            if "norm" in parameter_name:
                parameter.data.uniform_(0.5, 1.5)
        model.save_pretrained(self.directory / name)
        return self.directory / name

    def logits(self, directory: Path, context: NDArray[np.int32], new: NDArray[np.int32]) -> Any:
        """Logits (T, VOCAB) that plain transformers gives before each new token."""
        import torch
        from transformers import AutoModelForCausalLM

        if directory not in self._loaded:
            self._loaded[directory] = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="sdpa").eval()
        ids = torch.from_numpy(np.concatenate([context, new]).astype(np.int64))[None]
        with torch.no_grad():
            return self._loaded[directory](ids).logits[0, len(context) - 1 : -1].float()

    def logprobs(
        self, directory: Path, context: NDArray[np.int32], new: NDArray[np.int32], temperature: float = 1.0
    ) -> NDArray[np.float32]:
        """Log-probability (T,) that plain transformers gives each new token."""
        import torch

        table = torch.log_softmax(self.logits(directory, context, new) / temperature, -1)
        found: NDArray[np.float32] = table.gather(1, torch.from_numpy(new.astype(np.int64))[:, None])[:, 0].numpy()
        return found


def ask(name: str, *, length: int = 40, new: int = 8, context: Any = None, **fields: Any) -> TurnRequest:
    """A request of trajectory ``name``; its context is random, the same for the same name."""
    if context is None:
        context = np.random.default_rng([ord(letter) for letter in name]).integers(0, VOCAB, length)
    return TurnRequest(name, fields.pop("turn", 0), np.asarray(context, np.int32), new, **fields)

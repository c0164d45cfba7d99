"""Sizes of dense decoder models, read from Hugging Face's ``config.json``."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from libra.errors import ConfigError, ModelError

_FOLDER = Path(__file__).parent / "models"
DENSE_TYPES = ("llama", "qwen2", "qwen3", "mistral")
"""Values of ``model_type`` with layers of attention and one gated feed-forward network."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a dense decoder with grouped-query attention and a gated feed-forward network.

    ``tied``: input and output embeddings share a matrix. ``bytes_per_weight``: of weights,
    activations and KV. ``qk_norm``: queries and keys are normalised per head (Qwen3), which costs
    training activations.
    """

    name: str
    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    tied: bool = False
    bytes_per_weight: int = 2
    qk_norm: bool = False

    @property
    def layer_params(self) -> int:
        """Parameters of one layer's matrices; norms, a ten-thousandth of them, are left out."""
        attention = self.hidden * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        return attention + 3 * self.hidden * self.ffn

    @property
    def num_params(self) -> int:
        """Parameters of the model."""
        return self.num_layers * (self.layer_params + 2 * self.hidden) + self.vocab * self.hidden * (2 - self.tied)

    def kv_heads_per_gpu(self, tp: int) -> int:
        """Key-value heads per GPU, at least one: heads are replicated if tp exceeds their number."""
        return max(1, self.num_kv_heads // tp)

    def kv_bytes_per_token(self, tp: int) -> int:
        """KV bytes per token on each of ``tp`` GPUs."""
        return 2 * self.num_layers * self.kv_heads_per_gpu(tp) * self.head_dim * self.bytes_per_weight

    def weight_bytes(self, tp: int) -> float:
        """Bytes of weights on each of ``tp`` GPUs."""
        return self.num_params * self.bytes_per_weight / tp

    def check_tp(self, tp: int) -> None:
        """ConfigError if heads cannot be divided among ``tp`` GPUs."""
        if tp < 1 or self.num_heads % tp or (tp > self.num_kv_heads and tp % self.num_kv_heads):
            raise ConfigError(
                f"tp: got {tp} for {self.name} with {self.num_heads} heads and {self.num_kv_heads} key-value heads; "
                "give a divisor of the heads that divides, or is a multiple of, the key-value heads"
            )


def shape_from_config(config: Mapping[str, Any], name: str = "") -> ModelShape:
    """The shape in a ``config.json``; ModelError if not a model of `DENSE_TYPES`, or a size is missing."""
    kind = config.get("model_type")
    label = name or str(config.get("_name_or_path") or kind)
    experts = [key for key in ("num_experts", "num_local_experts", "n_routed_experts") if config.get(key)]
    if experts:
        raise ModelError(
            f"model {label}: {experts[0]}={config[experts[0]]}; the cost model supports dense models only, not mixtures "
            "of experts: their steps read the experts that the batch selects, which no roofline here describes"
        )
    if kind not in DENSE_TYPES:
        raise ModelError(f"model {label}: model_type is {kind!r}; the cost model supports {', '.join(DENSE_TYPES)}")
    try:
        heads = int(config["num_attention_heads"])
        hidden = int(config["hidden_size"])
        return ModelShape(
            name=label,
            num_layers=int(config["num_hidden_layers"]),
            hidden=hidden,
            num_heads=heads,
            num_kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or hidden // heads),
            ffn=int(config["intermediate_size"]),
            vocab=int(config["vocab_size"]),
            tied=bool(config.get("tie_word_embeddings", False)),
            qk_norm=kind == "qwen3",
        )
    except KeyError as error:
        raise ModelError(f"model {label}: its config.json has no {error.args[0]}") from error


def shape_digest(shape: ModelShape) -> str:
    """SHA-256 of a model's sizes without its name, equal for trained copies."""
    sizes = {key: value for key, value in asdict(shape).items() if key != "name"}
    return hashlib.sha256(json.dumps(sizes, sort_keys=True).encode()).hexdigest()


def known_models() -> tuple[str, ...]:
    """Names of the package's shapes."""
    return tuple(path.stem for path in sorted(_FOLDER.glob("*.json")))


def load_shape(model: str | Path | Mapping[str, Any]) -> ModelShape:
    """Shape of a model: directory with ``config.json``, the file, its fields, or a known name.

    A Hugging Face id is known by its last part (``Qwen/Qwen3-14B``); nothing is downloaded.
    """
    if isinstance(model, Mapping):
        return shape_from_config(model)
    path = Path(model)
    if path.is_dir():
        path = path / "config.json"
    name = path.parent.name
    if path.suffix != ".json" or not path.is_file():
        name = str(model).rsplit("/", maxsplit=1)[-1].removesuffix("-hf")
        path = next((p for p in _FOLDER.glob("*.json") if p.stem.lower() == name.lower()), path)
    if not path.is_file() or path.suffix != ".json":
        raise ModelError(
            f"model {str(model)!r}: no directory with a config.json and no known name; known are "
            f"{', '.join(known_models())}; else download its config.json and type that path"
        )
    return shape_from_config(json.loads(path.read_text()), name)

"""Weights on disk: loading a model, checking a version's file, and copying it into place.

1. `ExpectedWeights.check` reads only names, shapes and tied tensors, so a file that does not fit is
   refused before anything changes.
2. A file needs only one of several tied tensors (a head tied to the embedding); if it has several,
   they are equal.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from libra.errors import ModelError, WeightsError
from libra.model_loader import build_model
from libra.projections import EMBEDDING_ENDINGS
from libra.rollout.attention import SlotKV, reads_of
from libra.tensors import untied

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
WEIGHTS_FILE = "model.safetensors"
HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class ExpectedWeights:
    """Names and shapes of a model's tensors, and ``tied`` from alias to first name."""

    shapes: Mapping[str, tuple[int, ...]]
    tied: Mapping[str, str]

    @classmethod
    def of_model(cls, model: nn.Module) -> ExpectedWeights:
        """Every parameter and saved buffer of a loaded model."""
        state = model.state_dict()
        return cls({name: tuple(tensor.shape) for name, tensor in state.items()}, untied(state)[1])

    @classmethod
    def of_directory(cls, model_dir: Path, *, tied: bool) -> ExpectedWeights:
        """Tensors of a model directory, with ``tied`` head or not; or ModelError."""
        shapes: dict[str, tuple[int, ...]] = {}
        try:
            for path in sorted(Path(model_dir).glob("*.safetensors")):
                with safe_open(path, framework="pt") as file:
                    shapes |= _shapes(file)
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{model_dir}: its weights cannot be read as safetensors: {error}") from error
        if not shapes:
            raise ModelError(
                f"{model_dir}: no *.safetensors there; the vllm engine takes new versions in that format only"
            )
        embedding = next((name for name in shapes if name.endswith(EMBEDDING_ENDINGS)), None)
        if not tied or embedding is None:
            return cls(shapes, {})
        return cls(shapes | {HEAD: shapes[embedding]}, {HEAD: embedding})

    def check(self, directory: Path) -> Path:
        """The weights file of a version; WeightsError if it is unreadable or does not fit."""
        path = Path(directory) / WEIGHTS_FILE
        with _opened(path) as file:
            self._check(file, path)
        return path

    def _check(self, file: Any, path: Path) -> None:
        found = _shapes(file)
        unknown = sorted(found.keys() - self.shapes.keys())
        there = {self.tied.get(name, name) for name in found}
        missing = sorted(name for name in self.shapes if name not in self.tied and name not in there)
        if missing or unknown:
            raise WeightsError(
                f"{path}: not this model's weights: {len(missing)} missing ({_first(missing)}), "
                f"{len(unknown)} unknown ({_first(unknown)})"
            )
        differing = sorted(name for name, shape in found.items() if shape != self.shapes[name])
        if wrong := [f"{name}: file {found[name]}, model {self.shapes[name]}" for name in differing]:
            raise WeightsError(f"{path}: {len(wrong)} tensors of another shape: {_first(wrong)}")
        for name, twin in self.tied.items():
            if {name, twin} <= found.keys() and not torch.equal(file.get_tensor(name), file.get_tensor(twin)):
                raise WeightsError(f"{path}: {twin} and {name} differ, but this model ties them into one tensor")


def copy_weights(model: nn.Module, directory: Path) -> None:
    """Copy ``directory/model.safetensors`` into the model, tensor by tensor, casting to its dtype.
    WeightsError, before any copy, if the file is unreadable, or its names or shapes do not fit."""
    expected, own, path = ExpectedWeights.of_model(model), model.state_dict(), Path(directory) / WEIGHTS_FILE
    with _opened(path) as file, torch.no_grad():  # once: a version may be dropped at any time, an open file stays
        expected._check(file, path)
        for name in file.keys():  # noqa: SIM118  a safetensors file is not a mapping
            own[name].copy_(file.get_tensor(name))


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise WeightsError(f"{path}: cannot be read as safetensors: {error}") from error


def _shapes(file: Any) -> dict[str, tuple[int, ...]]:
    return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


def _first(items: list[str], count: int = 4) -> str:
    return ", ".join(items[:count]) + (", ..." if len(items) > count else "") if items else "none"


def check_served(directory: Path, max_context_tokens: int) -> None:
    """ModelError or ConfigError if slots cannot serve a model; reads no weights."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()  # the refusal is one line
    try:
        with torch.device("meta"):
            config = AutoConfig.from_pretrained(directory, local_files_only=True)
            model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
            kv = SlotKV(model.config, 1, max_context_tokens, torch.float32, "meta")
    except Exception:  # noqa: BLE001  the boundary to the model's code; a worker that loads it tells
        return
    reads_of(model, max_context_tokens, (kv.num_kv_heads, kv.head_dim))


def load_causal_lm(model_dir: Path, dtype: str, attention: str, loader: str | None = None) -> Any:
    """A Hugging Face causal LM in evaluation mode, with the named attention; or ModelError."""
    from transformers.utils import logging as transformers_logging

    if dtype not in DTYPES:
        raise ModelError(f"dtype: got {dtype!r}; allowed: {', '.join(DTYPES)}")
    transformers_logging.disable_progress_bar()
    try:
        model = build_model(loader, Path(model_dir), dtype=DTYPES[dtype], attention=attention)
    except ModelError as error:
        if isinstance(error.__cause__, KeyError):  # a family without transformers' interface looks up the attention
            raise ModelError(f"{error} in its attention; type rollout.engine=vllm") from error
        raise
    model.eval().requires_grad_(False)
    return model

"""Whether a weights file is one that a model can be given, told before anything is changed.

vLLM changes its modules tensor by tensor as it reads, and leaves out what it does not know. So names and shapes are compared
here first, with those of the directory that the engine was started from.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from libra.errors import ModelError, WeightsError
from libra.rollout.weight_loading import WEIGHTS_FILE

HEAD = "lm_head.weight"
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight")
_MAX_HEADER_BYTES = 100 * 2**20


@dataclass(frozen=True, slots=True)
class ExpectedWeights:
    """Names and shapes of a model's tensors.

    Attributes
    ----------
    shapes : mapping of str to tuple of int
    tied_to : str or None
        Name of the embedding that the head shares its weights with, None where the head has its own.
    """

    shapes: Mapping[str, tuple[int, ...]]
    tied_to: str | None

    @classmethod
    def of(cls, model_dir: Path, *, tied: bool) -> ExpectedWeights:
        """Those of a model directory; ModelError where it holds no readable safetensors."""
        shapes: dict[str, tuple[int, ...]] = {}
        files = sorted(Path(model_dir).glob("*.safetensors"))
        try:
            for path in files:
                shapes |= _header(path)
        except (OSError, ValueError) as error:
            raise ModelError(f"{model_dir}: its weights cannot be read as safetensors: {error}") from error
        if not shapes:
            raise ModelError(
                f"{model_dir}: no *.safetensors there; the vllm engine takes new versions in that format only"
            )
        found = [name for name in shapes if name.endswith(_EMBEDDINGS)]
        return cls(shapes, (found[0] if found else None) if tied else None)

    def check(self, directory: Path) -> Path:
        """The weights file of a version; WeightsError where it is unreadable or not this model's."""
        path = Path(directory) / WEIGHTS_FILE
        try:
            given = _header(path)
        except (OSError, ValueError) as error:
            raise WeightsError(f"{path}: cannot be read as safetensors: {error}") from error
        twins = {HEAD, self.tied_to} if self.tied_to is not None else set()
        unknown = sorted(set(given) - set(self.shapes) - twins)
        missing = sorted(set(self.shapes) - set(given) - (twins if twins & set(given) else set()))
        if missing or unknown:
            raise WeightsError(
                f"{path}: not this model's weights: {len(missing)} missing ({_first(missing)}), "
                f"{len(unknown)} unknown ({_first(unknown)})"
            )
        wrong = [
            f"{name}: file {shape}, model {self._shape(name)}"
            for name, shape in sorted(given.items())
            if shape != self._shape(name)
        ]
        if wrong:
            raise WeightsError(f"{path}: {len(wrong)} tensors of another shape: {_first(wrong)}")
        if self.tied_to is not None and twins <= set(given):
            self._check_twins(path)
        return path

    def _shape(self, name: str) -> tuple[int, ...]:
        if name in self.shapes:
            return self.shapes[name]
        assert self.tied_to is not None, f"{name} was checked to be known"
        return self.shapes[HEAD if name == self.tied_to else self.tied_to]

    def _check_twins(self, path: Path) -> None:
        import torch
        from safetensors import safe_open

        assert self.tied_to is not None
        with safe_open(path, framework="pt") as file:
            if not torch.equal(file.get_tensor(HEAD), file.get_tensor(self.tied_to)):
                raise WeightsError(
                    f"{path}: {HEAD} and {self.tied_to} differ, but this model ties them into one tensor"
                )


def _header(path: Path) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a safetensors file, whose size must be what its header says; ValueError, OSError."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8).ljust(8, b"\xff"))
        if length > _MAX_HEADER_BYTES:
            raise ValueError(f"{path.name} has no header of a plausible size")
        header = json.loads(file.read(length))
    tensors = {name: facts for name, facts in header.items() if name != "__metadata__"}
    end = max((facts["data_offsets"][1] for facts in tensors.values()), default=0)
    if path.stat().st_size != 8 + length + end:
        raise ValueError(f"{path.name} has {path.stat().st_size} bytes, and its header speaks of {8 + length + end}")
    return {name: tuple(facts["shape"]) for name, facts in tensors.items()}


def _first(items: list[str], count: int = 4) -> str:
    return ", ".join(items[:count]) + (", ..." if len(items) > count else "") if items else "none"

"""The model of a service: in host memory as long as a run has the service, and on a device while there is room.

Invariants
----------
1. Host memory has the weights as they were loaded, and nothing writes to them. What is restored is a copy.
2. A copy answers only if its tensors, read back from its device, have the digest of those in host memory: every bit counts.
"""

from __future__ import annotations

import copy
import time
from pathlib import Path
from typing import Any

import torch

from libra.errors import ModelError, WeightsError
from libra.model_loader import build_model, build_tokenizer
from libra.tensors import digest, untied


class HostModel:
    """The model of ``directory`` in host memory, in the type of its files.

    Parameters
    ----------
    labels : bool
        It is a reward model (sequence classification with one label), not a language model.
    """

    def __init__(self, directory: Path, *, labels: bool = False) -> None:
        self.directory = directory
        self._model: Any = (_reward_model if labels else language_model)(directory)
        self.tokenizer: Any = build_tokenizer(None, directory)
        tensors = dict(self._model.state_dict())
        self.num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in untied(tensors)[0].values())
        self._digest = digest(tensors)

    def restored(self, device: torch.device) -> tuple[Any, float]:
        """A copy on ``device``, verified, and the seconds that it took; WeightsError if it is not what host memory has."""
        began_s = time.perf_counter()
        model = copy.deepcopy(self._model).to(device)
        if (found := digest(dict(model.state_dict()))) != self._digest:
            raise WeightsError(
                f"weights: a copy of {self.directory} on {device} is not what was loaded: its digest is {found}, not {self._digest}"
            )
        return model, time.perf_counter() - began_s


def language_model(directory: Path) -> Any:
    """The language model of a directory, in the type of its files; ModelError."""
    return build_model(None, directory, dtype="auto", attention="sdpa").requires_grad_(False).eval()


def _reward_model(directory: Path) -> Any:
    from transformers import AutoModelForSequenceClassification

    try:
        model = AutoModelForSequenceClassification.from_pretrained(directory, dtype="auto", local_files_only=True)
    except Exception as error:  # the boundary to transformers
        raise ModelError(f"model: {directory} cannot be loaded as a reward model: {error}") from error
    if model.config.num_labels != 1:
        raise ModelError(
            f"model: {directory} has {model.config.num_labels} labels; function score needs a reward model, which has one"
        )
    return model.requires_grad_(False).eval()

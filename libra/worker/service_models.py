"""The model of a service: in host memory as long as a run has the service, and on a device while there is room.

Invariants
----------
1. Host memory has the weights as they were loaded, and nothing writes to them. What is restored is a copy.
2. A copy answers only after it has passed the check by which engines prove that they hold a version
   (`libra.weights.version_check`): norms and biases, and random columns of every matrix, bit for bit; and random projections of
   every layer, as it computes them on its device.
"""

from __future__ import annotations

import copy
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from libra.errors import ModelError, WeightsError
from libra.model_loader import build_model, build_tokenizer
from libra.projections import is_embedding, project_tensors
from libra.tensors import digest, untied
from libra.weights import (
    Answers,
    CheckVerdict,
    ExpectedProbes,
    ProbeCalibration,
    VersionCheck,
    calibrate,
    judge,
    uncalibrated,
)

COLUMNS = 2
"""Random columns of each matrix that are compared, rows of an embedding."""


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
        kept = untied(tensors)[0]
        self.num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in kept.values())
        dtype = next((str(t.dtype).removeprefix("torch.") for t in tensors.values() if t.ndim == 2), "float32")
        self.check = VersionCheck(0, digest(tensors), dtype, 0, project_tensors(tensors, 0))
        self._calibration: dict[str, ProbeCalibration] = {}  # by kind of device, measured at its first copy
        self._restored = 0

    def restored(self, device: torch.device) -> tuple[Any, float]:
        """A copy on ``device``, verified, and the seconds that it took; WeightsError if it is not what host memory has."""
        began_s = time.perf_counter()
        model = copy.deepcopy(self._model).to(device)
        self._restored += 1
        verdict = self.verdict(model, seed=self._restored)
        if not verdict.passed:
            raise WeightsError(
                f"weights: a copy of {self.directory} on {device} is not what was loaded: {verdict.detail}"
            )
        return model, time.perf_counter() - began_s

    def verdict(self, model: Any, seed: int) -> CheckVerdict:
        """Whether ``model`` has these weights; ``seed`` chooses the columns that are compared."""
        tensors = dict(model.state_dict())
        kind = next(iter(tensors.values())).device.type
        columns = _columns(dict(self._model.state_dict()), seed)
        answers = Answers((), project_tensors(tensors, self.check.seed), _columns(tensors, seed))
        allowed = self._calibration.get(kind, uncalibrated(self.check.dtype))
        verdict = judge(self.check, ExpectedProbes(columns, 0), answers, allowed)
        if verdict.passed and kind not in self._calibration:
            self._calibration[kind] = calibrate(self.check, answers)
        return verdict


def _columns(tensors: dict[str, Tensor], seed: int) -> dict[str, NDArray[np.float32]]:
    """Norms and biases, and some columns of each matrix, of which ``seed`` decides."""
    rng = np.random.default_rng(seed)
    found = {}
    for name, tensor in tensors.items():
        if tensor.ndim == 1 and tensor.is_floating_point():
            found[name] = tensor.float().cpu().numpy()[None]
        elif tensor.ndim == 2:
            rows = is_embedding(name)
            places = [int(place) for place in rng.integers(0, tensor.shape[0 if rows else 1], COLUMNS)]
            found[name] = (tensor[places] if rows else tensor[:, places].T).float().cpu().numpy()
    return found


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

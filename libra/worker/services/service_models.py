"""The models of services and teachers: in host memory, with copies on a device while it has room.

Invariants
----------
1. The weights in host memory stay as loaded; nothing writes to them. A device gets a copy.
2. A copy answers only if its tensors, read back from the device, have the digest of those in host
   memory: every bit counts.
"""

from __future__ import annotations

import copy
import hashlib
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from libra.config import RunConfig, resolve_model
from libra.config.service_devices import teacher_model
from libra.errors import ModelError, WeightsError
from libra.model_loader import build_model, build_tokenizer
from libra.seals import parsed_json
from libra.tensors import compute_device, digest, untied
from libra.types import Taught, Trajectory
from libra.worker.model_files import local_model

if TYPE_CHECKING:
    from libra.train.teacher_model import Scoring, TeacherModel


_ONE_GROUP = threading.Lock()


class HostModel:
    """The model of ``directory`` in host memory; ``labels``: a reward model with one label."""

    def __init__(self, directory: Path, *, labels: bool = False) -> None:
        self.directory = directory
        self._model: Any = (_reward_model if labels else language_model)(directory)
        self.tokenizer: Any = build_tokenizer(None, directory)
        tensors = dict(self._model.state_dict())
        self.num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in untied(tensors)[0].values())
        self._digest = digest(tensors)

    def restored(self, device: torch.device) -> tuple[Any, float]:
        """A verified copy on ``device``, and seconds. Raises WeightsError if digests differ."""
        began_s = time.perf_counter()
        model = copy.deepcopy(self._model).to(device)
        if (found := digest(dict(model.state_dict()))) != self._digest:
            raise WeightsError(
                f"weights: a copy of {self.directory} on {device} is not what was loaded: its digest is {found}, not {self._digest}"
            )
        return model, time.perf_counter() - began_s


def language_model(directory: Path) -> Any:
    """The language model of a directory, in the dtype of its files. Raises ModelError."""
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


class Scored(NamedTuple):
    """A teacher's scores per member (None if the member does not train), and seconds of scoring."""

    taught: list[Taught | None]
    seconds: float


def load_teacher(config: RunConfig, student: Path) -> TeacherModel:
    """The teacher of a run; ``student`` has the trained model's files. Raises ModelError."""
    from libra.train.teacher_model import TeacherModel

    named = teacher_model(config)
    assert named is not None, "a run without a teacher has none to load"
    if config.cluster.threads is not None:
        torch.set_num_threads(config.cluster.threads)
    directory, device = local_model(str(resolve_model(named))), compute_device(config.cluster.device)
    scoring, dtype = scoring_of(config, student), getattr(torch, config.model.dtype)
    if config.distil.service is not None:
        return TeacherModel(language_model(directory).to(device), scoring)
    return TeacherModel.load(directory, scoring, dtype=dtype, device=device, loader=config.model.loader)


def scoring_of(config: RunConfig, student: Path) -> Scoring:
    """Scoring settings of a run's teacher; ``student`` has the trained model's files."""
    from libra.train.teacher_model import Scoring

    facts = parsed_json((student / "config.json").read_text())
    vocabulary = int(facts.get("text_config", facts)["vocab_size"])
    return Scoring(config.distil, config.rollout.temperature, vocabulary, config.trainer.logit_chunk_tokens)


@dataclass(frozen=True, slots=True)
class ToTeach:
    """A request to a ``teach`` service: a group's members, and the run's scoring settings."""

    members: Sequence[Trajectory]
    scoring: Scoring
    seed: int

    def scores(self, model: Any) -> Scored:
        from libra.train.teacher_model import TeacherModel

        return scores_of(TeacherModel(model, self.scoring), self.seed, self.members)


def scores_of(model: TeacherModel, seed: int, members: Sequence[Trajectory]) -> Scored:
    """A teacher's scores of a group, deterministic by ``seed``; scores one group at a time."""
    with _ONE_GROUP:
        began_s = time.perf_counter()
        taught = [model.score(each, _rng(seed, each)) if each.failure.trains else None for each in members]
        return Scored(taught, time.perf_counter() - began_s)


def _rng(seed: int, member: Trajectory) -> np.random.Generator:
    text = f"{seed}/teacher/{member.trajectory_id}"
    return np.random.default_rng(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()))

"""The teacher of a run on the worker that holds it: loaded once, it scores finished groups, each once."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from libra.config import RunConfig, resolve_model
from libra.seals import parsed_json
from libra.tensors import compute_device
from libra.types import Taught, Trajectory
from libra.worker.context import WorkerContext
from libra.worker.model_files import local_model

if TYPE_CHECKING:
    from libra.train.teacher_model import TeacherModel


class TeacherService:
    """One per host with TEACHER, in a run with ``distil.teacher``."""

    def __init__(self, context: WorkerContext) -> None:
        self.context = context
        self._model: TeacherModel | None = None
        self._one_at_a_time = threading.Lock()

    def load(self) -> None:
        """Load the model, in any thread; ModelError if it is none."""
        self._model = load_teacher(self.context.spec.config, self.context.model_dir)

    def score(self, members: Sequence[Trajectory]) -> list[Taught | None]:
        """What the teacher says of each member of a group; None for one that does not train. The same members, the same scores."""
        assert self._model is not None, "the teacher scores after it is loaded"
        with self._one_at_a_time:
            return scores_of(self._model, self.context.spec.config, members)


def load_teacher(config: RunConfig, student: Path) -> TeacherModel:
    """The teacher of a run, for a student whose model files are in ``student``; ModelError if it is no model."""
    import torch

    from libra.train.teacher_model import Scoring, TeacherModel

    assert config.distil.teacher is not None, "a run without a teacher has no service of one"
    if config.cluster.threads is not None:
        torch.set_num_threads(config.cluster.threads)
    facts = parsed_json((student / "config.json").read_text())
    vocabulary = int(facts.get("text_config", facts)["vocab_size"])
    return TeacherModel(
        local_model(str(resolve_model(config.distil.teacher))),
        Scoring(config.distil, config.rollout.temperature, vocabulary, config.trainer.logit_chunk_tokens),
        dtype=getattr(torch, config.model.dtype),
        device=compute_device(config.cluster.device),
        loader=config.model.loader,
    )


def scores_of(model: TeacherModel, config: RunConfig, members: Sequence[Trajectory]) -> list[Taught | None]:
    """What a teacher says of each member of a group; None for one that does not train. The same members, the same scores."""
    return [model.score(each, _rng(config, each)) if each.failure.trains else None for each in members]


def _rng(config: RunConfig, member: Trajectory) -> np.random.Generator:
    text = f"{config.run.seed}/teacher/{member.trajectory_id}"
    return np.random.default_rng(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()))

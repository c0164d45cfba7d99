"""The teacher of a run, on a worker of its own or as the model of a service: loaded once, it scores each finished group once."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from libra.config import RunConfig, resolve_model
from libra.config.service_devices import teacher_model
from libra.seals import parsed_json
from libra.tensors import compute_device
from libra.types import Taught, Trajectory
from libra.worker.context import WorkerContext
from libra.worker.model_files import local_model

if TYPE_CHECKING:
    from libra.train.teacher_model import Scoring, TeacherModel


class Scored(NamedTuple):
    """What a teacher says of each member of a group, None for one that does not train; and its seconds, without those in which it
    scored other groups."""

    taught: list[Taught | None]
    seconds: float


class OwnTeacher:
    """One per host with TEACHER, in a run whose ``distil.teacher`` is a model of its own."""

    def __init__(self, context: WorkerContext) -> None:
        self.context = context
        self._model: TeacherModel | None = None
        self._one_at_a_time = threading.Lock()

    def load(self) -> None:
        """Load the model, in any thread; ModelError if it is none."""
        self._model = load_teacher(self.context.spec.config, self.context.model_dir)

    def score(self, members: Sequence[Trajectory]) -> Scored:
        """What the teacher says of a group. The same members, the same scores."""
        assert self._model is not None, "the teacher scores after it is loaded"
        with self._one_at_a_time:
            return scores_of(self._model, self.context.spec.config.run.seed, members)


def load_teacher(config: RunConfig, student: Path) -> TeacherModel:
    """The teacher of a run, for a student whose model files are in ``student``; ModelError if it is no model."""
    import torch

    from libra.train.teacher_model import TeacherModel

    named = teacher_model(config)
    assert named is not None, "a run without a teacher has none to load"
    if config.cluster.threads is not None:
        torch.set_num_threads(config.cluster.threads)
    directory, device = local_model(str(resolve_model(named))), compute_device(config.cluster.device)
    if config.distil.service is not None:
        from libra.worker.service_models import language_model

        return TeacherModel(language_model(directory).to(device), scoring_of(config, student))
    return TeacherModel.load(
        directory,
        scoring_of(config, student),
        dtype=getattr(torch, config.model.dtype),
        device=device,
        loader=config.model.loader,
    )


def scoring_of(config: RunConfig, student: Path) -> Scoring:
    """What the teacher of a run keeps; the student's model files are in ``student``."""
    from libra.train.teacher_model import Scoring

    facts = parsed_json((student / "config.json").read_text())
    vocabulary = int(facts.get("text_config", facts)["vocab_size"])
    return Scoring(config.distil, config.rollout.temperature, vocabulary, config.trainer.logit_chunk_tokens)


@dataclass(frozen=True, slots=True)
class ToTeach:
    """What a service with function ``teach`` is asked: the members of one group, and what the run keeps of what it says of them."""

    members: Sequence[Trajectory]
    scoring: Scoring
    seed: int

    def scores(self, model: Any) -> Scored:
        """What ``model`` says of them; TrainError."""
        from libra.train.teacher_model import TeacherModel

        return scores_of(TeacherModel(model, self.scoring), self.seed, self.members)


def scores_of(model: TeacherModel, seed: int, members: Sequence[Trajectory]) -> Scored:
    """What a teacher says of a group, in a run with ``seed``. The same members, the same scores."""
    began_s = time.perf_counter()
    taught = [model.score(each, _rng(seed, each)) if each.failure.trains else None for each in members]
    return Scored(taught, time.perf_counter() - began_s)


def _rng(seed: int, member: Trajectory) -> np.random.Generator:
    text = f"{seed}/teacher/{member.trajectory_id}"
    return np.random.default_rng(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()))

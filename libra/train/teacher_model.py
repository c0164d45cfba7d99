"""A teacher: a frozen model that scores the tokens which a student generated.

Log-probabilities are reduced chunk by chunk, so no (T, V) array exists.

Shape legend: T tokens of a trajectory, A generated tokens, C tokens of a chunk, H hidden size, V
vocabulary, K columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from libra.config.task_sections import DistilSection
from libra.errors import TrainError
from libra.heads import after_head, at_head, head_of
from libra.train.logprobs import load_model
from libra.types import Taught, Trajectory


@dataclass(frozen=True, slots=True)
class Scoring:
    """Section ``distil``, ``rollout.temperature``, and the size of the student's vocabulary."""

    distil: DistilSection
    temperature: float
    vocabulary: int
    chunk_tokens: int  # scored at once


class TeacherModel:
    def __init__(self, model: Any, scoring: Scoring) -> None:
        self.model: Any = model
        self.scoring, self._head, self._after = scoring, head_of(self.model), after_head(self.model)

    @classmethod
    def load(
        cls,
        directory: Path,
        scoring: Scoring,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        loader: str | None = None,
    ) -> TeacherModel:
        """The model of ``directory``, by ``loader`` (``model.loader``)."""
        return cls(load_model(directory, dtype, loader).requires_grad_(False).to(device).eval(), scoring)

    @torch.no_grad()
    def score(self, trajectory: Trajectory, rng: np.random.Generator) -> Taught | None:
        """Scores of the generated tokens; None without generated tokens or necessary draws. ``rng``
        draws the teacher's own tokens. TrainError if a log-probability is not finite."""
        where = np.flatnonzero(trajectory.is_action)
        distil = self.scoring.distil
        of_student = (distil.estimator, distil.divergence) == ("sampled", "reverse")
        if not len(where) or where[0] == 0 or (of_student and distil.tokens > 1 and trajectory.drawn is None):
            return None
        own_A = torch.from_numpy(trajectory.token_ids[where].astype(np.int64))
        columns_AK, old = None, None
        if of_student:
            columns, old = drawn_columns(trajectory, where)
            columns_AK = torch.from_numpy(columns.astype(np.int64))
        device = next(self.model.parameters()).device
        ids_1T = torch.from_numpy(trajectory.token_ids[: where[-1]].astype(np.int64))[None].to(device)
        parts: list[tuple[Tensor, ...]] = []

        def reduce(hidden_TH: Tensor) -> Tensor:
            hidden_AH = hidden_TH[torch.from_numpy(where - 1).to(device)]
            for at in range(0, len(hidden_AH), self.scoring.chunk_tokens):
                here = slice(at, at + self.scoring.chunk_tokens)
                logp_CV = self._logp(hidden_AH[here])
                columns_CK = self._columns(logp_CV, None if columns_AK is None else columns_AK[here], rng)
                rest_C = torch.logsumexp(logp_CV.scatter(1, columns_CK, -torch.inf), -1)
                own_C = logp_CV.gather(1, own_A[here, None].to(device))[:, 0]
                parts.append((columns_CK.int(), logp_CV.gather(1, columns_CK), own_C, rest_C))
            return hidden_TH[:0]

        at_head(self.model, reduce, input_ids=ids_1T, use_cache=False)
        columns, logp, own, rest = (torch.cat(each).cpu().numpy() for each in zip(*parts, strict=True))
        if not (np.isfinite(logp).all() and np.isfinite(own).all()):
            raise TrainError(
                f"trajectory {trajectory.trajectory_id}: the teacher's log-probabilities are not finite; is distil.teacher whole, "
                "and does model.dtype hold its numbers?"
            )
        logp, own, rest = (each.astype(np.float32) for each in (logp, own, rest))
        return Taught(columns, logp, own, rest if distil.estimator == "top_k" else None, old)

    def _logp(self, hidden_CH: Tensor) -> Tensor:
        logits_CV = torch.nn.functional.linear(hidden_CH, self._head.weight, self._head.bias)
        logits_CV = logits_CV if self._after is None else self._after(logits_CV)
        logits_CV = logits_CV[:, : self.scoring.vocabulary]
        logits_CV = logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32)) / self.scoring.temperature
        return torch.log_softmax(logits_CV, -1)

    def _columns(self, logp_CV: Tensor, given_CK: Tensor | None, rng: np.random.Generator) -> Tensor:
        if given_CK is not None:
            return given_CK.to(logp_CV.device)
        distil = self.scoring.distil
        if distil.estimator == "top_k":
            return logp_CV.topk(distil.tokens, dim=-1).indices
        cdf_CV = logp_CV.exp().cumsum(-1)
        aim_CK = torch.from_numpy(rng.random((len(logp_CV), distil.tokens))).to(cdf_CV) * cdf_CV[:, -1:]
        return torch.searchsorted(cdf_CV, aim_CK, right=True).clamp_(max=logp_CV.shape[-1] - 1)


def drawn_columns(
    trajectory: Trajectory, where: NDArray[np.integer[Any]]
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """The student's tokens at each place, generated and drawn (A, m), with log-probabilities."""
    columns, logp = trajectory.token_ids[where][:, None], trajectory.behaviour_logprob[where][:, None]
    if trajectory.drawn is not None:
        columns = np.concatenate([columns, trajectory.drawn.token_ids], axis=1)
        logp = np.concatenate([logp, trajectory.drawn.logprobs], axis=1)
    return columns.astype(np.int32), logp.astype(np.float32)

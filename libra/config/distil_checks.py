"""Contradictions of section ``distil`` with other fields; as in `libra.config.cross_field_checks`."""

from __future__ import annotations

from collections.abc import Iterator

from libra.config.algorithms import DEFAULT_ALGORITHM
from libra.config.models import RunSections


def distil_contradictions(config: RunSections) -> Iterator[str]:
    """A message for each."""
    distil, trainer, rollout = config.distil, config.trainer, config.rollout
    if distil.teacher is None:
        if trainer.algorithm == "opd":
            yield (
                "distil.teacher: null, and trainer.algorithm=opd learns from a teacher; type distil.teacher=MODEL (a directory, a "
                f"Hugging Face id or libra/NAME), or trainer.algorithm={DEFAULT_ALGORITHM}"
            )
        return
    if trainer.algorithm != "opd":
        yield (
            f"distil.teacher: {distil.teacher}, and trainer.algorithm={trainer.algorithm} learns from rewards alone; type "
            "trainer.algorithm=opd (with distil.reward_coef=1 rewards count, too), or distil.teacher=null"
        )
    if not draws_of_student(config):
        return
    if rollout.top_p < 1:
        yield (
            f"distil.estimator: sampled with distil.divergence=reverse draws from all that the student may say, and "
            f"rollout.top_p={rollout.top_p:g} cuts it; type rollout.top_p=1, or distil.estimator=top_k"
        )
    if distil.samples > 1 and rollout.engine != "transformers":
        yield (
            f"distil.samples: {distil.samples} tokens for each place are drawn by rollout.engine=transformers only, and it is "
            f"{rollout.engine}; type distil.samples=1, or distil.estimator=top_k"
        )


def draws_of_student(config: RunSections) -> bool:
    """Whether the divergence is estimated from what the student draws as it generates."""
    distil = config.distil
    return distil.teacher is not None and (distil.divergence, distil.estimator) == ("reverse", "sampled")


def extra_draws(config: RunSections) -> int:
    """Tokens that an engine draws for each place beside the generated one (``TurnRequest.draws``)."""
    return config.distil.samples - 1 if draws_of_student(config) else 0

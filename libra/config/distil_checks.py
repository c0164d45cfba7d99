"""Contradictions of section ``distil`` with other fields; as in `libra.config.cross_field_checks`."""

from __future__ import annotations

from collections.abc import Iterator

from libra.config.algorithms import DEFAULT_ALGORITHM
from libra.config.models import RunSections
from libra.config.yaml_text import one_line_yaml
from libra.errors import nearest_name


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
            f"distil.teacher: {one_line_yaml(distil.teacher)}, and trainer.algorithm={trainer.algorithm} learns from rewards "
            "alone; type trainer.algorithm=opd (with distil.reward_coef=1 rewards count, too), or distil.teacher=null"
        )
    yield from _service_contradictions(config)
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


def _service_contradictions(config: RunSections) -> Iterator[str]:
    """A message where ``{service: NAME}`` names none, or one that does not score trajectories."""
    name, named = config.distil.service, config.services.named
    if name is None:
        return
    if name not in named:
        near = nearest_name(name, named)
        there = f"; services.named has {', '.join(named)}" if named else ""
        meant = f", did you mean {near!r}?" if near else ""
        yield (
            f"distil.teacher: service {name!r} is not configured{meant}{there}; type services.named={{{name}: {{model: MODEL, "
            "function: teach}}"
        )
    elif named[name].function != "teach":
        yield (
            f"distil.teacher: service {name!r} has function {named[name].function}, which does not score each token that a student "
            f"generates; type function: teach for it in services.named, or name the model itself: distil.teacher=MODEL"
        )


def teacher_model(config: RunSections) -> str | None:
    """The teacher's model, its own or that of its service, named as ``model.path`` is; None: there is no teacher."""
    teacher = config.distil.teacher
    if not isinstance(teacher, dict):
        return teacher
    return config.services.named[teacher["service"]].model


def draws_of_student(config: RunSections) -> bool:
    """Whether the divergence is estimated from what the student draws as it generates."""
    distil = config.distil
    return distil.teacher is not None and (distil.divergence, distil.estimator) == ("reverse", "sampled")


def extra_draws(config: RunSections) -> int:
    """Tokens that an engine draws for each place beside the generated one (``TurnRequest.draws``)."""
    return config.distil.samples - 1 if draws_of_student(config) else 0

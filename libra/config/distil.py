"""Section ``distil`` of a configuration: a teacher that scores what the student writes, and what the student learns from it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from libra.config.section import AtLeastOne, Section
from libra.config.yaml_text import one_line_yaml

KLDirection = Literal["forward", "reverse"]
DistilEstimator = Literal["top_k", "sampled"]


def _teacher(value: object) -> object:
    name = value.get("service") if isinstance(value, dict) and len(value) == 1 else value
    if value is None or (isinstance(name, str) and name):
        return value
    got = one_line_yaml(value)
    raise ValueError(
        f"got {got}; allowed is the name of a model (a directory, a Hugging Face id or libra/NAME), or a mapping with the key "
        "service; type e.g. distil.teacher=MODEL, or distil.teacher={service: NAME} for one of services.named"
    )


class DistilSection(Section):
    """On-policy distillation (`trainer.algorithm` opd): docs/distillation.md."""

    teacher: Annotated[str | dict[str, str] | None, BeforeValidator(_teacher)] = None
    """Model to learn from, named as `model.path` is: a directory, a Hugging Face id, or libra/NAME. It has the tokenizer of the
    student. A worker of its own holds it. `{service: NAME}`: the model of a service of `services.named` with function teach, which
    lives on the tool workers with the others. None: there is none."""
    divergence: KLDirection = "forward"
    """What is made small, token by token on what the student wrote. forward: KL(teacher || student), which covers all that the
    teacher may say. reverse: KL(student || teacher), which leaves out what the teacher would not say."""
    estimator: DistilEstimator = "top_k"
    """How it is computed without the whole vocabulary. top_k: over the teacher's `top_k` likeliest tokens and "any other" as one
    more, without noise. sampled: without bias from `samples` tokens per place, drawn by the teacher (forward) or by the student as
    it generates (reverse; the log ratio is computed anew when training, and weighed by the change since: AsyncOPD)."""
    top_k: AtLeastOne = 64
    """For `estimator` top_k: tokens of the teacher's distribution that are kept for each place."""
    samples: AtLeastOne = 64
    """For `estimator` sampled: tokens drawn for each place (m). With `divergence` reverse 1 is the generated token itself; more
    need `rollout.engine` transformers."""
    reward_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the policy loss, from rewards, beside the divergence. 0: rewards are only reported."""
    wait_s: Annotated[float, Field(ge=0)] = 600.0
    """Seconds that a batch waits for trajectories that the teacher has not scored yet; then it trains without them, and with
    `reward_coef` above 0 their rewards still count. 0: it does not wait."""

    @property
    def service(self) -> str | None:
        """The service that is the teacher; None: it is none, or there is no teacher."""
        return self.teacher["service"] if isinstance(self.teacher, dict) else None

"""Section `services`: models and functions that rewards and tools ask, and that live on the tool workers."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from libra.config.own_parts import OwnOr
from libra.config.section import AtLeastOne, Section

MODEL_FUNCTIONS = ("judge", "logprob", "score", "embed", "teach")
"""What a service with a model can be asked without code of one's own (docs/services.md)."""


def _named(name: str) -> str:
    if re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]{0,62}", name) is None:
        raise ValueError(
            f"{name!r} is no name of a service, which is a letter and at most 62 letters, digits, - and _; type e.g. "
            "services.named={judge: {model: Qwen/Qwen3-4B}}"
        )
    return name


class ServiceEntry(Section):
    """One service."""

    model: Annotated[str, Field(min_length=1)] | None = None
    """Model, named as `model.path` is. It stays in the worker's memory, and is restored to the device when it is asked. None: the
    service is a plain function."""
    function: Annotated[str, OwnOr(MODEL_FUNCTIONS)] = "judge"
    """What it answers. judge: the probability that the model says yes. logprob: the mean log-probability of the completion. score:
    the number of a reward model with one label. embed: the mean of the last hidden states. teach: what a teacher says of each
    generated token, for `distil.teacher` alone. Your own: `f(inputs, **args)`, or with a
    `model` `f(model, tokenizer, inputs, **args)`, which returns one value for each input."""
    args: dict[str, Any] = {}
    """Further keyword arguments of `function`."""
    max_batch: AtLeastOne = 8
    """Requests that are answered together at most."""
    max_wait_s: Annotated[float, Field(ge=0)] = 0.05
    """Seconds that a request waits for others, so that they are answered together."""
    timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """Seconds after which a batch fails: for the device to be free, for its weights to be there, and for its answers, each."""


class ServicesSection(Section):
    """Reward models, judges, teachers, embedders: asked by rewards and tools with `libra.ask`, shared by the runs of a worker."""

    named: dict[Annotated[str, AfterValidator(_named)], ServiceEntry] = {}
    """Services by name, e.g. `{judge: {model: Qwen/Qwen3-4B}}` (docs/services.md)."""
    device_gib: Annotated[float, Field(gt=0)] | None = None
    """Memory for their weights on the device of a worker. If they do not fit together, those used longest ago are evicted, and
    restored when they are asked again. None: all of a CPU's; on a GPU 90 % of what is free when the run starts."""

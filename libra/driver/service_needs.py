"""Checks of section ``services``, and of who asks its services, in the driver before any worker starts."""

from __future__ import annotations

import logging
from typing import Any

from libra.config import RunConfig
from libra.config.services import MODEL_FUNCTIONS, ServiceEntry
from libra.driver.model_checks import ModelFiles, checked_model
from libra.envs import Environment
from libra.errors import ConfigError, ModelError, nearest
from libra.named_parts import named_function, unfit
from libra.worker.service_functions import FUNCTIONS

logger = logging.getLogger(__name__)


def check_services(config: RunConfig, environment: Environment) -> None:
    """Check each service, and that those which rewards and tools name are there.

    Raises
    ------
    ConfigError
        A name that ``services.named`` has not, a late reward in a run that takes none or whose tool workers may end before,
        a function that cannot be imported or called so, or a teacher that nobody asks.
    ModelError
        A model is missing or damaged, or no reward model where one is needed.
    """
    for name, entry in config.services.named.items():
        model = _checked_model(name, entry)
        _check_function(name, entry, model)
    known = list(config.services.named)
    _check_asked(config, environment)
    for use in environment.asked_services:
        if use.service not in config.services.named:
            there = f"; services.named has {', '.join(known)}" if known else ""
            raise ConfigError(
                f"{use.where}: service {use.service!r} is not configured{nearest(use.service, known)}{there}; type services.named="
                f"{{{use.service}: {{model: MODEL}}}}, or {{{use.service}: {{function: package.module:f}}}} for one of your own"
            )
        if config.services.named[use.service].function == "teach":
            raise ConfigError(
                f"{use.where}: service {use.service!r} has function teach, which scores trajectories for distil.teacher and "
                "answers nobody else; type function: logprob for a service that rewards and tools ask"
            )
        if use.late and config.trainer.late == "off":
            raise ConfigError(
                f"{use.where}: service {use.service!r} with late: true, and trainer.late=off takes no late rewards; type "
                "trainer.late=correct, wait or drop, or late: false"
            )
        if use.late and config.cluster.tool_workers_most is not None:
            raise ConfigError(
                f"{use.where}: service {use.service!r} with late: true, and cluster.tool_workers_most="
                f"{config.cluster.tool_workers_most} ends tool workers that idle, with the answers that are still to come; type "
                "cluster.tool_workers_most=null, or late: false"
            )


def _check_asked(config: RunConfig, environment: Environment) -> None:
    """Refuse a teacher that nobody asks, and warn of models that nobody is known to ask: all tool workers load them."""
    asked = {use.service for use in environment.asked_services} | {config.distil.service}
    for name, entry in config.services.named.items():
        if name in asked or entry.model is None:
            continue
        if entry.function == "teach":
            raise ConfigError(
                f"services.named: {name!r} has function teach, which answers distil.teacher alone, and that does not name it; type "
                f"distil.teacher={{service: {name}}}, or leave it out of services.named"
            )
        logger.warning(
            "services.named: %r is asked by no reward, tool or distil.teacher that says so, and each tool worker loads %s; leave "
            "it out, or say who asks it: a reward {service: %s}, libra.tool(f, services=%r), or services of your own environment",
            name, entry.model, name, name,
        )  # fmt: skip


def _checked_model(name: str, entry: ServiceEntry) -> ModelFiles | None:
    if entry.model is None:
        return None
    where = f"services.named: {name!r}: model"
    try:
        model = checked_model(entry.model)
    except ModelError as error:
        raise ModelError(str(error).replace("model.path", where)) from error
    if entry.function == "score" and "score.weight" not in model.shapes and model.shapes:
        raise ModelError(
            f"{where} {entry.model} has no score.weight, so it is no reward model; type function: judge or logprob, which ask a "
            "language model, or name a reward model"
        )
    return model


def _check_function(name: str, entry: ServiceEntry, model: ModelFiles | None) -> None:
    field = f"services.named: {name!r}: function"
    given: tuple[Any, ...] = ([],) if model is None else (None, None, [])
    call = (
        f"f({'inputs' if model is None else 'model, tokenizer, inputs'}{''.join(f', {key}=...' for key in entry.args)})"
    )
    if entry.function not in MODEL_FUNCTIONS:
        named_function(field, entry.function, call, *given, **entry.args)
        return
    if (wrong := unfit(FUNCTIONS[entry.function], given, entry.args)) is not None:
        raise ConfigError(
            f"services.named: {name!r}: args {entry.args!r} do not fit function {entry.function}: {wrong}; see docs/services.md"
        )

"""Checks of Python objects, tools, services, and user code that workers import."""

from __future__ import annotations

import inspect
import logging
import pickle
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import cloudpickle
from dask import delayed
from dask.delayed import Delayed

from libra import keys
from libra.cluster.hardware_inventory import tool_supply
from libra.config import RunConfig
from libra.config.task_sections import MODEL_FUNCTIONS, ServiceEntry
from libra.driver.model_checks import ModelFiles, checked_model
from libra.envs import Environment, Tool
from libra.errors import ConfigError, ModelError, nearest
from libra.facts import ToolNeeds
from libra.named_parts import is_named, named_function, named_part, unfit
from libra.policy.leases.resources import Resources
from libra.policy.leases.table import check_declared
from libra.untrusted import error_text
from libra.worker.run_spec import RunSpec
from libra.worker.services.service_functions import FUNCTIONS

if TYPE_CHECKING:
    from distributed import Client, Worker

logger = logging.getLogger(__name__)


def check_environment(environment: object) -> None:
    """Raise ConfigError unless ``environment`` is None or an `Environment` instance."""
    if environment is None or isinstance(environment, Environment):
        return
    if inspect.isclass(environment):
        name = environment.__name__
        got, give = f"the class {name}", f"give an instance: environment={name}(...)"
    elif isinstance(environment, str):
        got, give = f"the text {environment!r}", f"give an object, or type environment__name={environment!r}"
    else:
        got, give = type(environment).__name__, "give an instance of libra.envs.Environment, or prompts and reward"
    raise ConfigError(f"environment: got {got}; {give}")


def check_score(score: Callable[..., Any] | None) -> None:
    """Raise ConfigError unless ``score`` is None or builds a Dask node, which is not run here."""
    if score is None:
        return
    example = "score=lambda episodes: dask.delayed(judge)(episodes), where judge returns one number for each episode"
    if inspect.isclass(score) or not callable(score):
        got = f"the class {score.__name__}" if inspect.isclass(score) else type(score).__name__
        raise ConfigError(f"score: got {got}; give a function: {example}")
    try:
        node = score(delayed(list)())
    except Exception as error:  # the boundary to the user's function
        raise ConfigError(f"score: it could not build its node ({error_text(error)}); type {example}") from error
    if not isinstance(node, Delayed):
        raise ConfigError(f"score: it returned {type(node).__name__}, not a Dask node; type {example}")


def needs_of(environment: Environment) -> dict[str, ToolNeeds]:
    """Resources of a call, per tool that declares any."""
    return {tool.name: _needs(tool) for tool in environment.tools if tool.declares}


def check_tools(config: RunConfig, environment: Environment, *, started_here: bool) -> None:
    """Raise ConfigError if a tool's declaration is invalid or no started worker fits its calls."""
    needs = needs_of(environment)
    if environment.session is not None and config.cluster.tool_workers_most is not None:
        raise ConfigError(
            f"cluster.tool_workers_most: {config.cluster.tool_workers_most}, and trajectories of {environment.name} have sessions, "
            "which live on their tool worker, so that none can be ended; type cluster.tool_workers_most=null"
        )
    largest = None
    if started_here and needs:
        supply = tool_supply(config)
        largest = "tool-0", Resources(0, len(supply.core_ids), supply.mib << 20, supply.gpus)
    quotas = {name: str(quota) for name, quota in config.environment.quotas.items()}
    check_declared(needs, quotas, largest)
    for quota in sorted(quotas.keys() - {tool.quota for tool in environment.tools}):
        logger.warning(
            "environment.quotas.%s has no effect: no tool of %s has quota=%r", quota, environment.name, quota
        )
    for name in config.cluster.tool_supply:
        field = {"gpus": "gpu"}.get(name, name)
        taken = any(tool.own_process if name == "cores" else getattr(tool, field) for tool in environment.tools)
        if not taken and not (name == "gpus" and config.services.named):
            logger.warning(
                "cluster.tool_supply.%s has no effect: no tool of %s declares %s", name, environment.name, field
            )


def _needs(tool: Tool) -> ToolNeeds:
    elastic = tool.elastic
    if isinstance(elastic, Mapping):
        elastic = {int(cores): float(speed) for cores, speed in elastic.items()}
    elif elastic is not None and not isinstance(elastic, str):
        elastic = tuple(float(speed) for speed in elastic)
    least, most = tool.cores
    return ToolNeeds(least, most, round(tool.memory_gib * 2**30), tool.gpu, elastic, tool.quota, tool.revocable)


def check_services(config: RunConfig, environment: Environment) -> None:
    """Check each service, and its uses by rewards and tools. Raises ConfigError or ModelError."""
    for name, entry in config.services.named.items():
        model = _checked_model(name, entry)
        _check_function(name, entry, model)
    known = list(config.services.named)
    _check_asked(config, environment)
    ends_idle = config.cluster.tool_workers_most
    for use in environment.asked_services:
        where = f"{use.where}: service {use.service!r}"
        if use.service not in known:
            there = f"; services.named has {', '.join(known)}" if known else ""
            raise ConfigError(
                f"{where} is not configured{nearest(use.service, known)}{there}; type services.named="
                f"{{{use.service}: {{model: MODEL}}}}, or {{{use.service}: {{function: package.module:f}}}} for one of your own"
            )
        if config.services.named[use.service].function == "teach":
            raise ConfigError(
                f"{where} has function teach, which scores trajectories for distil.teacher and answers nobody else; type "
                "function: logprob for a service that rewards and tools ask"
            )
        if use.late and config.trainer.late == "off":
            raise ConfigError(
                f"{where} with late: true, and trainer.late=off takes no late rewards; type trainer.late=correct, wait or drop, "
                "or late: false"
            )
        if use.late and ends_idle is not None:
            raise ConfigError(
                f"{where} with late: true, and cluster.tool_workers_most={ends_idle} ends tool workers that idle, with the "
                "answers that are still to come; type cluster.tool_workers_most=null, or late: false"
            )


def _check_asked(config: RunConfig, environment: Environment) -> None:
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
            "services.named: %r is not declared by any reward, tool or distil.teacher, and each tool worker loads %s; leave "
            "it out, or declare its user: a reward {service: %s}, libra.tool(f, services=%r), or services of your environment",
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
            f"{where} {entry.model} has no score.weight, so it is not a reward model; type function: judge or logprob, which ask a "
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
            f"services.named: {name!r}: args {entry.args!r} do not fit function {entry.function}: {wrong}; see docs/rewards.md"
        )


def loading_error(data: bytes, dask_worker: Worker | None = None) -> tuple[str, str] | None:
    """The setting that this worker cannot load, and why; None if all load. Runs on a worker."""
    try:
        spec: RunSpec = pickle.loads(data)
    except Exception as error:  # noqa: BLE001  the boundary to a user's modules: importing them may raise anything
        return "environment", f"{type(error).__name__}: {error}"
    generates = dask_worker is None or keys.ROLLOUT in dask_worker.state.total_resources
    for field, name in worker_parts(spec.config, generates=generates):
        try:
            named_part(field, name)
        except ConfigError as error:
            return field, str(error)
    return None


def worker_parts(config: RunConfig, *, generates: bool = True) -> list[tuple[str, str]]:
    """User code that a worker imports, as (setting, name); the engine only if it ``generates``."""
    trainer = config.trainer
    named = [
        ("model.loader", config.model.loader or ""),
        ("trainer.loss", trainer.loss),
        ("trainer.advantage", trainer.advantage),
        ("trainer.lr_schedule", trainer.lr_schedule),
        *([("rollout.engine", config.rollout.engine)] if generates else []),
        *(("services.named", entry.function) for entry in config.services.named.values()),
    ]
    return [(field, name) for field, name in named if is_named(name)]


def check_loadable(client: Client, spec: RunSpec) -> None:
    """Raise ConfigError if a worker cannot load ``spec``; otherwise the run would hang."""
    try:
        data = cloudpickle.dumps(spec)
    except Exception as error:  # the boundary to a user's objects: pickling them may raise anything
        raise ConfigError(
            f"environment: it cannot be sent to workers ({type(error).__name__}: {error}); make what it holds (files, "
            "clients, locks) in its setup(), or in the function that uses it"
        ) from error
    place = "put the module where workers find it (install it, or set PYTHONPATH before they start)"
    for address, found in client.run(loading_error, data).items():
        if found is not None and found[0] != "environment":
            raise ConfigError(f"{found[1]} on worker {address}; {place}")
        if found is not None:
            raise ConfigError(
                f"environment: worker {address} cannot load it ({found[1]}); {place}, or define function and class in the script "
                "that you run"
            )

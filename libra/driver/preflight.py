"""All checks before any worker starts, for the start of a run and for `libra doctor`.

A start runs `CHECKS` in order and stops at the first error (`libra.driver.run_start`); the doctor
reports each check in a line.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from libra.config import RunConfig, resolve_model
from libra.driver.launch_layout import laid_out
from libra.driver.model_checks import ModelFiles, check_positions, check_teacher, checked_model
from libra.driver.part_checks import check_services, check_tools, worker_parts
from libra.driver.prompt_checks import ChatTemplate, LoadedTemplate, check_evaluation, check_prompts
from libra.driver.rundir import check_free
from libra.envs import Environment
from libra.errors import LibraError
from libra.model_loader import build_tokenizer, loader_of
from libra.processes.child_environment import child_environment
from libra.train.own_parts import check_own_parts
from libra.user_orderings import check_ordering
from libra.worker.engine.engine_factory import check_engine


@dataclass(slots=True)
class Preflight:
    """Input and results of the checks of one run."""

    config: RunConfig  # with its layout once that is checked
    started_here: bool  # whether the run starts its own workers on this machine
    directory: Path | None = None  # of a new, named run
    fetches: bool = False  # whether to download a hub model; if not, its checks are skipped
    given_client: bool = False  # whether the caller provides a connected client
    environment: Environment | None = None  # None until built, or if refused
    model: ModelFiles | None = None  # None until read, or if refused


def _own_parts(known: Preflight) -> str:
    config = known.config
    check_own_parts(config.trainer)
    loader_of(config.model.loader)
    check_ordering(config.policy.name, objective=config.policy.objective, patience=config.policy.patience)
    return ", ".join(name for _, name in worker_parts(config)) or "none"


def _run_name(known: Preflight) -> str:
    if known.directory is None:
        return ""
    check_free(known.directory)
    return f"{known.directory} is free"


def _model_files(known: Preflight) -> str:
    try:
        found = resolve_model(known.config.model.path)
    except LibraError:
        if known.fetches:
            raise
        return ""  # the doctor's check of the machine names it
    if not known.fetches and not isinstance(found, Path):
        return ""
    known.model = checked_model(known.config.model.path)
    return f"{known.model.directory}: whole, with a tokenizer that fits"


def _layout(known: Preflight) -> str:
    known.config = laid_out(known.config, started_here=not known.given_client)
    return "can start"


def _engine(known: Preflight) -> str:
    if not known.started_here:
        return ""
    check_engine(known.config)
    return str(known.config.rollout.engine)


def _agent(known: Preflight) -> str:
    if not known.started_here:
        return ""
    agent = known.config.agent
    child_environment(agent.env, where="agent.env")
    return str(agent.function or agent.command) if agent.given else ""


def _tools(known: Preflight) -> str:
    if known.environment is None:
        return ""
    check_tools(known.config, known.environment, started_here=known.started_here)
    declaring = [tool.name for tool in known.environment.tools if tool.declares]
    return f"{', '.join(declaring)}: the largest worker has the resources of a call" if declaring else ""


def _services(known: Preflight) -> str:
    if known.environment is None:
        return ""
    check_services(known.config, known.environment)
    return ", ".join(known.config.services.named)


def _data(known: Preflight) -> str:
    config, model, environment = known.config, known.model, known.environment
    if model is None or environment is None:
        return ""
    check_positions(model, config.rollout.max_context_tokens)
    check_evaluation(config, environment)
    loader = config.model.loader
    template = ChatTemplate(model) if loader is None else LoadedTemplate(build_tokenizer(loader, model.directory))
    if environment.tools:
        template.check_tools(environment.tool_schemas)
    check_prompts(config, environment, template, started_here=known.started_here)
    return f"evaluation and prompts fit {config.rollout.max_context_tokens:,} tokens of context"


def _teacher(known: Preflight) -> str:
    if known.model is None:
        return ""
    check_teacher(known.config, known.model)
    return "has the tokenizer of the student" if known.config.distil.teacher is not None else ""


CHECKS: dict[str, Callable[[Preflight], str]] = {
    "own parts": _own_parts,  # user code can be imported and follows its protocols
    "run name": _run_name,  # the directory of a new run is free
    "model files": _model_files,  # whole, with a tokenizer that fits
    "layout": _layout,  # it can start; with planner.layout=auto it is planned first
    "engine": _engine,  # installed, and it can do what the configuration asks for
    "agent": _agent,  # variables that an agent is to get are set
    "tools": _tools,  # the largest worker has the resources of a call
    "services": _services,  # services that rewards and tools use exist
    "data": _data,  # model, prompts and evaluation fit each other and section rollout
    "teacher": _teacher,  # a whole model with the tokenizer of the student
}
"""Each raises a LibraError or returns its finding; empty if it does not apply. Checks from the engine on may use
layout, environment and model."""
BEFORE_ENVIRONMENT = ("own parts", "run name", "model files", "layout")
"""Checks that a start makes before it builds the environment."""

"""What `libra run` would refuse in a configuration before any worker starts, as checks of `libra doctor`: one line each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from libra.cli.check_result import Check
from libra.config import RunConfig, resolve_model
from libra.driver.launch_layout import laid_out
from libra.driver.model_checks import checked_model
from libra.driver.run_directory import check_free
from libra.driver.run_start import check_data, check_parts
from libra.driver.service_needs import check_services
from libra.driver.teacher_checks import check_teacher
from libra.driver.tool_needs import check_tools
from libra.driver.worker_imports import worker_parts
from libra.envs import Environment
from libra.errors import LibraError
from libra.processes.child_environment import child_environment
from libra.worker.engine_factory import check_engine


def start_checks(config: RunConfig, environment: Environment | None, *, local_cluster: bool) -> Iterator[Check]:
    """The checks of a run's start, in its order.

    Parameters
    ----------
    environment : Environment or None
        None: it could not be made, and its data are not looked at; nor are they where a part of the user's own is refused.
    local_cluster : bool
        Whether the run would start its own workers.

    A model on a hub is not fetched, and what needs its files is left out.
    """
    own = ", ".join(name for _, name in worker_parts(config)) or "none"
    parts = refusal("own parts", lambda: check_parts(config))
    yield parts or Check("own parts", "ok", own)
    if config.run.name is not None:
        directory = config.run.dir / config.run.name
        yield refusal("run name", lambda: check_free(directory)) or Check("run name", "ok", f"{directory} is free")
    yield refusal("layout", lambda: laid_out(config, started_here=local_cluster)) or Check("layout", "ok", "can start")
    if local_cluster and config.rollout.engine != "vllm":  # of which the check of the machine's engines tells
        refused = refusal("engine", lambda: check_engine(config))
        yield refused or Check("engine", "ok", config.rollout.engine)
    usable = environment if parts is None else None
    yield from _beside_checks(config, usable, local_cluster=local_cluster)
    yield from _data_checks(config, usable, local_cluster=local_cluster)


def _beside_checks(config: RunConfig, environment: Environment | None, *, local_cluster: bool) -> Iterator[Check]:
    """What a run has beside model and prompts: its agent, and the resources and services of tools and rewards."""
    if config.agent.given and local_cluster:
        agent = str(config.agent.function or config.agent.command)
        refused = refusal("agent", lambda: child_environment(config.agent.env, where="agent.env"))
        yield refused or Check("agent", "ok", agent)
    if environment is None:
        return
    declaring = [tool.name for tool in environment.tools if tool.declares]
    if refused := refusal("tools", lambda: check_tools(config, environment, started_here=local_cluster)):
        yield refused
    elif declaring:
        yield Check("tools", "ok", f"{', '.join(declaring)}: the largest worker has what a call takes")
    if config.services.named or environment.asked_services:
        refused = refusal("services", lambda: check_services(config, environment))
        yield refused or Check("services", "ok", ", ".join(config.services.named))


def _data_checks(config: RunConfig, environment: Environment | None, *, local_cluster: bool) -> Iterator[Check]:
    """Files of the model; then whether context, evaluation and prompts fit each other."""
    try:
        directory = resolve_model(config.model.path)
    except LibraError:
        return  # the check of the model tells it
    if not isinstance(directory, Path):
        return
    refused = refusal("model files", lambda: checked_model(config.model.path))
    yield refused or Check("model files", "ok", f"{directory}: whole, with a tokenizer that fits")
    if refused is not None:
        return
    model = checked_model(config.model.path)
    if config.distil.teacher is not None:
        taught = "has the tokenizer of the student"
        yield refusal("teacher", lambda: check_teacher(config, model)) or Check("teacher", "ok", taught)
    if environment is not None:
        fits = f"evaluation and prompts fit {config.rollout.max_context_tokens:,} tokens of context"
        check = refusal("data", lambda: check_data(config, environment, model, started_here=local_cluster))
        yield check or Check("data", "ok", fits)


def refusal(name: str, check: Callable[[], object]) -> Check | None:
    """The failed check of what ``check`` refuses, with what its message has to type; None if it refuses nothing."""
    try:
        check()
    except LibraError as error:
        detail, _, advice = " ".join(str(error).split()).rpartition("; ")
        return Check(name, "fail", detail or advice, advice.removeprefix("type ") if detail else "")
    return None

"""The checks of a run before any worker starts: one list, for the start of a run and for `libra doctor`.

A start goes through `CHECKS` in order and stops at the first error (`libra.driver.run_start`); the
doctor reports each check in a line.
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
from libra.driver.start_records import check_free
from libra.envs import Environment
from libra.errors import LibraError
from libra.model_loader import build_tokenizer, loader_of
from libra.orderings import check_ordering
from libra.processes.child_environment import child_environment
from libra.train.own_parts import check_own_parts
from libra.worker.engine.engine_factory import check_engine


@dataclass(slots=True)
class Preflight:
    """Input and results of the checks of one run.

    Attributes
    ----------
    config : RunConfig
        With its layout once that was checked.
    started_here : bool
        Whether the run starts its own workers on this machine.
    directory : Path or None
        The directory of a new run with a name.
    fetches : bool
        Whether a model on a hub is fetched. Checks that need its files are left out otherwise.
    given_client : bool
        Whether the run uses a client that its caller has connected.
    environment, model : optional
        None before they are made, or if they were refused.
    """

    config: RunConfig
    started_here: bool
    directory: Path | None = None
    fetches: bool = False
    given_client: bool = False
    environment: Environment | None = None
    model: ModelFiles | None = None

    def own_parts(self) -> str:
        """Parts of the user's own can be imported and follow their protocols."""
        config = self.config
        check_own_parts(config.trainer)
        loader_of(config.model.loader)
        check_ordering(config.policy.name, objective=config.policy.objective, patience=config.policy.patience)
        return ", ".join(name for _, name in worker_parts(config)) or "none"

    def run_name(self) -> str:
        """The directory of a new run is free."""
        if self.directory is None:
            return ""
        check_free(self.directory)
        return f"{self.directory} is free"

    def model_files(self) -> str:
        """Files of the model, whole, with a tokenizer that fits."""
        try:
            found = resolve_model(self.config.model.path)
        except LibraError:
            if self.fetches:
                raise
            return ""  # the doctor's check of the machine tells it
        if not self.fetches and not isinstance(found, Path):
            return ""
        self.model = checked_model(self.config.model.path)
        return f"{self.model.directory}: whole, with a tokenizer that fits"

    def layout(self) -> str:
        """The layout can start; with ``planner.layout=auto`` it is planned first."""
        self.config = laid_out(self.config, started_here=not self.given_client)
        return "can start"

    def engine(self) -> str:
        """The engine is installed, and can do what the configuration asks of it."""
        if not self.started_here:
            return ""
        check_engine(self.config)
        return str(self.config.rollout.engine)

    def agent(self) -> str:
        """Variables that an agent is to get are set."""
        if not self.started_here:
            return ""
        child_environment(self.config.agent.env, where="agent.env")
        return str(self.config.agent.function or self.config.agent.command) if self.config.agent.given else ""

    def tools(self) -> str:
        """The largest worker has what a call takes."""
        if self.environment is None:
            return ""
        check_tools(self.config, self.environment, started_here=self.started_here)
        declaring = [tool.name for tool in self.environment.tools if tool.declares]
        return f"{', '.join(declaring)}: the largest worker has what a call takes" if declaring else ""

    def services(self) -> str:
        """Services that rewards and tools ask are there."""
        if self.environment is None:
            return ""
        check_services(self.config, self.environment)
        return ", ".join(self.config.services.named)

    def data(self) -> str:
        """Model, prompts and evaluation fit each other and section ``rollout``."""
        config, model, environment = self.config, self.model, self.environment
        if model is None or environment is None:
            return ""
        check_positions(model, config.rollout.max_context_tokens)
        check_evaluation(config, environment)
        loader = config.model.loader
        template = ChatTemplate(model) if loader is None else LoadedTemplate(build_tokenizer(loader, model.directory))
        if environment.tools:
            template.check_tools(environment.tool_schemas)
        check_prompts(config, environment, template, started_here=self.started_here)
        return f"evaluation and prompts fit {config.rollout.max_context_tokens:,} tokens of context"

    def teacher(self) -> str:
        """The teacher is a whole model with the tokenizer of the student."""
        if self.model is None:
            return ""
        check_teacher(self.config, self.model)
        return "has the tokenizer of the student" if self.config.distil.teacher is not None else ""


CHECKS: dict[str, Callable[[Preflight], str]] = {
    "own parts": Preflight.own_parts,
    "run name": Preflight.run_name,
    "model files": Preflight.model_files,
    "layout": Preflight.layout,
    "engine": Preflight.engine,
    "agent": Preflight.agent,
    "tools": Preflight.tools,
    "services": Preflight.services,
    "data": Preflight.data,
    "teacher": Preflight.teacher,
}
"""Each raises a LibraError or returns its finding; empty if it does not apply. Checks from the engine on may use
layout, environment and model."""
BEFORE_ENVIRONMENT = ("own parts", "run name", "model files", "layout")
"""Checks that a start makes before it builds the environment."""

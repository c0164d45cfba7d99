"""A run before it has a cluster: its checked configuration, its directory, and what earlier starts committed.

Invariants
----------
1. Whatever can be refused here is refused before a directory or a process exists.
2. A run directory belongs to one run: an existing one is refused unless it is to be resumed. One driver at a time has it; a
   resumed run takes the next epoch, which fences off every process of an older one.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from libra.config import RunConfig, dump_config, resolve_model
from libra.config.resume_changes import check_unchanged
from libra.driver.chat_template import ChatTemplate, LoadedTemplate
from libra.driver.damage import refuse_damaged
from libra.driver.early_checks import run_directory
from libra.driver.given_objects import check_environment, check_score
from libra.driver.launch_layout import laid_out
from libra.driver.main_script import check_main
from libra.driver.model_checks import ModelFiles, check_positions, checked_model
from libra.driver.prompt_checks import check_evaluation, check_prompts
from libra.driver.resume import check_resumable, read_point
from libra.driver.run_directory import check_free, make_directory, remove_unless_started
from libra.driver.run_lock import lock_run, refuse_running
from libra.driver.service_needs import check_services
from libra.driver.start_records import log_start, newest_logged
from libra.driver.teacher_checks import check_teacher
from libra.driver.tool_needs import check_tools
from libra.driver.upcoming_prompts import UpcomingPrompts
from libra.graph.iteration import ResumePoint, Score
from libra.model_loader import build_tokenizer, loader_of
from libra.observe.trackers import check_trackers
from libra.orderings import check_ordering
from libra.planner.from_config import check_runnable
from libra.processes.child_environment import child_environment
from libra.store.epochs import take_epoch
from libra.store.trajectory_journal import sweep_logs
from libra.train.checkpoint_directory import checked_start
from libra.train.own_parts import check_own_parts
from libra.transport import new_secret
from libra.worker.engine_factory import check_engine
from libra.worker.run_spec import RunSpec

if TYPE_CHECKING:
    from distributed import Client

    from libra.envs import Environment


@dataclass(frozen=True, slots=True)
class RunRequest:
    """The request for a run: a configuration, and Python objects that no configuration can name.

    Attributes
    ----------
    config : RunConfig
    environment : Environment or None
        Replaces the one that ``config.environment`` names.
    score : callable or None
        Adds a user's own node to every group; see `libra.graph.iteration.Score`.
    client : distributed.Client or None
        A connected client to use; the cluster behind it is left as it is.
    resume : bool
        Continue the run that the directory has, from what it committed.
    """

    config: RunConfig
    environment: Environment | None = None
    score: Score | None = None
    client: Client | None = None
    resume: bool = False

    @property
    def directory(self) -> Path:
        """The run directory."""
        return run_directory(self.config)


@dataclass(frozen=True, slots=True)
class RunStart:
    """One start of a run: what all parts of the driver share.

    Attributes
    ----------
    spec : RunSpec
    environment : Environment
        The driver's own.
    point : ResumePoint
        What earlier starts committed.
    score : callable or None
    resumed : bool
        Whether there were earlier starts.
    """

    spec: RunSpec
    environment: Environment
    point: ResumePoint
    score: Score | None
    resumed: bool

    @property
    def config(self) -> RunConfig:
        """The configuration, with the layout that was planned for it."""
        return self.spec.config

    def upcoming_prompts(self) -> UpcomingPrompts:
        """The prompts of upcoming iterations; each reader has its own, so that a failure affects one reader only."""
        return UpcomingPrompts(self.environment, self.config.trainer.prompts)


def prepare(request: RunRequest, exits: ExitStack, start: ExitStack) -> RunStart:
    """Check the request, make or read the run directory, and take its lock until ``exits`` closes.

    ``start`` is closed with the error of a start that fails, and then removes the directory of a new run.
    """
    check_environment(request.environment)
    check_score(request.score)
    check_parts(request.config)
    check_trackers(request.config.observe.trackers)
    started_here = request.client is None and request.config.cluster.scheduler is None
    if started_here:
        check_main()
    if not request.resume:
        check_free(request.directory)
    model = checked_model(request.config.model.path)
    config = laid_out(request.config, started_here=request.client is None)
    spec = _spec(config, request, model, started_here=started_here)
    environment = spec.make_environment()
    if config.planner.replan:
        check_runnable(config)
    if started_here:
        child_environment(config.agent.env, where="agent.env")
        check_engine(config)
    check_tools(config, environment, started_here=started_here)
    check_services(config, environment)
    check_data(config, environment, model, started_here=started_here)
    check_teacher(config, model)
    if request.resume:
        if spec.directory.is_dir():
            refuse_running(spec.directory)  # whose files may come and go while they are checked
            refuse_damaged(spec.directory)
        check_resumable(spec.directory, request.environment, request.score)
        first = check_unchanged(spec.directory, config)
        iterations = config.run.iterations if config.run.iterations != first.run.iterations else None
    else:
        given = {"environment": request.environment is not None, "score": request.score is not None}
        made, iterations = make_directory(spec, dump_config(spec.config), given), None
    exits.callback(lock_run(spec.directory).release)
    if not request.resume:
        remove_unless_started(spec.directory, made, start)
    spec = replace(spec, epoch=take_epoch(spec.epochs_dir, above=newest_logged(spec.directory)).number)
    log_start(spec.directory, spec.epoch, iterations)
    sweep_logs(spec.journal_dir)  # of writers that have ended or are fenced off
    return RunStart(spec, environment, read_point(spec), request.score, request.resume)


def check_parts(config: RunConfig) -> None:
    """ConfigError if a part of the user's own cannot be imported, or does not do what its protocol says."""
    check_own_parts(config.trainer)
    loader_of(config.model.loader)
    check_ordering(config.policy.name, objective=config.policy.objective, patience=config.policy.patience)


def check_data(config: RunConfig, environment: Environment, model: ModelFiles, *, started_here: bool) -> None:
    """Check that model, prompts and evaluation fit each other and section ``rollout``."""
    check_positions(model, config.rollout.max_context_tokens)
    check_evaluation(config, environment)
    loader = config.model.loader
    template = ChatTemplate(model) if loader is None else LoadedTemplate(build_tokenizer(loader, model.directory))
    if environment.tools:
        template.check_tools(environment.tool_schemas)
    check_prompts(config, environment, template, started_here=started_here)


def _spec(config: RunConfig, request: RunRequest, model: ModelFiles, *, started_here: bool) -> RunSpec:
    """The run, without an epoch. Workers of another cluster resolve a Hugging Face id on their own machines."""
    model_dir = str(model.directory if started_here else resolve_model(config.model.path))
    start = config.run.from_checkpoint
    if start is not None:
        start = checked_start(start, model.directory, config.model.dtype)
    return RunSpec(
        config.run.name or "", 0, request.directory, model_dir, config, request.environment, start, secret=new_secret()
    )

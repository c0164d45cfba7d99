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
from libra.config.load import check_unchanged
from libra.driver.damage import refuse_damaged
from libra.driver.early_checks import check_main, run_directory
from libra.driver.model_checks import ModelFiles
from libra.driver.part_checks import check_environment, check_score
from libra.driver.preflight import BEFORE_ENVIRONMENT, CHECKS, Preflight
from libra.driver.prompt_checks import UpcomingPrompts
from libra.driver.resume import check_resumable, read_point
from libra.driver.run_lock import lock_run, refuse_running
from libra.driver.start_records import log_start, make_directory, newest_logged, remove_unless_started
from libra.graph.iteration import ResumePoint, Score
from libra.observe.metrics import check_trackers
from libra.planner.from_config import check_runnable
from libra.store.run_records import take_epoch
from libra.store.trajectory_journal import sweep_logs
from libra.train.checkpoint_directory import checked_start
from libra.transport import new_secret
from libra.worker.run_spec import RunSpec

if TYPE_CHECKING:
    from distributed import Client

    from libra.envs import Environment


@dataclass(frozen=True, slots=True)
class RunRequest:
    """The request for a run: a configuration, and Python objects that no configuration can name.

    Attributes
    ----------
    environment : Environment or None
        Replaces the one that ``config.environment`` names.
    score : callable or None
        Adds a user's own node to every group; see `libra.graph.iteration.Score`.
    client : distributed.Client or None
        A connected client to use; its cluster is left unchanged.
    resume : bool
        Continue the run in the directory from its committed state.
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
    """One start of a run, shared by all parts of the driver; ``point`` is the state that earlier starts committed."""

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
    check_trackers(request.config.observe.trackers)
    started_here = request.client is None and request.config.cluster.scheduler is None
    if started_here:
        check_main()
    known = Preflight(
        request.config,
        started_here,
        None if request.resume else request.directory,
        fetches=True,
        given_client=request.client is not None,
    )
    for name in BEFORE_ENVIRONMENT:
        CHECKS[name](known)
    assert known.model is not None
    config = known.config
    spec = _spec(config, request, known.model, started_here=started_here)
    environment = known.environment = spec.make_environment()
    if config.planner.replan != "off":
        check_runnable(config)
    for name, check in CHECKS.items():
        if name not in BEFORE_ENVIRONMENT:
            check(known)
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


def _spec(config: RunConfig, request: RunRequest, model: ModelFiles, *, started_here: bool) -> RunSpec:
    model_dir = str(model.directory if started_here else resolve_model(config.model.path))
    start = config.run.from_checkpoint
    if start is not None:
        start = checked_start(start, model.directory, config.model.dtype)
    return RunSpec(
        config.run.name or "", 0, request.directory, model_dir, config, request.environment, start, secret=new_secret()
    )

"""A run before it has a cluster: checked configuration, directory, and state of earlier starts.

Invariants
----------
1. Whatever can be refused here is refused before a directory or a process exists.
2. An existing run directory is refused unless its run is resumed. One driver at a time has it; a
   resumed run takes the next epoch, which fences off every process of older epochs.
3. The same directory gives the same `ResumePoint`. Batches are committed in order without gaps:
   batch ``j`` opens only after step ``j - 1``, whose version may still be in publication.
4. A group is consumed by a committed batch, committed and waiting, or not committed. Only
   uncommitted groups are generated, and only what their journals lack.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from libra.config import RunConfig, dump_config, resolve_model
from libra.config.load import check_unchanged
from libra.driver.damage import refuse_damaged
from libra.driver.early_checks import check_main
from libra.driver.model_checks import ModelFiles
from libra.driver.part_checks import check_environment, check_score
from libra.driver.preflight import BEFORE_ENVIRONMENT, CHECKS, Preflight
from libra.driver.rundir import lock_run, make_directory, refuse_running, remove_unless_started, run_directory
from libra.errors import ConfigError, RunDirectoryError
from libra.graph.iteration import ResumePoint, Score
from libra.observe.metrics import check_trackers
from libra.planner.from_config import check_runnable
from libra.policy.waves import GroupId
from libra.store.quantum_records import GenerationRecord
from libra.store.run_records import batch_path, group_path, groups_of, read_batch, read_group, read_waves
from libra.store.start_records import GIVEN_FILE, log_start, newest_logged, read_given, take_epoch
from libra.store.trajectory_journal import Journal, sweep_logs
from libra.train.checkpoint_directory import checked_start
from libra.transport import new_secret
from libra.worker.run_spec import RunSpec

if TYPE_CHECKING:
    from distributed import Client

    from libra.envs import Environment


@dataclass(frozen=True, slots=True)
class RunRequest:
    """The request for a run: a configuration, and Python objects that no configuration can name."""

    config: RunConfig
    environment: Environment | None = None  # replaces the configured one
    score: Score | None = None  # adds a user's node to every group; see `libra.graph.iteration.Score`
    client: Client | None = None  # connected; its cluster is left unchanged
    resume: bool = False  # whether to continue the directory's run from its committed state

    @property
    def directory(self) -> Path:
        return run_directory(self.config)


@dataclass(frozen=True, slots=True)
class RunStart:
    """One start of a run for all parts of the driver; ``point``: what earlier starts committed."""

    spec: RunSpec
    environment: Environment
    point: ResumePoint
    score: Score | None
    resumed: bool

    @property
    def config(self) -> RunConfig:
        """The configuration with its planned layout."""
        return self.spec.config


def prepare(request: RunRequest, exits: ExitStack, start: ExitStack) -> RunStart:
    """Check the request, make or read the run directory, and lock it until ``exits`` closes.

    If the start fails, its error closes ``start``, which removes the directory of a new run.
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
    spec = _spec(request, config, known.model, started_here=started_here)
    environment = known.environment = spec.make_environment()
    if config.planner.replan != "off":
        check_runnable(config)
    for name, check in CHECKS.items():
        if name not in BEFORE_ENVIRONMENT:
            check(known)
    directory, iterations = spec.directory, None
    if request.resume:
        if directory.is_dir():
            refuse_running(directory)  # files may come and go during the check
            refuse_damaged(directory)
        _check_resumable(request)
        if config.run.iterations != check_unchanged(directory, config).run.iterations:
            iterations = config.run.iterations
        exits.callback(lock_run(directory).release)
    else:
        given = {"environment": request.environment is not None, "score": request.score is not None}
        made = make_directory(spec, dump_config(spec.config), **given)
        exits.callback(lock_run(directory).release)
        remove_unless_started(directory, made, start)
    spec = replace(spec, epoch=take_epoch(spec.epochs_dir, above=newest_logged(directory)).number)
    log_start(directory, spec.epoch, iterations)
    sweep_logs(spec.journal_dir)  # left by writers that have ended or are fenced off
    return RunStart(spec, environment, read_point(spec), request.score, request.resume)


def _spec(request: RunRequest, config: RunConfig, model: ModelFiles, *, started_here: bool) -> RunSpec:
    model_dir = str(model.directory if started_here else resolve_model(config.model.path))
    start = config.run.from_checkpoint
    if start is not None:
        start = checked_start(start, model.directory, config.model.dtype)
    return RunSpec(
        config.run.name or "", 0, request.directory, model_dir, config, request.environment, start, secret=new_secret()
    )


def _check_resumable(request: RunRequest) -> None:
    directory = request.directory
    if not (directory / GIVEN_FILE).is_file():
        raise RunDirectoryError(f"{directory}: no run to resume here; type the directory of a run, such as runs/NAME")
    given = read_given(directory)
    for name, now in (("environment", request.environment), ("score", request.score)):
        if given[name] != (now is not None):
            was, is_now = ("with", "without") if given[name] else ("without", "with")
            raise ConfigError(
                f"{directory}: this run was started {was} an object as its {name}, and would continue {is_now} one; resume it "
                f"where it was started, with libra.train(..., run__name={directory.name!r}, resume=True) and the same arguments"
            )


def read_point(spec: RunSpec) -> ResumePoint:
    """The state that a run's files record. Raises StoreError if a file is torn."""
    members: list[tuple[GroupId, ...]] = []
    while batch_path(spec.batches_dir, len(members)).exists():
        rows = read_batch(spec.batches_dir, len(members))
        members.append(tuple(dict.fromkeys((tid.iteration, tid.group) for tid in rows)))
    names = (path.stem.split("-") for path in spec.groups_dir.glob("[!.]*.group"))
    committed = frozenset((split, int(iteration), int(group)) for split, iteration, group in names)
    consumed = {group for batch in members for group in batch}
    waves = [groups_of(rows) for rows in read_waves(spec.waves_dir, len(members))]
    started: dict[GroupId, int] = {}
    journal = Journal(spec.journal_dir)
    for path in spec.journal_dir.glob("train-*.0000.rec"):
        trajectory = path.name.removesuffix(".0000.rec")
        group = (int(trajectory.split("-")[1]), int(trajectory.split("-")[2]))
        if ("train", *group) in committed or group in consumed:
            continue
        for record in journal.read(trajectory):
            if isinstance(record, GenerationRecord) and len(record.weight_versions):
                oldest = int(record.weight_versions.min())
                started[group] = min(oldest, started.get(group, oldest))
    for split, iteration, number in committed:
        if split == "train" and (iteration, number) not in consumed:
            trajectories = read_group(group_path(spec.groups_dir, iteration, number))
            versions = [each.oldest_version for each in trajectories if each.num_action_tokens]
            started[iteration, number] = min(versions, default=iteration - spec.config.run.eta)
    return ResumePoint(members, committed, started, waves)

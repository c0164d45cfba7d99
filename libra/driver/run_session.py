"""The driver of a run: prepares and registers it, submits a graph per iteration, reads results.

Invariants
----------
1. At most ``eta + 2`` iterations are submitted and unfinished: those that may run, and one at its
   gate.
2. Resources are released in reverse order of acquisition (ExitStack).
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from distributed import Client

from libra.cluster.hardware_inventory import cluster_gpu
from libra.config import RunConfig
from libra.driver.callbacks import Callbacks
from libra.driver.planning import Planning, UpcomingPrompts
from libra.driver.run_client import RunClient, connect_run, progress_read, register_run, scheduler_loss_named
from libra.driver.run_console import Interruption, RunLogs, RunSummary, resume_words
from libra.driver.run_start import RunRequest, prepare
from libra.driver.rundir import named
from libra.driver.submitted_graphs import RunCheckpoints, SubmittedGraphs
from libra.errors import BatchFailed, LibraError, MismatchAlarm, NothingToLearn, shell_path
from libra.facts import prompts_named
from libra.graph.iteration import Score, evaluation_graph, numbers_graph, restored
from libra.graph.training_nodes import pause_reason
from libra.observe.metrics import EVERY, MetricsLog, Trackers, read_metrics, sample_texts
from libra.observe.progress import RunProgress, StartStages
from libra.observe.trajectory_view import load_decode
from libra.store.run_records import read_batch_facts, read_evaluations, run_here, step_numbers
from libra.types import FailureClass, Trajectory
from libra.worker.training.batch_rows import members_of
from libra.worker.trajectory.graded_members import NOT_YET

if TYPE_CHECKING:
    from distributed import SpecCluster

    from libra.envs import Environment
    from libra.worker.run_spec import RunSpec

logger = logging.getLogger(__name__)

NO_SIGNAL_BATCHES = 3
"""Batches in a row without an advantage after which ``trainer.no_signal=stop`` ends the run."""


class Session:
    """A started run, stepped by its caller; a context manager.

    Parameters
    ----------
    config, environment, score, client, resume
        See `libra.driver.run_start.RunRequest`.
    callbacks, interruption, stages : optional
        User functions (default: section ``observe``), handler of Ctrl-C, display of the start.

    Attributes
    ----------
    config : RunConfig
        The configuration; after the start with the planned layout.
    client, cluster : distributed.Client, distributed.SpecCluster or None
        The client, and the local cluster if the session started it.
    scheduler : RunClient
        Worker roles, engine slots and bucket boundaries, among others.
    evaluations : list of dict
        Outcomes of evaluations by earlier starts, by version.
    """

    client: Client
    cluster: SpecCluster | None
    scheduler: RunClient
    graphs: SubmittedGraphs
    checkpoints: RunCheckpoints
    metrics: MetricsLog

    def __init__(
        self,
        config: RunConfig,
        *,
        environment: Environment | None = None,
        score: Score | None = None,
        client: Client | None = None,
        resume: bool = False,
        callbacks: Callbacks | None = None,
        interruption: Interruption | None = None,
        stages: StartStages | None = None,
    ) -> None:
        self._interruption = interruption or Interruption()  # not entered: it does nothing
        self._stages = stages or StartStages(enabled=False)
        self.config = named(config)
        self.callbacks = Callbacks(config) if callbacks is None else callbacks
        self._request = RunRequest(self.config, environment, score, client, resume)
        self._given = environment is not None or score is not None
        self.evaluations: list[dict[str, Any]] = []
        self._evaluated_s = 0.0  # spent in evaluations since the last iteration ended
        self.planning: Planning | None = None
        self._exits = ExitStack()

    def __enter__(self) -> Self:
        with self._loss_named(), ExitStack() as start, self._exits:
            try:
                self._begin(start)
            except BaseException:
                self._stages.end(failed=True)
                self._interruption.announce()
                raise
            self._exits = self._exits.pop_all()
            start.pop_all()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, KeyboardInterrupt):
            self._interruption.announce()
        self.close()

    def close(self) -> None:
        """End the run on its cluster, and release everything; stops a cluster started here."""
        self._exits.close()

    def _loss_named(self) -> AbstractContextManager[None]:
        address = self.config.cluster.scheduler
        return scheduler_loss_named(lambda: getattr(self, "client", None), self.directory, address)

    def _begin(self, new: ExitStack) -> None:
        exits, request = self._exits, self._request
        self._interruption.of(self.directory, resume_words(self.directory, self._given))
        self._interruption.starts()
        exits.enter_context(run_here(self.directory))
        self._stages.begin("model")
        self._start = start = prepare(request, exits, new)
        self.config = start.config
        logs = exits.enter_context(RunLogs(self.directory))
        self._stages.begin("workers")
        self.client, self.cluster = connect_run(start.config, request.client, logs.path.parent, exits)
        observe, plain = start.config.observe, start.config.model_dump(mode="json")
        trackers = Trackers(observe.trackers, self.directory, start.spec.run, plain)
        self.metrics = MetricsLog(self.directory, trackers)
        exits.callback(self.metrics.close)
        self.scheduler = RunClient(self.client, start.spec.run, start.spec.epoch)
        self._stages.begin("engines")
        register_run(self.scheduler, start, self.cluster, exits)
        self._stages.begin("check")
        self.graphs = SubmittedGraphs(self.client, start)
        exits.callback(self.graphs.release)
        self._recover()
        self.checkpoints = RunCheckpoints(start.spec, self.graphs.result)
        exits.callback(self.checkpoints.release)
        # one object per reader (policy, planner), so that a failure affects one reader only
        self._prompts, planned = (UpcomingPrompts(start.environment, start.config.trainer.prompts) for _ in range(2))
        if start.config.planner.replan != "off":
            gpu = "" if self.config.planner.gpu else cluster_gpu(self.client)
            self.planning = Planning(start.spec, self.scheduler, planned, self.metrics.write, gpu)
            self.planning.begin(self.first)
        self._stages.end()
        self._interruption.finished(self.first, start.config.run.iterations)

    def _recover(self) -> None:
        spec = self.spec
        done: dict[str, Any] = self.graphs.compute(restored(spec, self.first))
        if not self._start.resumed:
            return
        logger.info(
            "run %s continues as epoch %d with iteration %d: %d steps repeated in %.1f s, %d trajectories stored late",
            spec.run, spec.epoch, self.first, len(done["replayed"]), done["restore_s"], done["stored"],
        )  # fmt: skip
        written = {row["step"] for row in read_metrics(self.directory) if "reward" in row}
        steps = {step.pop("step"): step for step in done["replayed"]}
        for batch in sorted(set(range(self.first)) - written):
            numbers = self.graphs.compute(numbers_graph(spec, batch))
            self._write_metrics(batch, {**numbers, **(steps.get(batch) or step_numbers(spec.steps_dir, batch))})
        self.evaluations = read_evaluations(spec.evaluations_dir, self.first)

    @property
    def spec(self) -> RunSpec:
        return self._start.spec

    @property
    def directory(self) -> Path:
        return self._request.directory

    @property
    def first(self) -> int:
        """The first iteration of this start; 0 unless resumed."""
        return self._start.point.batches

    @property
    def dashboard(self) -> str:
        return str(self.client.dashboard_link).replace("/status", "/libra")

    def iterations(self) -> Iterator[dict[str, Any]]:
        """Run all iterations; yields each iteration's metrics at its end."""
        with self._loss_named():
            yield from self._iterations()

    def _iterations(self) -> Iterator[dict[str, Any]]:
        total, eta = self.config.run.iterations, self.config.run.eta
        submitted, ended_s, without_signal = self.first, time.time(), 0
        self._evaluated_s = 0.0
        for k in range(self._start.point.oldest_left(self.config.trainer.prompts), self.first):
            self._name_prompts(k)
            self.graphs.submit_left(k)
        for k in range(self.first, total):
            while submitted < min(k + eta + 2, self._next_evaluation(k)):
                self._name_prompts(submitted)
                self.graphs.submit(submitted)
                submitted += 1
            values, checkpoint = self.graphs.finish(k)
            began_s, ended_s = ended_s, time.time()
            values["iteration_s"] = ended_s - began_s
            values["tokens_per_s"] = values["generated_tokens"] / values["iteration_s"]
            if not self.config.evaluation.every:
                self.checkpoints.score(k + 1, values["reward"])
            self._write_metrics(k, values)  # before the group records are removed from which they could be made
            if self.callbacks.any("on_batch"):
                self.callbacks.call("on_batch", k, self._members(k))
            self.callbacks.call("on_iteration", dict(values))
            self._track_samples(k)
            failed = self._all_failed(k, values)
            self.checkpoints.follow(k, checkpoint, last=k + 1 == total)
            if self.planning is not None:
                self.planning.after(k, values | {"evaluation_s": self._evaluated_s}, total - k - 1)
            self._evaluated_s = 0.0
            self._interruption.finished(k + 1, total)
            del checkpoint  # a future that is named here outlives the iteration
            yield values
            if failed:
                raise BatchFailed(failed)
            without_signal = without_signal + 1 if values["no_signal"] else 0
            self._check_signal(without_signal, values["no_signal"])
            reason = pause_reason(self.spec, {"step": k, **values}) if k + 1 < total else None
            if reason is not None:
                raise MismatchAlarm(reason)

    def evaluate(self, version: int) -> dict[str, Any]:
        """Evaluate the held-out prompts at ``version``, the newest published version."""
        began_s = time.time()
        with self._loss_named():
            result: dict[str, Any] = self.graphs.compute(evaluation_graph(self.spec, version, self._start.point).end)
        wall_s = time.time() - began_s
        self._evaluated_s += wall_s
        bins = {f"evaluation/reward/{name}": mean for name, (mean, _) in result["bins"].items()}
        self.metrics.write(version, {"evaluation/reward": result["reward"], **bins, "evaluation/wall_s": wall_s})
        if self.config.evaluation.every:
            self.checkpoints.score(version, result["reward"])
        self.callbacks.call("on_evaluation", dict(result))
        return result

    def _members(self, k: int, groups: int | None = None) -> list[Trajectory]:
        rows = read_batch_facts(self.spec.batches_dir, k)["groups"][:groups]
        return members_of({"members": rows}, self.spec.groups_dir)

    def _track_samples(self, k: int) -> None:
        trackers = self.metrics.trackers
        if trackers and (k % EVERY == 0 or k + 1 == self.config.run.iterations):
            with contextlib.suppress(LibraError):
                trackers.texts(k, sample_texts(self._members(k, 1), load_decode(self.directory)))

    def _next_evaluation(self, k: int) -> int:
        total, every = self.config.run.iterations, self.config.evaluation.every
        return min(total, (k // every + 1) * every) if every else total

    def _check_signal(self, in_a_row: int, cause: str) -> None:
        trainer = self.config.trainer
        if trainer.no_signal == "stop" and in_a_row >= NO_SIGNAL_BATCHES:
            raise NothingToLearn(
                f"trainer.no_signal: nothing to learn in {in_a_row} iterations in a row: {cause}. See libra inspect "
                f"{shell_path(self.directory)}; to go on, type libra resume {shell_path(self.directory)} trainer.no_signal=warn"
            )

    def _all_failed(self, k: int, values: Mapping[str, Any]) -> str:
        if not 0 < values["trajectories"] == values["left_out"]:
            return ""
        members = self._members(k)
        if any(m.failure is FailureClass.WORKER or m.failure_detail == NOT_YET for m in members):
            return ""
        first, last = members[0], k + 1 == self.config.run.iterations
        return (
            f"iteration {k}: all {len(members)} trajectories failed, and none because of the model; {first.failure}: "
            f"{' '.join(first.failure_detail.split())}. Mend that, then type "
            f"{resume_words(self.directory, self._given, iterations=k + 2 if last else None)}"
        )

    def _name_prompts(self, k: int) -> None:
        names = self._prompts.names(k)
        if names is not None:
            self.scheduler.tell(prompts_named("train", k, names))

    def _write_metrics(self, k: int, values: dict[str, Any]) -> None:
        numbers = {name: float(value) for name, value in values.items() if isinstance(value, int | float)}
        self.metrics.write(k, numbers | self.scheduler.numbers())


def evaluation_is_due(config: RunConfig, version: int) -> bool:
    every = config.evaluation.every
    return bool(config.evaluation.prompts) and (
        version in (0, config.run.iterations) or (every > 0 and version % every == 0)
    )


def run(
    config: RunConfig,
    *,
    environment: Environment | None = None,
    score: Score | None = None,
    client: Client | None = None,
    resume: bool = False,
    callbacks: Mapping[str, Callable[..., object] | None] | None = None,
    interruption: Interruption | None = None,
    stages: StartStages | None = None,
) -> RunSummary:
    """Run ``config`` to its end, as ``libra run``, ``libra resume`` and ``libra.train`` do."""
    began_s, called = time.time(), Callbacks(config, callbacks)
    with ExitStack() as exits:
        interruption = interruption or exits.enter_context(Interruption())
        stages = stages or StartStages(enabled=config.observe.progress)
        session = exits.enter_context(
            Session(
                config, environment=environment, score=score, client=client, resume=resume, callbacks=called,
                interruption=interruption, stages=stages,
            )
        )  # fmt: skip
        config = session.config
        summary = RunSummary(session.spec.run, session.directory, evaluations=session.evaluations)
        progress = RunProgress(summary.run, config.run.iterations, session.dashboard, enabled=config.observe.progress)
        exits.enter_context(progress)
        exits.enter_context(progress_read(session.client, session.spec, progress.counted))
        _iterate(session, summary, progress)
        summary.checkpoint, summary.best = session.checkpoints.newest, session.checkpoints.best
    summary.wall_s = time.time() - began_s
    return summary


def _iterate(session: Session, summary: RunSummary, progress: RunProgress) -> None:
    config = session.config
    members = config.trainer.prompts * config.trainer.group_size

    def evaluate_if_due(version: int) -> None:
        made = {result["version"] for result in summary.evaluations}
        if evaluation_is_due(config, version) and version not in made:
            progress.part(f"evaluation of version {version}", config.evaluation.prompts)
            result = session.evaluate(version)
            summary.evaluations.append(result)
            progress.evaluated(f"version {version}", result["reward"], result["num"])

    evaluate_if_due(session.first)
    progress.part(f"iteration {session.first}", members)
    for values in session.iterations():
        summary.iterations.append(values)
        progress.iteration(values)
        evaluate_if_due(values["iteration"] + 1)
        if values["iteration"] + 1 < config.run.iterations:
            progress.part(f"iteration {values['iteration'] + 1}", members)

"""The driver of a run: makes its directory, finds or starts a cluster, submits one graph per iteration, reads the results.

Invariants
----------
1. A run directory belongs to one run: an existing one is refused before anything is started, unless it is to be resumed.
   One driver at a time has it; a resumed run takes the next epoch, which fences off every process of an older one.
2. At most ``eta + 2`` iterations are submitted and not finished: those that may run, and one that waits at its gate.
3. When an iteration's summary is back, its futures are released, those of unfinished groups when they finish; after 50
   iterations the scheduler holds as many tasks as after 5.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from distributed import Client, Future

from libra import keys
from libra.cluster.readiness import check_cluster
from libra.cluster.run_contact import RunContact, forget
from libra.config import RunConfig, dump_config, resolve_model
from libra.config.resume_changes import check_unchanged
from libra.driver.cluster_connection import address_of, connected
from libra.driver.engine_client import EngineControl
from libra.driver.launch_layout import check_workers, laid_out, layout_event
from libra.driver.plugin_registration import end_beside, register_beside
from libra.driver.resume import GIVEN_FILE, check_resumable, learned_before, lock_run, prune_groups, read_point
from libra.driver.role_client import RoleClient
from libra.driver.run_summary import RunSummary
from libra.driver.worker_imports import check_loadable
from libra.errors import ClusterError, LibraError, MismatchAlarm, RunDirectoryError
from libra.graph import nodes
from libra.graph.iteration import Graph, Score, evaluation_graph, iteration_graph, iteration_groups, node, on
from libra.graph.iteration import restored as restored_weights
from libra.graph.pause import pause_reason
from libra.graph.prompt_lengths import Questions, tell_names
from libra.observe.metrics import MetricsLog, read_metrics
from libra.observe.progress import RunProgress
from libra.policy import Admission
from libra.store.committer_lock import CommitterLock
from libra.store.epochs import take_epoch
from libra.store.trajectories import TrajectoryStore
from libra.store.trajectory_journal import sweep_logs
from libra.train.checkpoint import complete, newest, step_of
from libra.train.checkpoint_retention import KeptCheckpoints
from libra.train.start_checks import checked_start
from libra.weights.transfer import new_secret
from libra.worker.checkpoint_writer import checkpoint_is_due
from libra.worker.engine_factory import check_engine
from libra.worker.host import LibraHost, host_name
from libra.worker.reports import TOPIC
from libra.worker.run_spec import RunSpec

if TYPE_CHECKING:
    from distributed import SpecCluster

    from libra.driver.planning import Planning
    from libra.envs import Environment

logger = logging.getLogger(__name__)

LOOK_S = 5.0
"""How often the driver looks by itself whether what it waits for is there."""


class Session:
    """A started run, stepped by its caller; a context manager.

    Parameters
    ----------
    config : RunConfig
    environment : Environment, optional
        An object to use instead of the one that ``config.environment`` names.
    score : callable, optional
        Adds a node of your own to every group; see `libra.graph.iteration.Score`.
    client : distributed.Client, optional
        A connected client to use; the cluster behind it is then left as it is.
    resume : bool
        Go on with the run that ``run.dir``/``run.name`` holds, from what it committed.

    Attributes
    ----------
    first : int
        Iteration it begins with; 0 unless it was resumed.
    evaluations : list of dict
        Outcomes of earlier starts of the run, by version.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        environment: Environment | None = None,
        score: Score | None = None,
        client: Client | None = None,
        resume: bool = False,
    ) -> None:
        name = config.run.name or time.strftime("run_%Y%m%d_%H%M%S")
        self.config = config.model_copy(
            update={"run": config.run.model_copy(update={"name": keys.check_run_name(name)})}
        )
        self.directory = (Path(config.run.dir) / name).absolute()
        self.environment, self.score, self.resume = environment, score, resume
        self.first = 0
        self.evaluations: list[dict[str, Any]] = []
        self._lock: CommitterLock | None = None
        self._pruned = 0
        self.client, self._own_client = client, client is None
        self._cluster: SpecCluster | None = None
        self._registered = self._hosted = False
        self._pending: dict[int, tuple[Future, list[Future], Future | None]] = {}
        self._saving: deque[tuple[int, Future]] = deque()
        self._carried: list[Future] = []
        self._held: dict[int, list[Future]] = {}
        self._wake = threading.Event()
        self._failed: Future | None = None
        self._planning: Planning | None = None
        self._evaluated_s = 0.0  # in which held-out questions were asked since the last iteration ended
        self.checkpoint: Path | None = None
        self.kept = KeptCheckpoints(
            self.directory / "checkpoints", keep=config.checkpoint.keep, keep_best=config.checkpoint.keep_best
        )

    # ---------------------------------------------------------------- start and end

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self) -> None:
        config = self.config = laid_out(self.config, started_here=self.client is None)
        model_dir = str(resolve_model(config.model.path))
        environment, start = self.environment, config.run.from_checkpoint
        if start is not None:
            start = checked_start(start, model_dir, config.model.dtype)
        # A wrong name or argument, a busy port, a directory that is taken: all told before anything starts.
        self.spec = RunSpec(
            config.run.name or "", 0, self.directory, model_dir, config, environment, start, secret=new_secret()
        )
        self._questions = Questions(self.spec.make_environment(), config.trainer.prompts)
        if config.planner.replan:
            from libra.planner.from_config import check_runnable

            check_runnable(config)
        if self.client is None and config.cluster.scheduler is None:
            from libra.cluster.local import check_port

            check_engine(config)
            check_port(config.cluster.dashboard_port)
        if self.resume:
            check_resumable(self.directory, environment, self.score)
            check_unchanged(self.directory, config)
        else:
            self._make_directory()
        self._lock = lock_run(self.directory)
        self.spec = replace(self.spec, epoch=take_epoch(self.spec.epochs_dir).number)
        sweep_logs(self.spec.journal_dir)  # of writers that are gone, or fenced off
        self.point = read_point(self.spec)
        self.first = self.point.batches
        if self.client is None:
            self.client, self._cluster = connected(config)
        check_cluster(self.client, config)
        if self._cluster is None:
            check_workers(config, self.client)
        self.metrics = MetricsLog(self.directory, tensorboard=config.observe.tensorboard)
        self._register()
        self._restore()
        if config.planner.replan:
            from libra.driver.planning import plan_beside

            self._planning = plan_beside(self._client, self.spec, self.metrics.write, self._tell, self.first)

    def _make_directory(self) -> None:
        if self.directory.exists() and any(self.directory.iterdir()):
            raise RunDirectoryError(
                f"run.dir/run.name: {self.directory} already holds files; a run never writes over another. "
                f"Type run.name=ANOTHER_NAME, or remove the directory; to go on with it, libra resume {self.directory}"
            )
        self.directory.mkdir(parents=True, exist_ok=True)
        (self.directory / "config.resolved.yaml").write_text(dump_config(self.config))
        given = {"environment": self.environment is not None, "score": self.score is not None}
        (self.directory / GIVEN_FILE).write_text(json.dumps(given) + "\n")
        TrajectoryStore.create(self.spec.store_path, {"run": self.spec.run, "model": self.config.model.path}).close()

    def _restore(self) -> None:
        """Bring weights and store to what is committed, and the metrics too; publishes the version to begin with."""
        restored: dict[str, Any] = self.compute(restored_weights(self.spec, self.first))
        if not self.resume:
            return
        logger.info(
            "run %s goes on as epoch %d with iteration %d: %d steps taken again in %.1f s, %d trajectories stored late",
            self.spec.run, self.spec.epoch, self.first, len(restored["replayed"]), restored["restore_s"],
            restored["stored"],
        )  # fmt: skip
        written = {row["step"] for row in read_metrics(self.directory) if "reward" in row}
        steps = {taken.pop("step"): taken for taken in restored["replayed"]}
        for batch in range(self.first):
            if batch not in written:
                with on(keys.GRADE):
                    facts = node(nodes.batch_numbers, self.spec.key("numbers", batch), self.spec.run, batch)
                self._write_metrics(batch, {**self.compute(facts), **steps.get(batch, {})})
        made = (nodes.read_evaluation(self.spec, version) for version in range(self.first + 1))
        self.evaluations = [result for result in made if result is not None]
        self.checkpoint = newest(self.directory / "checkpoints")

    def _register(self) -> None:
        from libra.scheduler import LibraPlugin

        client, config = self._client, self.config
        client.register_plugin(LibraPlugin())
        answer = client.sync(
            _rpc(client).libra_register_run,
            run=self.spec.run,
            epoch=self.spec.epoch,
            directory=str(self.directory),
            eta=config.run.eta,
            iterations=config.run.iterations,
            groups_per_batch=config.trainer.prompts,
            event_log=config.observe.event_log,
            restored=self._admission(),
            watchdog_s=config.watchdog.timeout_s,
            watchdog_restart=config.watchdog.restart,
            policy=config.policy.model_dump(),
            family=config.environment.name,
            learned=learned_before(self.directory) if self.resume else None,
        )
        if "error" in answer:
            raise ClusterError(f"run.name: {answer['error']}; type run.name=ANOTHER_NAME")
        self._registered = True
        register_beside(client, self.spec)
        check_loadable(client, self.spec)
        self._hosted = True
        client.register_plugin(LibraHost(self.spec))
        where = address_of(client, config)
        RunContact(self.spec.run, self.spec.epoch, where, config.cluster.hybrid_workers).write(self.directory)
        if config.planner.planned is not None:
            self._tell("layout_planned", layout_event(config.planner.planned))

    def _admission(self) -> dict[str, Any] | None:
        """What the plugin has to know of earlier starts of the run."""
        if not self.resume:
            return None
        return Admission.resumed(
            self.config.run.eta,
            self.config.trainer.prompts,
            version=-1,  # nothing is published yet in this epoch
            opened=dict(enumerate(self.point.members)),
            committed=(),  # their group nodes say so again
            started=self.point.started,
        ).snapshot()

    @property
    def _client(self) -> Client:
        assert self.client is not None, "the session has not been entered"
        return self.client

    @property
    def roles(self) -> RoleClient:
        """What asks for other roles of workers; of a run with ``cluster.hybrid_workers``."""
        return RoleClient(self._client, self.spec)

    @property
    def engines(self) -> EngineControl:
        """What asks for other slots of engines, and other bucket boundaries."""
        return EngineControl(self._client, self.spec)

    @property
    def dashboard(self) -> str:
        """Address of Libra's page in Dask's dashboard."""
        return str(self._client.dashboard_link).replace("/status", "/libra")

    def close(self) -> None:
        """Release everything; a cluster that the session started is stopped."""
        try:
            if self.client is not None and self.client.status == "running":
                self._end(self.client)
        finally:  # whatever the scheduler answered: processes, files and the lock are given back
            if self._cluster is not None:
                self._cluster.close()
                self._cluster = None
            if hasattr(self, "metrics"):
                self.metrics.close()
            if self._lock is not None:
                self._lock.release()

    def _tell(self, name: str, fields: Mapping[str, Any]) -> None:
        """Write an event of the planner's into the run's log."""
        told = {"kind": "plan", "run": self.spec.run, "epoch": self.spec.epoch, "event": name, "fields": fields}
        self._client.sync(_rpc(self._client).log_event, topic=TOPIC, msg=told)

    def _end(self, client: Client) -> None:
        held = [*self._carried, *(f for futures in self._held.values() for f in futures)]
        for future in [*held, *(saved for _, saved in self._saving)]:
            future.release()  # by hand: a traceback may hold on to them, and results would outlive the run
        if self._registered:
            forget(self.directory)
            client.sync(_rpc(client).libra_end_run, run=self.spec.run)
            end_beside(client, self.spec)
            if self._hosted and self._cluster is None:  # a cluster of our own stops with its workers
                try:
                    client.unregister_worker_plugin(host_name(self.spec.run))
                except KeyError as error:
                    logger.debug("a worker whose setup had failed had nothing to take back: %s", error)
        if self._own_client:
            client.close()

    # ---------------------------------------------------------------- work

    def compute(self, end: Any) -> Any:
        """Result of one node and all it needs."""
        return self._client.compute(end, optimize_graph=False).result()

    def evaluate(self, version: int) -> dict[str, Any]:
        """Ask the held-out questions at ``version``, which must be published and not yet replaced."""
        started_s = time.time()
        graph = evaluation_graph(self.spec, version, self.point)
        result: dict[str, Any] = self.compute(graph.end)
        for path in self.spec.groups_dir.glob(f"eval-{version:06d}-*.group"):
            path.unlink(missing_ok=True)  # they are in the store, and the outcome is written down
        wall_s = time.time() - started_s
        self._evaluated_s += wall_s
        self.metrics.write(version, {"evaluation/reward": result["reward"], "evaluation/wall_s": wall_s})
        if self.config.evaluation.every:
            self._score(version, result["reward"])
        return result

    def _score(self, version: int, reward: float) -> None:
        """Say what a version is worth, by the one measure of this run (`libra.train.checkpoint_retention`)."""
        if version and checkpoint_is_due(self.config, version):
            self.kept.score(version, reward)
            self.kept.tidy()

    def _submit(self, k: int) -> None:
        tell_names(self._client, self.spec, self._questions, k)
        graph: Graph = iteration_graph(self.spec, k, score=self.score, point=self.point)
        wanted = [graph.end, *graph.groups] + ([graph.checkpoint] if graph.checkpoint is not None else [])
        futures: list[Future] = self._client.compute(wanted, optimize_graph=False)
        groups = futures[1 : 1 + len(graph.groups)]
        self._held[k] = futures
        for future in futures:
            future.add_done_callback(self._done)
        self._pending[k] = (futures[0], groups, futures[-1] if graph.checkpoint is not None else None)

    def iterations(self) -> Iterator[dict[str, Any]]:
        """Run all iterations; yields the numbers of each when it is done."""
        total, eta, every = self.config.run.iterations, self.config.run.eta, self.config.evaluation.every
        submitted, finished_s = self.first, time.time()
        self._evaluated_s = 0.0
        for k in range(max(0, self.first - eta - 1), self.first):
            self._submit_left(k)
        for k in range(self.first, total):
            ahead = total if not every else min(total, (k // every + 1) * every)
            while submitted < min(k + eta + 2, ahead):
                self._submit(submitted)
                submitted += 1
            end, groups, saved = self._pending.pop(k)
            values: dict[str, Any] = self._result(end, k)
            now_s = time.time()
            values |= {
                "iteration_s": now_s - finished_s,
                "tokens_per_s": values["generated_tokens"] / (now_s - finished_s),
            }
            finished_s = now_s
            if not self.config.evaluation.every:
                self._score(k + 1, values["reward"])
            if saved is not None:
                self._saving.append((k, saved))
            # A checkpoint is waited for when the next one is due, or the run ends: the disk holds up nothing else.
            allowed = 1 if k + 1 < total else 0
            while self._saving and (self._saving[0][1].done() or len(self._saving) > allowed):
                self._saved(*self._saving.popleft())
            self._carried = [group for group in [*self._carried, *groups] if not group.done()]
            del end, saved, groups, self._held[k]
            self._write_metrics(k, values)
            if self._planning is not None:
                self._planning.after(k, values | {"evaluation_s": self._evaluated_s}, total - k - 1)
            self._evaluated_s = 0.0
            yield values
            reason = pause_reason(self.spec, {"step": k, **values}) if k + 1 < total else None
            if reason is not None:
                raise MismatchAlarm(reason)

    def _submit_left(self, k: int) -> None:
        """Groups of an iteration whose step is taken that no batch has consumed yet."""
        tell_names(self._client, self.spec, self._questions, k)
        if groups := iteration_groups(self.spec, k, score=self.score, point=self.point):
            futures: list[Future] = self._client.compute(groups, optimize_graph=False)
            for future in futures:
                future.add_done_callback(self._done)
            self._carried += futures

    def _write_metrics(self, k: int, values: dict[str, Any]) -> None:
        numbers = {name: float(v) for name, v in values.items() if isinstance(v, int | float)}
        trust = self._client.sync(_rpc(self._client).libra_forecast_trust, run=self.spec.run)
        self.metrics.write(k, numbers | trust)

    def _saved(self, k: int, future: Future) -> None:
        """Take note of a checkpoint, and remove what is not kept any more."""
        self.checkpoint = Path(self._result(future, k))
        self.kept.tidy()
        oldest = next(iter(complete(self.directory / "checkpoints")))
        self._pruned = prune_groups(self.spec, self._pruned, step_of(oldest))

    def _done(self, future: Future) -> None:
        """Called in a thread of the client when a future of ours is done."""
        if future.status == "error" and self._failed is None:
            self._failed = future
        self._wake.set()

    def _result(self, future: Future, k: int) -> Any:
        """Result of one future; an error of any other one of ours ends the wait (a batch waits for ever for a lost group)."""
        while not future.done() and self._failed is None:
            # Dask tells of a result once: of one that is lost and computed again, only looking tells.
            self._wake.wait(LOOK_S)
            self._wake.clear()
        try:
            return (self._failed or future).result()
        except LibraError:
            raise
        except Exception as error:  # the boundary to Dask: anything a worker raised
            raise ClusterError(
                f"iteration {k}: {(self._failed or future).key} failed with {type(error).__name__}: {error}; "
                f"see {self.directory / 'events.jsonl'} and the workers' logs"
            ) from error


def _rpc(client: Client) -> Any:
    """Calls to the handlers that `LibraPlugin` adds to the scheduler."""
    return client.scheduler


def evaluation_is_due(config: RunConfig, version: int) -> bool:
    """Whether the held-out questions are asked at this version."""
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
) -> RunSummary:
    """Run everything ``config`` says and return what came of it; the body of ``libra run``, ``libra resume``, ``libra.train``."""
    started_s = time.time()
    with Session(config, environment=environment, score=score, client=client, resume=resume) as session:
        config = session.config
        summary = RunSummary(session.spec.run, session.directory, evaluations=session.evaluations)
        with RunProgress(
            summary.run, config.run.iterations, session.dashboard, enabled=config.observe.progress
        ) as progress:

            def evaluate_if_due(version: int) -> None:
                made = {result["version"] for result in summary.evaluations}
                if evaluation_is_due(config, version) and version not in made:
                    result = session.evaluate(version)
                    summary.evaluations.append(result)
                    progress.evaluated(f"version {version}", result["reward"], result["num"])

            evaluate_if_due(session.first)
            for values in session.iterations():
                summary.iterations.append(values)
                progress.iteration(values)
                evaluate_if_due(values["iteration"] + 1)
        summary.checkpoint = session.checkpoint
        summary.best = session.kept.best() if config.checkpoint.keep_best else None
    summary.wall_s = time.time() - started_s
    return summary

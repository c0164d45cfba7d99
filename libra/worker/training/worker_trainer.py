"""The replica of a training worker: construction, recovery, and its pool of hybrid replicas."""

from __future__ import annotations

import hashlib
import hmac
import logging
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distributed.comm import get_address_host

from libra.errors import WeightsError
from libra.facts import HybridPoolOpened, VersionPublished, WeightsHeld
from libra.store.run_records import Rows, batch_path, in_waves, read_batch_facts, read_waves
from libra.tensors import compute_device
from libra.weights import WeightStore, WeightVersion
from libra.worker.context import WorkerContext
from libra.worker.run_spec import RunSpec
from libra.worker.training.batch_rows import late_rows, members_of
from libra.worker.training.checkpoint_writer import CheckpointWriter
from libra.worker.training.publications import Publications

if TYPE_CHECKING:
    from torch import Tensor

    from libra.train import Replica, StepReport
    from libra.train.replica_group import TrainGroup
    from libra.train.samples import LazyBatch

logger = logging.getLogger(__name__)

_one_at_a_time = threading.Lock()


def pool_token(spec: RunSpec, gang: int) -> str:
    """The secret with which hybrid replicas join the core of ``gang`` in this start of the run."""
    return _token(spec, "hybrid", gang)


def group_token(spec: RunSpec, gang: int) -> str:
    """The secret that members of training group ``gang`` share."""
    return _token(spec, "group", gang)


def _token(spec: RunSpec, purpose: str, gang: int) -> str:
    return hmac.new(spec.secret.encode(), f"{purpose}/{spec.epoch}/{gang}".encode(), hashlib.sha256).hexdigest()


class Trainer:
    """The replica, checkpoints and publications of one training worker."""

    def __init__(self, context: WorkerContext) -> None:
        self.context = context
        self.replayed: list[dict[str, Any]] = []
        """Metrics of the steps that were repeated when its group formed."""
        self.paused: tuple[int, str] | None = None
        """The step after which no step is taken, and why."""
        self.publications = Publications(
            context.weights.store, context.spec.config.rollout.max_context_tokens, self._report_version
        )
        self._checkpoints: CheckpointWriter | None = None
        self._verified: set[int] = set()  # versions whose files this process has compared with their digests

    @property
    def has_replica(self) -> bool:
        """Whether a replica exists; a sharded one is built with its group."""
        return self._checkpoints is not None

    @property
    def checkpoints(self) -> CheckpointWriter:
        """The replica's checkpoints; asserts that a replica exists."""
        assert self._checkpoints is not None, f"{self.context.name} got a task of training before it has a replica"
        return self._checkpoints

    @property
    def replica(self) -> Replica:
        return self.checkpoints.replica

    def make_replica(self, group: TrainGroup | None = None) -> None:
        spec = self.context.spec
        replica = make_replica(spec, self.context.model_dir, group)
        replica.published = self._published
        alone = spec.config.cluster.train_workers == 1
        replica.digests = not alone  # ranks compare digests; a single rank's digest is computed on publication
        self.publications.of(replica, alone=alone)
        self._checkpoints = CheckpointWriter(replica, spec.checkpoints_dir, spec.config)

    def _published(self, version: int) -> dict[str, Tensor] | None:
        store = self.context.weights.store
        try:
            if version not in store.numbers():
                return None
            weights = store.read(version, verify=version not in self._verified)
            self._verified.add(version)
            return weights
        except WeightsError as error:
            logger.warning("run %s: %s", self.context.spec.run, error)
            return None

    def _report_version(self, version: WeightVersion) -> None:
        number, digest, at = version.number, version.digest, self.context.weights.offered
        held = () if at is None else (WeightsHeld(number, digest, at),)
        self.context.report(*held, VersionPublished(number, digest, version.num_bytes))

    def pinned(self, newest: int) -> range:
        """Versions that later steps may need to score tokens (``trainer.old_logp=version``)."""
        config = self.context.spec.config
        if config.trainer.old_logp != "version" or config.rollout.exact_logprobs:
            return range(0)
        from libra.train.checkpoint import complete, step_of

        saved = complete(self.context.spec.checkpoints_dir)
        return range(max(0, (step_of(saved[-1]) if saved else 0) - config.run.eta), newest + 1)

    def recover(self, steps: int, *, or_next: bool = False) -> list[dict[str, Any]]:
        with self.publications.repeating():
            return recover(self.checkpoints, self.context.spec, self.context.weights.store, steps, or_next=or_next)

    def add_waves(self, batch: int, upto: int, *, last: LazyBatch | None = None) -> int:
        """Add committed waves of step ``batch``, in order, up to ``upto``; returns their number.

        ``last`` is the wave before ``upto``, if already in memory. Collective in a training group,
        unless all ranks have the waves.
        """
        spec, replica = self.context.spec, self.replica
        added = replica.open_step.waves if replica.open_step is not None else 0
        if added >= upto:
            return added
        waves = committed_waves(spec, batch)
        for number in range(added, min(upto, len(waves))):
            given: Any = last if number + 1 == upto else None
            if given is None:
                given = members_of({"members": waves[number]}, spec.groups_dir, of_the_step=True)
            added = self.checkpoints.accumulate(given, batch)
        return added

    def open_pool(self, gang: int) -> None:
        """Let replicas of hybrid workers join, and report where; on the core's rank 0 only."""
        spec = self.context.spec
        if spec.config.cluster.hybrid_workers:
            self.close()
            host = get_address_host(self.context.address)
            pool = self.replica.admit_hybrids(pool_token(spec, gang), host=host)
            self.context.report(HybridPoolOpened(gang, host, pool.address[1]))

    def close(self) -> None:
        if self.has_replica and self.replica.hybrids is not None:
            self.replica.hybrids.close()


def recover(
    checkpoints: CheckpointWriter, spec: RunSpec, store: WeightStore, steps: int, *, or_next: bool = False
) -> list[dict[str, Any]]:
    """Bring the replica to step ``steps``: newest checkpoint, then all committed batches since.

    Generates nothing; a replica at that step or later is unchanged. If the result differs from a
    published version (another machine or number of threads), the published weights are used,
    because tokens were sampled from them. With ``or_next``, a checkpoint one step later is also
    accepted, for a task that repeats that step. Returns the metrics of each repeated step.
    Collective in a training group, unless all ranks are already at that step.
    """
    from libra.train.checkpoint import newest, step_of  # imports transformers, which takes seconds

    replica = checkpoints.replica
    replayed: list[dict[str, Any]] = []
    with _one_at_a_time:
        if replica.steps_done < steps:
            found = newest(spec.checkpoints_dir, steps + or_next) if replica.group.rank == 0 else None
            path = replica.group.from_first(None if found is None else str(found))
            if path is not None and replica.steps_done < step_of(Path(path)):
                checkpoints.load(Path(path))
        while replica.steps_done < steps:
            batch = replica.steps_done
            result = _retaken(checkpoints, spec, read_batch_facts(spec.batches_dir, batch), batch)
            logger.info("batch %d was committed before: its step is repeated", batch)
            content = result.digest or replica.hashed()
            replayed.append(result.as_dict() | {"digest": content})
            if batch + 1 in store.numbers() and (published := store.get(batch + 1)).digest != content:
                logger.warning(
                    "run %s: step %d taken again gave weights %s, version %d was published as %s; the published ones are "
                    "taken. Is this another machine, or another number of threads?",
                    spec.run, batch, content, batch + 1, published.digest,
                )  # fmt: skip
                checkpoints.take_weights(store.read(published))
    return replayed


def committed_waves(spec: RunSpec, batch: int) -> list[Rows]:
    """The committed waves of a streamed step: all waves once its batch is committed."""
    if batch_path(spec.batches_dir, batch).exists():
        return in_waves(read_batch_facts(spec.batches_dir, batch)["groups"])
    return read_waves(spec.waves_dir, batch)


def _retaken(checkpoints: CheckpointWriter, spec: RunSpec, facts: Mapping[str, Any], batch: int) -> StepReport:
    rows: Rows = facts["groups"]
    waves = in_waves(rows)
    if not waves:
        members = members_of({"members": rows, "late": late_rows(facts)}, spec.groups_dir, of_the_step=True)
        return checkpoints.step(members, batch)
    checkpoints.replica.abandon()
    for wave in waves:
        checkpoints.accumulate(members_of({"members": wave}, spec.groups_dir, of_the_step=True), batch)
    return checkpoints.close(batch)


def make_replica(spec: RunSpec, model_dir: Path, group: TrainGroup | None) -> Replica:
    """The configured replica at version 0; a member of ``group`` if given."""
    from libra.train import Replica, TrainSettings
    from libra.train.checkpoint import has_optimizer

    config = spec.config
    start = spec.from_checkpoint
    replica = Replica(
        start or model_dir,
        TrainSettings.of_run(config),
        dtype=config.model.dtype,
        master_dtype=config.model.master_dtype,
        threads=config.cluster.threads,
        device=compute_device(config.cluster.device),
        seed=config.run.seed,
        base_dir=model_dir,
        group=group,
        loader=config.model.loader,
    )
    if start is not None and has_optimizer(start) and config.trainer.lora_rank is None:  # merged: new adapters begin
        replica.continue_optimizer(start)
    return replica

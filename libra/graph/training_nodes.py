"""Task functions of training: the step of each rank, the published version, checkpoints, and the numbers of an iteration."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from libra.errors import MismatchAlarm, TrainError, shell_path
from libra.facts import IterationFinished, MismatchFound, StepFinished
from libra.store.run_records import read_step, write_step
from libra.train.mismatch import alarm_text, metrics_of
from libra.train.replica_settings import rounding_nats
from libra.worker.run_spec import RunSpec
from libra.worker.runtime import WorkerRuntime, runtime_here
from libra.worker.training.batch_rows import FETCHED, SliceFetcher, lazy_batch, members_of
from libra.worker.training.gang_member import turn
from libra.worker.training.publications import assist

if TYPE_CHECKING:
    from libra.train import StepReport as TrainReport

logger = logging.getLogger(__name__)


def step(run: str, batch: dict[str, Any], rank: int) -> dict[str, Any]:
    """One optimizer step, all its epochs and minibatches, of replica ``rank`` on a committed batch."""
    host = runtime_here(run)
    started_s = time.time()
    with turn(host.gang, rank):
        trainer = host.training
        if trainer.paused is not None and batch["batch"] > trainer.paused[0]:
            raise MismatchAlarm(trainer.paused[1])
        trainer.recover(batch["batch"], or_next=True)  # a restarted worker has lost its replica
        if trainer.replica.steps_done > batch["batch"] + 1:
            return {**read_step(host.spec.steps_dir, batch["batch"]), "rank": rank}
        fetcher = None
        if host.spec.config.trainer.dispatch == "peer":
            fetcher = SliceFetcher(batch, host.spec)
            result = trainer.checkpoints.step(lazy_batch(batch, fetcher), batch["batch"])
        else:
            result = trainer.checkpoints.step(members_of(batch, host.spec.groups_dir, of_the_step=True), batch["batch"])
        found = fetcher.numbers if fetcher is not None else {}
        return finished_step(host, result, rank, time.time() - started_s, found)


def finished_step(
    host: WorkerRuntime, result: TrainReport, rank: int, train_s: float, found: Mapping[str, float]
) -> dict[str, Any]:
    """The numbers of a step that replica ``rank`` took, with what else was ``found``; rank 0 writes them into the step's record."""
    trainer = host.training
    if (reason := pause_reason(host.spec, result.as_dict())) is not None:
        trainer.paused = result.step, reason
    numbers = {**result.as_dict(), **metrics_of(result.mismatch_parts), "rank": rank, "train_s": train_s, **found}
    numbers["mismatch_alarm"] = alarm_of(host.spec, result.as_dict()) or ""
    numbers["train_on_gpu"] = int(trainer.replica.device.type == "cuda")
    if rank == 0:
        write_step(host.spec.steps_dir, result.step, numbers)
    if trainer.publications.alone:  # no other rank has to agree: the next step and the publication may begin
        host.context.report(StepFinished(result.step, result.loss, train_s, trainer.publications.beside))
        trainer.publications.begin(result.step + 1)
    return numbers


def update(run: str, steps: list[dict[str, Any]]) -> dict[str, Any]:
    """The numbers of the step. Every rank must be at the same step with the same digest."""
    first = steps[0]
    for other in steps[1:]:
        if (other["step"], other["digest"]) != (first["step"], first["digest"]):
            raise TrainError(
                f"ranks disagree after a step: rank 0 is at {first['step']} with {first['digest']}, "
                f"rank {other['rank']} at {other['step']} with {other['digest']}"
            )
    fetched = {name: sum(s.get(name, 0) for s in steps) for name in FETCHED if name in first}
    if len(steps) > 1:  # a single rank has reported
        runtime_here(run).context.report(StepFinished(first["step"], first["loss"], first["train_s"]))
    fullest = max(int(each.get("peak_bytes", 0)) for each in steps)
    return first | fetched | {"train_peak_bytes": fullest}


def publish(run: str, updated: dict[str, Any], rank: int = 0) -> dict[str, Any]:
    """Publish the replica's weights as the next version, of a single rank beside its next step; where each rank has a shard,
    ranks other than 0 send theirs."""
    host = runtime_here(run)
    with turn(host.gang, rank):
        return _publish(host, updated["step"] + 1, rank)


def _publish(host: WorkerRuntime, version: int, rank: int) -> dict[str, Any]:
    started_s = time.time()
    trainer, weights, config = host.training, host.context.weights, host.spec.config
    trainer.recover(version)
    replica = trainer.replica
    if rank > 0:
        if replica.is_sharded and replica.steps_done == version:
            assist(replica, config.rollout.max_context_tokens)
        return {"version": version, "rank": rank}
    published = trainer.publications.publish(version)
    # After the report, so that no engine waits for it:
    weights.store.drop(keep_last=config.store.keep_versions, pinned=trainer.pinned(published.number))
    return {"version": published.number, "digest": published.digest, "publish_s": time.time() - started_s}


def restore(run: str, batches: int, stored: int, rank: int = 0) -> dict[str, Any]:
    """Repeat steps on committed batches until the replica holds version ``batches``, and publish it; nothing is generated.

    ``replayed`` has the numbers of each repeated step.
    """
    host = runtime_here(run)
    started_s = time.time()
    with turn(host.gang, rank):
        replayed = [*host.training.replayed]
        if host.gang is None and _was_lost(host, batches - 1):
            replayed += host.training.recover(batches - 1)
            _publish(host, batches - 1, rank)
        replayed += host.training.recover(batches)
        published = _publish(host, batches, rank)
        saved = [str(path) for path in host.training.checkpoints.save_due(batches)]
    return {**published, "saved": saved, "replayed": replayed, "stored": stored, "restore_s": time.time() - started_s}


def _was_lost(host: WorkerRuntime, version: int) -> bool:
    from libra.train.checkpoint import checkpoint_name

    newest = host.context.weights.store.latest()
    passed = (host.spec.checkpoints_dir / checkpoint_name(version + 1)).exists()
    return newest is not None and newest.number == version - 1 and not passed


def checkpoint(run: str, published: dict[str, Any]) -> str:
    """Save model and optimizer in Hugging Face layout, beside later steps; returns the directory."""
    host = runtime_here(run)
    trainer = host.training
    if host.gang is not None:  # a group recovers when it forms
        return str(trainer.checkpoints.save_or_later(published["version"]))
    trainer.recover(published["version"])
    return str(trainer.checkpoints.save(published["version"]))


def first(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """The result of rank 0."""
    return answers[0]


def summary(
    run: str,
    iteration: int,
    batch: dict[str, Any],
    updated: dict[str, Any],
    published: dict[str, Any],
    stored: dict[str, Any],
) -> dict[str, Any]:
    """The numbers of one iteration, for metrics, log and page."""
    numbers = {k: v for k, v in updated.items() if isinstance(v, int | float) and k not in ("rank", "step")}
    values = {**batch["stats"], **numbers, "publish_s": published["publish_s"], "store_s": stored["store_s"]}
    reward = values["reward"] if np.isfinite(values["reward"]) else None  # None: no trajectory had a reward
    alarm = updated.get("mismatch_alarm", "")
    mismatch = (MismatchFound(iteration, alarm),) if alarm else ()
    runtime_here(run).context.report(IterationFinished(iteration, reward, values["lag"]), *mismatch)
    return {"iteration": iteration, "version": published["version"], **values}


def alarm_of(spec: RunSpec, numbers: Mapping[str, Any]) -> str | None:
    """The alarm of a step's mismatch, None if there is none."""
    trainer, step = spec.config.trainer, int(numbers["step"])
    nats = {"mean_nats": trainer.mismatch_args["mean"], "k3_nats": trainer.mismatch_args["k3"]}
    return alarm_text(numbers, step, **nats, rounding_nats=rounding_nats(spec.config))


def pause_reason(spec: RunSpec, numbers: Mapping[str, Any]) -> str | None:
    """Why no step may follow the one with these numbers, None if one may; logs the mismatch of engine and trainer."""
    trainer, step = spec.config.trainer, int(numbers["step"])
    if numbers["mismatch_tokens"]:
        logger.info(
            "mismatch: step %d: |log p(rollout) - log p(trainer)| mean %.3g, max %.3g, k3 %.3g, effective %.4f of %d tokens",
            step, numbers["mismatch_mean_abs"], numbers["mismatch_max_abs"], numbers["mismatch_k3"],
            numbers["mismatch_effective_frac"], numbers["mismatch_tokens"],
        )  # fmt: skip
    if trainer.old_logp != "behaviour":
        logger.info(
            "old log-probabilities (%s): step %d: exact for %.4f of the tokens; clipped low %.4f, high %.4f; weights out of bounds "
            "%.4f, effective %.4f",
            trainer.old_logp, step, numbers["exact_old_frac"], numbers["clip_low_frac"], numbers["clip_high_frac"],
            numbers["correction_frac"], numbers["effective_sample_frac"],
        )  # fmt: skip
    text = alarm_of(spec, numbers)
    if text is None or trainer.mismatch_action != "pause":
        return None
    return (
        f"{text}. The run is paused after step {step} and the publication of version {step + 1}. To continue, type "
        f"libra resume {shell_path(spec.directory)} (it pauses again at the next alarm), or add "
        "trainer.mismatch_action=warn to take steps regardless"
    )

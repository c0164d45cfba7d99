"""Task functions of training: steps (whole or in waves), versions, checkpoints, iteration numbers.

``accumulate-k-j`` adds the gradient of wave j of a streamed step on every rank. ``close-k`` runs
after all waves and the batch: sum over ranks, check, divide, clip, step.

Invariants
----------
1. A wave is committed (`libra.store.run_records`) before its gradient is computed.
2. `libra.worker.training.worker_trainer.Trainer.add_waves` adds each wave of a step once and in
   order, even if a task repeats: a replacement replica adds the committed waves.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from libra.errors import MismatchAlarm, TrainError, shell_path
from libra.facts import IterationFinished, MismatchFound, StepFinished, WaveTrained
from libra.store.run_records import in_waves, read_step, write_step
from libra.train.mismatch import alarm_text, metrics_of
from libra.train.replica_settings import rounding_nats
from libra.worker.run_spec import RunSpec
from libra.worker.runtime import WorkerRuntime, runtime_here
from libra.worker.training.batch_rows import FETCHED, SliceFetcher, lazy_batch, members_of
from libra.worker.training.gang_member import turn
from libra.worker.training.worker_trainer import Trainer

if TYPE_CHECKING:
    from libra.train import StepReport as TrainReport

logger = logging.getLogger(__name__)


def step(run: str, batch: dict[str, Any], rank: int) -> dict[str, Any]:
    """One optimizer step (all epochs and minibatches) of replica ``rank`` on a committed batch."""
    host, number = runtime_here(run), batch["batch"]
    started_s = time.time()
    with _turn(host, rank, number) as trainer:
        trainer.recover(number, or_next=True)  # a restarted worker has lost its replica
        if trainer.replica.steps_done > number + 1:
            return {**read_step(host.spec.steps_dir, number), "rank": rank}
        rows, fetcher = _rows(host, batch)
        if rows is None:
            rows = members_of(batch, host.spec.groups_dir, of_the_step=True)
        result = trainer.checkpoints.step(rows, number)
        found = {} if fetcher is None else fetcher.numbers
        return _finished_step(host, result, rank, time.time() - started_s, found)


def accumulate(run: str, wave: dict[str, Any], rank: int) -> dict[str, Any]:
    """Add a wave's gradient to the step's gradient on replica ``rank``, after the earlier waves."""
    host = runtime_here(run)
    batch, number, groups = wave["batch"], wave["wave"], len(wave["members"])
    numbers = {"rank": rank, "wave": number, "groups": groups, "missing": wave["missing"], "train_s": 0.0}
    if not groups:
        return numbers
    with _turn(host, rank, batch) as trainer:
        trainer.recover(batch)
        if trainer.replica.steps_done > batch:
            return numbers
        started_s = time.time()
        last, fetcher = _rows(host, wave)
        trainer.add_waves(batch, number + 1, last=last)
        numbers |= {"train_s": time.time() - started_s} | ({} if fetcher is None else fetcher.numbers)
        if rank == 0:
            opened, train_s = trainer.replica.open_step, round(numbers["train_s"], 6)
            hybrids = opened.hybrids if opened is not None else 0
            host.context.report(WaveTrained(batch, number, groups, wave["missing"], train_s, hybrids))
    return numbers


def close(run: str, batch: dict[str, Any], waves: list[dict[str, Any]], rank: int) -> dict[str, Any]:
    """End a streamed step on replica ``rank``: sum, check, divide, clip and apply the gradient."""
    host, number = runtime_here(run), batch["batch"]
    with _turn(host, rank, number) as trainer:
        started_s = time.time()
        trainer.recover(number, or_next=True)
        if trainer.replica.steps_done > number + 1:
            return {**read_step(host.spec.steps_dir, number), "rank": rank}
        if trainer.replica.steps_done == number:
            whole = len(in_waves(batch["members"]))
            if (added := trainer.add_waves(number, whole)) != whole:
                raise TrainError(f"batch {number}: {added} waves were added, and it has {whole}; resume the run")
        result = trainer.checkpoints.close(number)
        trained = [each for each in waves if each["groups"]]
        wave_s = sum(each["train_s"] for each in trained)
        streamed_s = sum(each["train_s"] for each in trained if each["missing"])
        train_s = wave_s + time.time() - started_s
        numbers = {name: sum(each[name] for each in trained) for name in FETCHED if trained and name in trained[0]}
        numbers |= {"waves": len(trained), "wave_s": wave_s, "streamed_frac": streamed_s / train_s if train_s else 0.0}
        return _finished_step(host, result, rank, train_s, numbers)


@contextmanager
def _turn(host: WorkerRuntime, rank: int, batch: int) -> Iterator[Trainer]:
    with turn(host.gang, rank):
        trainer = host.training
        if trainer.paused is not None and batch > trainer.paused[0]:
            raise MismatchAlarm(trainer.paused[1])
        yield trainer


def _rows(host: WorkerRuntime, batch: dict[str, Any]) -> tuple[Any, SliceFetcher | None]:
    if host.spec.config.trainer.dispatch != "peer":
        return None, None
    fetcher = SliceFetcher(batch, host.spec)
    return lazy_batch(batch, fetcher), fetcher


def _finished_step(
    host: WorkerRuntime, result: TrainReport, rank: int, train_s: float, found: Mapping[str, float]
) -> dict[str, Any]:
    trainer, taken = host.training, result.as_dict()
    if (reason := pause_reason(host.spec, taken)) is not None:
        trainer.paused = result.step, reason
    numbers = {**taken, **metrics_of(result.mismatch_parts), "rank": rank, "train_s": train_s, **found}
    numbers["mismatch_alarm"] = _alarm(host.spec, taken) or ""
    numbers["train_on_gpu"] = int(trainer.replica.device.type == "cuda")
    if rank == 0:
        write_step(host.spec.steps_dir, result.step, numbers)
    if trainer.publications.alone:  # no other rank has to agree: the next step and the publication may begin
        host.context.report(StepFinished(result.step, result.loss, train_s, trainer.publications.beside))
        trainer.publications.begin(result.step + 1)
    return numbers


def update(run: str, steps: list[dict[str, Any]]) -> dict[str, Any]:
    """The numbers of the step; every rank must be at the same step with the same digest."""
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
    """Publish the replica's weights as the next version; the ranks of a shard assist."""
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
            trainer.publications.assist()
        return {"version": version, "rank": rank}
    published = trainer.publications.publish(version)
    # After the report, so that no engine waits for it:
    weights.store.drop(keep_last=config.store.keep_versions, pinned=trainer.pinned(published.number))
    return {"version": published.number, "digest": published.digest, "publish_s": time.time() - started_s}


def restore(run: str, batches: int, stored: int, rank: int = 0) -> dict[str, Any]:
    """Repeat steps on committed batches (``replayed``) up to version ``batches`` and publish it."""
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
    """Save model and optimizer in Hugging Face layout during later steps; returns the directory."""
    host = runtime_here(run)
    trainer = host.training
    if host.gang is not None:  # a group recovers when it forms
        return str(trainer.checkpoints.save_or_later(published["version"]))
    trainer.recover(published["version"])
    return str(trainer.checkpoints.save(published["version"]))


def first(answers: list[dict[str, Any]]) -> dict[str, Any]:
    return answers[0]


def summary(
    run: str,
    iteration: int,
    batch: dict[str, Any],
    updated: dict[str, Any],
    published: dict[str, Any],
    stored: dict[str, Any],
) -> dict[str, Any]:
    numbers = {k: v for k, v in updated.items() if isinstance(v, int | float) and k not in ("rank", "step")}
    values = {**batch["stats"], **numbers, "publish_s": published["publish_s"], "store_s": stored["store_s"]}
    reward = values["reward"] if np.isfinite(values["reward"]) else None  # None: no trajectory had a reward
    alarm = updated.get("mismatch_alarm", "")
    mismatch = (MismatchFound(iteration, alarm),) if alarm else ()
    runtime_here(run).context.report(IterationFinished(iteration, reward, values["lag"]), *mismatch)
    return {"iteration": iteration, "version": published["version"], **values}


def _alarm(spec: RunSpec, numbers: Mapping[str, Any]) -> str | None:
    trainer, step = spec.config.trainer, int(numbers["step"])
    nats = {"mean_nats": trainer.mismatch_args["mean"], "k3_nats": trainer.mismatch_args["k3"]}
    return alarm_text(numbers, step, **nats, rounding_nats=rounding_nats(spec.config))


def pause_reason(spec: RunSpec, numbers: Mapping[str, Any]) -> str | None:
    """Why the run must pause after a step with these numbers, or None; logs the mismatch."""
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
    text = _alarm(spec, numbers)
    if text is None or trainer.mismatch_action != "pause":
        return None
    return (
        f"{text}. The run is paused after step {step} and the publication of version {step + 1}. To continue, type "
        f"libra resume {shell_path(spec.directory)} (it pauses again at the next alarm), or add "
        "trainer.mismatch_action=warn to take steps regardless"
    )

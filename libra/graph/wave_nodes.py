"""Task functions of a streamed step: its waves, what each adds to the gradient, and its end.

``wave-k-j`` waits parked until the plugin opens it: some groups of batch k are complete and the trainer has added wave j - 1
(`libra.policy.waves`). ``accumulate-k-j`` adds its gradient on every rank. ``close-k`` comes after all of them and the batch: sum
over ranks, check, divide, clip, step.

Invariants
----------
1. A wave is committed (`libra.store.run_records`) before its gradient is computed.
2. `libra.worker.training.worker_trainer.Trainer.add_waves` adds each wave of a step once, in their order,
   whichever task runs first or again: a replica that was lost adds those that are committed.
"""

from __future__ import annotations

import time
from typing import Any

from libra.errors import MismatchAlarm, RecordExists, StoreError, TrainError
from libra.facts import WaveTrained
from libra.graph.batch_nodes import with_blocks
from libra.graph.member_rows import member_rows
from libra.graph.teacher_nodes import with_scores
from libra.graph.training_nodes import finished_step
from libra.policy import StalenessPolicy
from libra.store.run_records import commit_wave, group_path, groups_of, in_waves, read_group, read_step, read_waves
from libra.worker.runtime import runtime_here
from libra.worker.training.batch_rows import FETCHED, SliceFetcher, lazy_batch
from libra.worker.training.gang_member import turn


async def wave(run: str, batch: int, number: int) -> dict[str, Any]:
    """Commit the groups of a wave with their advantages. ``missing`` groups of its batch are in later waves."""
    host = runtime_here(run)
    waves = [
        [tuple(group) for group in each]
        for each in await host.context.worker.scheduler.libra_waves(run=run, batch=batch)
    ]
    members = waves[number] if number < len(waves) else []
    result = {"batch": batch, "wave": number, "members": [], "missing": 0}
    if not members:
        return result
    spec = host.spec
    paths = [group_path(spec.groups_dir, *member) for member in members]
    groups = [read_group(path) for path in paths]
    # Groups of a wave are of the batch's own iteration, and never over age.
    rows = member_rows(spec.config.trainer, groups, paths, batch, StalenessPolicy(spec.config.run.eta))
    await with_scores(host.context, batch, rows)
    try:
        commit_wave(spec.waves_dir, batch, number, rows)
    except RecordExists:
        rows = read_waves(spec.waves_dir, batch)[number]
        if groups_of(rows) != tuple(members):
            raise StoreError(
                f"{spec.waves_dir}: wave {number} of batch {batch} was committed with groups {list(groups_of(rows))} and is to "
                f"have {members}; type libra repair {spec.directory}"
            ) from None
    if spec.config.trainer.dispatch == "peer":
        await with_blocks(host, members, groups, rows)
    missing = spec.config.trainer.prompts - sum(map(len, waves[: number + 1]))
    return result | {"members": rows, "missing": missing}


def accumulate(run: str, wave: dict[str, Any], rank: int) -> dict[str, Any]:
    """Add the gradient of a wave to the step's gradient on replica ``rank``, after the waves before it."""
    host = runtime_here(run)
    batch, number, groups = wave["batch"], wave["wave"], len(wave["members"])
    numbers = {"rank": rank, "wave": number, "groups": groups, "missing": wave["missing"], "train_s": 0.0}
    if not groups:
        return numbers
    with turn(host.gang, rank):
        trainer = host.training
        if trainer.paused is not None and batch > trainer.paused[0]:
            raise MismatchAlarm(trainer.paused[1])
        trainer.recover(batch)  # a restarted worker has lost its replica
        if trainer.replica.steps_done > batch:
            return numbers
        started_s, fetcher, last = time.time(), None, None
        if host.spec.config.trainer.dispatch == "peer":
            fetcher = SliceFetcher(wave, host.spec)
            last = lazy_batch(wave, fetcher)
        trainer.add_waves(batch, number + 1, last=last)
        numbers |= {"train_s": time.time() - started_s} | (fetcher.numbers if fetcher is not None else {})
        if rank == 0:
            opened, train_s = trainer.replica.open_step, round(numbers["train_s"], 6)
            hybrids = opened.hybrids if opened is not None else 0
            host.context.report(WaveTrained(batch, number, groups, wave["missing"], train_s, hybrids))
    return numbers


def close(run: str, batch: dict[str, Any], waves: list[dict[str, Any]], rank: int) -> dict[str, Any]:
    """The end of a streamed step on replica ``rank``: the sum of all waves is checked, divided, clipped and applied."""
    host = runtime_here(run)
    number, rows = batch["batch"], batch["members"]
    with turn(host.gang, rank):
        trainer, started_s = host.training, time.time()
        if trainer.paused is not None and number > trainer.paused[0]:
            raise MismatchAlarm(trainer.paused[1])
        trainer.recover(number, or_next=True)
        if trainer.replica.steps_done > number + 1:
            return {**read_step(host.spec.steps_dir, number), "rank": rank}
        if trainer.replica.steps_done == number:
            added, whole = trainer.add_waves(number, len(in_waves(rows))), len(in_waves(rows))
            if added != whole:
                raise TrainError(f"batch {number}: {added} waves were added, and it has {whole}; resume the run")
        result = trainer.checkpoints.close(number)
        trained = [each for each in waves if each["groups"]]
        wave_s = sum(each["train_s"] for each in trained)
        streamed_s = sum(each["train_s"] for each in trained if each["missing"])
        train_s = wave_s + time.time() - started_s
        numbers = {name: sum(each[name] for each in trained) for name in FETCHED if trained and name in trained[0]}
        numbers |= {"waves": len(trained), "wave_s": wave_s, "streamed_frac": streamed_s / train_s if train_s else 0.0}
        return finished_step(host, result, rank, train_s, numbers)

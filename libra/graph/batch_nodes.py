"""Task functions that commit batches and waves, fill the store, and end an evaluation."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from libra.envs.environment import BIN
from libra.errors import RecordExists, StoreError
from libra.facts import EvaluationFinished
from libra.graph.late_groups import late_facts, take_delivered
from libra.graph.member_rows import member_rows, with_scores
from libra.policy import StalenessPolicy, staleness_of
from libra.seals import sealed_text
from libra.store.exclusive_files import create_exclusive
from libra.store.run_records import (
    commit_batch,
    commit_wave,
    evaluation_path,
    group_path,
    groups_of,
    read_batch,
    read_batch_facts,
    read_evaluation,
    read_group,
    read_waves,
)
from libra.types import FailureClass, Trajectory
from libra.worker.runtime import WorkerRuntime, runtime_here
from libra.worker.training.batch_numbers import generated_for, numbers_of
from libra.worker.training.batch_rows import late_rows, lengths, members_of, take_late, without_stale


async def batch(run: str, batch: int, waves: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    """Compute advantages and commit the batch's members before its step.

    The plugin opens the node once it knows the members. A streamed step has the members of its
    ``waves``, in that order, with the committed advantages.
    """
    host = runtime_here(run)
    spec, trainer = host.spec, host.spec.config.trainer
    members = await host.context.worker.scheduler.libra_members(run=run, batch=batch)
    paths = [group_path(spec.groups_dir, *member) for member in members]
    groups = [read_group(path) for path in paths]
    came = await take_delivered(host.context, batch, groups) if trainer.late != "off" else {}
    rows = [row for wave in read_waves(spec.waves_dir, batch) for row in wave] if waves else []
    if len(rows) != len(groups):
        rows = member_rows(trainer, groups, paths, batch, staleness_of(spec.config))
        await with_scores(host.context, batch, rows)
    facts = {"groups": rows} | late_facts(host.context, batch, groups, rows, came)
    try:
        commit_batch(spec.batches_dir, batch, [t.trajectory_id for group in groups for t in group], **facts)
    except RecordExists:
        facts = read_batch_facts(spec.batches_dir, batch)
        rows = facts["groups"]
        for row, group in zip(rows, groups, strict=True):
            take_late(group, row)
    late = late_rows(facts)
    if trainer.dispatch == "peer" and not waves:
        await _with_blocks(host, members, groups, rows)
        for row in late:
            _with_lengths(row, take_late(read_group(group_path(spec.groups_dir, row["iteration"], row["group"])), row))
    stats = numbers_of(spec.config, batch, groups, facts) | generated_for(groups, rows)
    return {"batch": batch, "members": rows, "late": late, "stats": stats}


async def wave(run: str, batch: int, number: int) -> dict[str, Any]:
    """Commit the groups of a wave with their advantages; ``missing`` groups are in later waves."""
    host = runtime_here(run)
    spec, trainer = host.spec, host.spec.config.trainer
    waves = await host.context.worker.scheduler.libra_waves(run=run, batch=batch)
    members = tuple(map(tuple, waves[number])) if number < len(waves) else ()
    result = {"batch": batch, "wave": number, "members": [], "missing": 0}
    if not members:
        return result
    paths = [group_path(spec.groups_dir, *member) for member in members]
    groups = [read_group(path) for path in paths]
    # Groups of a wave are of the batch's own iteration, and never over age.
    rows = member_rows(trainer, groups, paths, batch, StalenessPolicy(spec.config.run.eta))
    await with_scores(host.context, batch, rows)
    try:
        commit_wave(spec.waves_dir, batch, number, rows)
    except RecordExists:
        rows = read_waves(spec.waves_dir, batch)[number]
        if groups_of(rows) != members:
            raise StoreError(
                f"{spec.waves_dir}: wave {number} of batch {batch} was committed with groups {list(groups_of(rows))} and is to "
                f"have {list(members)}; type libra repair {spec.directory}"
            ) from None
    if trainer.dispatch == "peer":
        await _with_blocks(host, members, groups, rows)
    return result | {"members": rows, "missing": trainer.prompts - sum(map(len, waves[: number + 1]))}


async def _with_blocks(
    host: WorkerRuntime, members: Sequence[Any], groups: list[list[Trajectory]], rows: list[dict[str, Any]]
) -> None:
    blocks = await host.context.worker.scheduler.libra_blocks(run=host.spec.run, groups=members)
    for row, group, block in zip(rows, groups, blocks, strict=True):
        _with_lengths(row, group, block)


def _with_lengths(row: dict[str, Any], group: list[Trajectory], block: Any = None) -> None:
    row |= {"rows": [str(t.trajectory_id) for t in group], "block": block}
    row["lengths"] = lengths([without_stale(t, row) for t in group])


def batch_numbers(run: str, batch: int) -> dict[str, Any]:
    """Metrics of a committed batch that need no step."""
    spec = runtime_here(run).spec
    facts = read_batch_facts(spec.batches_dir, batch)
    groups = [members_of({"members": [row]}, spec.groups_dir) for row in facts["groups"]]
    return {"iteration": batch} | numbers_of(spec.config, batch, groups, facts)


def store(run: str, batch: dict[str, Any]) -> dict[str, Any]:
    """The only writer of the store: append a batch's groups, then remove their journal records."""
    host = runtime_here(run)
    started_s = time.time()
    stored = _append(host, members_of(batch, host.spec.groups_dir), batch["batch"])
    return {"stored": stored, "store_s": time.time() - started_s}


def store_missing(run: str, batches: int) -> int:
    """Append committed batches that an earlier start left out; the number of trajectories."""
    host = runtime_here(run)
    assert host.store is not None
    before = host.store.num_trajectories
    left = host.context.journal.trajectories()
    for number in range(batches):
        ids = read_batch(host.spec.batches_dir, number)
        if len(host.store.among(ids)) < len(ids):
            rows = read_batch_facts(host.spec.batches_dir, number)["groups"]
            _append(host, members_of({"members": rows}, host.spec.groups_dir), number)
        elif not host.spec.config.store.keep_journals:
            for name in left.intersection(map(str, ids)):
                host.context.journal.remove(name)
    return host.store.num_trajectories - before


def _append(host: WorkerRuntime, trajectories: list[Trajectory], batch: int | None) -> int:
    assert host.store is not None
    stored = set(host.store.among([t.trajectory_id for t in trajectories]))
    host.store.append([t for t in trajectories if t.trajectory_id not in stored], batch=batch)
    if not host.spec.config.store.keep_journals:
        for trajectory in trajectories:
            host.context.journal.remove(str(trajectory.trajectory_id))
    return host.store.num_trajectories


def evaluation(run: str, version: int, groups: list[dict[str, Any]]) -> dict[str, Any]:
    """Store an evaluation's trajectories; returns their mean reward, overall and by bin."""
    host = runtime_here(run)
    if (made := read_evaluation(host.spec.evaluations_dir, version)) is not None:
        return made
    trajectories = [member for meta in groups for member in read_group(Path(meta["path"]))]
    _append(host, trajectories, None)
    known = evaluation_outcome(version, trajectories)
    host.context.report(EvaluationFinished(version, known["reward"], known["num"]))
    with contextlib.suppress(RecordExists):
        create_exclusive(evaluation_path(host.spec.evaluations_dir, version), sealed_text(known).encode(), fsync=True)
    return read_evaluation(host.spec.evaluations_dir, version) or known


def evaluation_outcome(version: int, trajectories: Sequence[Trajectory]) -> dict[str, Any]:
    """The content of an evaluation's file; an unknown reward is None.

    ``failures`` counts trajectories that ended with any failure; ``left_out`` counts trajectories
    without a reward, because the failure was not the model's.
    """
    graded = [t for t in trajectories if t.failure.trains]
    by_bin: dict[str, list[float]] = {}
    for t in graded:
        if (name := t.prompt.facts.get(BIN)) is not None:
            by_bin.setdefault(str(name), []).append(t.reward)
    reward = float(np.mean([t.reward for t in graded])) if graded else math.nan
    return {
        "version": version,
        "num": len(trajectories),
        "failures": sum(t.failure is not FailureClass.NONE for t in trajectories),
        "left_out": len(trajectories) - len(graded),
        "reward": reward if np.isfinite(reward) else None,
        "bins": {name: [float(np.mean(v)), len(v)] for name, v in sorted(by_bin.items(), key=_by_number)},
    }


def _by_number(entry: tuple[str, Any]) -> tuple[float, str]:
    first = entry[0].split(" ")[0]
    return (float(first) if first.isdecimal() else math.inf), entry[0]

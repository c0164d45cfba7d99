"""Task functions of a batch: its members and advantages, its numbers, and its place in the store."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from libra.errors import RecordExists
from libra.graph.late_groups import late_facts, late_numbers, take_delivered
from libra.graph.member_rows import member_rows, spare_numbers
from libra.graph.teacher_nodes import taught_numbers, with_scores
from libra.policy import Verdict, staleness_of
from libra.store.run_records import commit_batch, group_path, read_batch, read_batch_facts, read_group, read_waves
from libra.types import EndReason, FailureClass, Prompt, Trajectory
from libra.worker.runtime import WorkerRuntime, runtime_here
from libra.worker.training.batch_numbers import agent_numbers, failure_counts, signal_numbers
from libra.worker.training.batch_rows import late_rows, lengths, members_of, take_late, without_stale

Lengths = tuple[int, int, int, int, float]
"""Tokens of prompt, generated and observed; turns; seconds with tools."""


def lengths_of(trajectories: Iterable[Trajectory]) -> list[Lengths]:
    """Lengths of every trajectory that has a turn."""
    found = []
    for trajectory in trajectories:
        if turns := trajectory.turns:
            generated, observed = (
                sum(int(turn[name]) for turn in turns) for name in ("generated_tokens", "observation_tokens")
            )
            tool_s = float(sum(turn["tool_s"] for turn in turns))
            found.append((int(turns[0]["prompt_tokens"]), generated, observed, len(turns), round(tool_s, 6)))
    return found


async def batch(run: str, batch: int, waves: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    """Compute advantages and commit the membership before the step. The plugin opens the node once it knows the members.

    A streamed step has the members of its ``waves``, in that order, with the committed advantages.
    """
    host = runtime_here(run)
    trainer = host.spec.config.trainer
    members = await host.context.worker.scheduler.libra_members(run=run, batch=batch)
    paths = [group_path(host.spec.groups_dir, *member) for member in members]
    groups = [read_group(path) for path in paths]
    trajectories = [trajectory for group in groups for trajectory in group]
    came = await take_delivered(host.context, batch, groups) if trainer.late != "off" else {}
    streamed = [row for wave in read_waves(host.spec.waves_dir, batch) for row in wave] if waves else []
    staleness = staleness_of(host.spec.config)
    rows = streamed if len(streamed) == len(groups) else member_rows(trainer, groups, paths, batch, staleness)
    if rows is not streamed:
        await with_scores(host.context, batch, rows)
    facts = {"groups": rows} | late_facts(host.context, batch, groups, rows, came)
    try:
        commit_batch(host.spec.batches_dir, batch, [t.trajectory_id for t in trajectories], **facts)
    except RecordExists:
        facts = read_batch_facts(host.spec.batches_dir, batch)
        rows = facts["groups"]
        for row, group in zip(rows, groups, strict=True):
            take_late(group, row)
    late = late_rows(facts)
    if trainer.dispatch == "peer" and not waves:
        await with_blocks(host, members, groups, rows)
        for row in late:
            path = group_path(host.spec.groups_dir, row["iteration"], row["group"])
            corrected = [without_stale(t, row) for t in take_late(read_group(path), row)]
            row |= {"rows": [str(t.trajectory_id) for t in corrected], "lengths": lengths(corrected), "block": None}
    return {
        "batch": batch,
        "members": rows,
        "late": late,
        "stats": batch_stats(groups, rows, batch)
        | spare_numbers(rows, trainer.train_prompts)
        | late_numbers(facts)
        | taught_numbers(rows)
        | agent_numbers(host.spec.config, trajectories)
        | generated_for(groups, rows),
    }


async def with_blocks(
    host: WorkerRuntime, members: Sequence[Any], groups: list[list[Trajectory]], rows: list[dict[str, Any]]
) -> None:
    """Add to the rows of groups who keeps their trajectories in memory, and their lengths."""
    blocks = await host.context.worker.scheduler.libra_blocks(run=host.spec.run, groups=members)
    for row, group, block in zip(rows, groups, blocks, strict=True):
        row |= {"rows": [str(t.trajectory_id) for t in group], "block": block}
        row["lengths"] = lengths([without_stale(t, row) for t in group])


def lags(groups: list[list[Trajectory]], rows: list[dict[str, Any]], batch: int) -> np.ndarray:
    """Lag in versions of every generated token that may train; tokens that are left out for their age have none."""
    parts = [np.zeros(0, np.int32)]
    for group, row in zip(groups, rows, strict=True):
        if row.get("over_age") != Verdict.DROP and "spare" not in row:
            kept = [without_stale(t, row) for t in group if t.failure.trains]
            parts += [batch - t.weight_version[t.is_action] for t in kept]
    return np.concatenate(parts)


def batch_stats(groups: list[list[Trajectory]], rows: list[dict[str, Any]], batch: int) -> dict[str, Any]:
    """Metrics of a batch that need no step; ``rows`` are its facts, one a group."""
    lag = lags(groups, rows, batch)
    late = [row["over_age"] for row in rows if "over_age" in row]
    return _batch_stats([t for group in groups for t in group], rows, lag) | ({"over_age": len(late)} if late else {})


def _batch_stats(trajectories: list[Trajectory], rows: list[dict[str, Any]], lag: np.ndarray) -> dict[str, Any]:
    trains = [t for t in trajectories if t.failure.trains]
    return {
        "reward": float(np.mean([t.reward for t in trains])) if trains else float("nan"),
        "trajectories": len(trajectories),
        "failures": sum(t.failure is not FailureClass.NONE for t in trajectories),
        "left_out": len(trajectories) - len(trains),
        **failure_counts(trajectories),
        **signal_numbers(trajectories, rows),
        "generated_tokens": int(sum(t.num_action_tokens for t in trajectories)),
        "tokens": int(sum(len(t.token_ids) for t in trajectories)),
        "turns": int(sum(len(t.turns) for t in trajectories)),
        "max_turns": max((len(t.turns) for t in trajectories), default=0),
        "length_ends_frac": float(np.mean([t.end_reason is EndReason.LENGTH for t in trajectories])),
        "lag": float(lag.mean()) if lag.size else 0.0,
        "lag_max": int(lag.max()) if lag.size else 0,
    }


def batch_numbers(run: str, batch: int) -> dict[str, Any]:
    """Metrics of a committed batch that need no step."""
    spec = runtime_here(run).spec
    facts = read_batch_facts(spec.batches_dir, batch)
    rows = facts["groups"]
    groups = [members_of({"members": [row]}, spec.groups_dir) for row in rows]
    numbers = {"iteration": batch, **batch_stats(groups, rows, batch), **late_numbers(facts), **taught_numbers(rows)}
    numbers |= agent_numbers(spec.config, (member for group in groups for member in group))
    return numbers | spare_numbers(rows, spec.config.trainer.train_prompts)


def store(run: str, batch: dict[str, Any]) -> dict[str, Any]:
    """The one committer: append a batch's groups to zarr, then remove the journal records they were built from."""
    host = runtime_here(run)
    assert host.store is not None
    started_s = time.time()
    append(host, members_of(batch, host.spec.groups_dir), batch["batch"])
    return {"stored": host.store.num_trajectories, "store_s": time.time() - started_s}


def store_missing(run: str, batches: int) -> int:
    """Append committed batches that an earlier start of the run left out of the store; returns the number of trajectories."""
    host = runtime_here(run)
    assert host.store is not None
    before = host.store.num_trajectories
    left = host.context.journal.trajectories()
    for number in range(batches):
        ids = read_batch(host.spec.batches_dir, number)
        if len(host.store.among(ids)) < len(ids):
            rows = read_batch_facts(host.spec.batches_dir, number)["groups"]
            append(host, members_of({"members": rows}, host.spec.groups_dir), number)
        elif not host.spec.config.store.keep_journals:
            for tid in ids:
                if str(tid) in left:
                    host.context.journal.remove(str(tid))
    return host.store.num_trajectories - before


def append(host: WorkerRuntime, trajectories: list[Trajectory], batch: int | None) -> None:
    """Append the trajectories that the store lacks, and remove their journal records."""
    assert host.store is not None
    stored = set(host.store.among([t.trajectory_id for t in trajectories]))
    host.store.append([t for t in trajectories if t.trajectory_id not in stored], batch=batch)
    if not host.spec.config.store.keep_journals:
        for trajectory in trajectories:
            host.context.journal.remove(str(trajectory.trajectory_id))


def question_chars(prompt: Prompt) -> int:
    """Characters of all messages before the first generation."""
    return sum(len(message["content"]) for message in prompt.messages)


def generated_for(groups: list[list[Trajectory]], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Tokens by worker, and lengths of prompts and trajectories of a batch, for the planner.

    For each group that has a member: its prompt's characters with its generated tokens (``question_tokens``), and with the
    tokens of its members that have a gradient according to ``rows``, the batch's facts (``trained_tokens``).
    """
    members = [member for group in groups for member in group]
    by_worker: dict[str, int] = {}
    for turn in (turn for member in members for turn in member.turns):
        by_worker[turn["worker"]] = by_worker.get(turn["worker"], 0) + int(turn["generated_tokens"])
    generated, trained = [], []
    for group, row in zip(groups, rows, strict=True):
        if group:
            chars = question_chars(group[0].prompt)
            generated.append((chars, sum(member.num_action_tokens for member in group)))
            parts = zip(group, row["advantages"], row["trains"], strict=True)
            trained.append((chars, sum(len(m.token_ids) for m, advantage, trains in parts if trains and advantage)))
    return {
        "worker_tokens": by_worker,
        "question_tokens": generated,
        "trained_tokens": trained,
        "trajectory_lengths": lengths_of(members),
    }

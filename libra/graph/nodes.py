"""The task functions of an iteration graph: what each node does on its worker. ``libra.graph.iteration`` wires them.

A node names the run; the worker's `LibraHost` knows the rest. Nodes return metadata (ids, counts, paths), never tensors,
and every one of them can run twice without harm: what it wrote the first time is found and used.
"""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from distributed import Reschedule, get_worker

from libra.envs import run_grader
from libra.errors import (
    EngineAsleep,
    EnvironmentFault,
    LibraError,
    MismatchAlarm,
    RecordExists,
    RewardFault,
    TrainError,
)
from libra.graph.pause import pause_reason
from libra.graph.prompt_lengths import generated_for
from libra.store.batch_membership import commit_batch, read_batch, read_batch_facts
from libra.store.exclusive_files import create_exclusive
from libra.store.group_records import group_path, read_group, write_group
from libra.types import EndReason, Episode, FailureClass, Prompt, Trajectory, TrajectoryId
from libra.worker.batch_members import members_of
from libra.worker.batch_rows import FETCHED, SliceFetcher, batch_elsewhere, lengths
from libra.worker.failure_classes import failure_counts, failure_of
from libra.worker.gang_member import turn
from libra.worker.host import LibraHost
from libra.worker.recovery import catch_up
from libra.worker.reports import report
from libra.worker.run_spec import RunSpec
from libra.worker.setup import host_here as _host
from libra.worker.step_records import read_step_record, write_step_record
from libra.worker.weight_publishing import assist, publish_checked

if TYPE_CHECKING:
    from libra.train import GroupRewards

GRADE_TIMEOUT_S = 60.0


def gate(run: str, iteration: int) -> int:
    """Opened by the plugin once version ``iteration - eta`` is published."""
    return iteration


def prompts(run: str, iteration: int, split: str = "train", count: int = 0) -> list[Prompt | str]:
    """The questions of one iteration; one that the environment cannot give is the text of its error instead."""
    host = _host(run)
    count = count or host.spec.config.trainer.prompts
    first = iteration * count if split == "train" else 0
    questions: list[Prompt | str] = []
    for index in range(first, first + count):
        try:
            questions.append(host.environment.prompt(split, index))
        except LibraError:
            raise
        except Exception as error:  # noqa: BLE001 - the boundary to the user's environment, whose faults are data
            questions.append(
                f"{host.environment.name}.prompt({split!r}, {index}) raised {type(error).__name__}: {error}"
            )
    if all(isinstance(question, str) for question in questions):
        raise EnvironmentFault(
            f"environment {host.environment.name}: no prompt of iteration {iteration} could be made; the first: {questions[0]}"
        )
    return questions


async def trajectory(
    run: str, asked: list[Prompt | str], iteration: int, group: int, sample: int, split: str = "train"
) -> dict[str, Any]:
    """One quantum of a trajectory, then ``Reschedule`` until it has ended."""
    host = _host(run)
    tid = TrajectoryId(iteration, group, sample, split)
    question = asked[group]
    key = host.spec.key("trajectory", iteration, group, sample, split=split)
    if isinstance(question, str):
        return {"trajectory": tuple(tid), "prompt": question}
    try:
        state = await host.quantum(key, tid, question)
    except (RecordExists, EngineAsleep):
        raise Reschedule() from None  # somebody else ran this quantum, or has to; look again
    if state.phase is not None:
        raise Reschedule()
    return {"trajectory": tuple(tid), "prompt": question}


def finished(host: LibraHost, results: list[dict[str, Any]]) -> list[tuple[Trajectory, Episode]]:
    """Trajectories of a group with their episodes, read from the journal."""
    pairs: list[tuple[Trajectory, Episode]] = []
    for result in results:
        tid, question = TrajectoryId(*result["trajectory"]), result["prompt"]
        if isinstance(question, str):
            state = host.state(tid, Prompt(f"{tid.split}-{tid.iteration}-{tid.group}", ()))
            state.end, state.failure, state.detail = EndReason.FAILURE, FailureClass.ENVIRONMENT, question
        else:
            state = host.state(tid, question)
        assert state.end is not None, f"{tid} has not ended"
        pairs.append((state.trajectory(host.spec.epoch), state.episode()))
    return pairs


def episodes(run: str, results: list[dict[str, Any]]) -> list[Episode]:
    """The finished trajectories of a group as a grader sees them; input for nodes of your own."""
    return [episode for _, episode in finished(_host(run), results)]


async def group(
    run: str,
    results: list[dict[str, Any]],
    iteration: int,
    group: int,
    split: str = "train",
    extra: list[float] | None = None,
) -> dict[str, Any]:
    """Grade a group and write its immutable record.

    ``extra``, from a node of the user's, has one number per trajectory, added to the environment's reward.
    """
    host = _host(run)
    worker = host.worker
    path = group_path(host.spec.groups_dir, iteration, group, split)
    if path.exists():
        members = read_group(path)
    else:
        pairs = finished(host, results)
        members = [trajectory for trajectory, _ in pairs]
        await asyncio.gather(*(_grade(host, t, e, extra, i) for i, (t, e) in enumerate(pairs)))
        try:
            write_group(host.spec.groups_dir, iteration, group, members)
        except RecordExists:
            members = read_group(path)
    for member in members:
        host.states.pop(member.trajectory_id, None)
    meta = _group_meta(path, split, iteration, group, members)
    kept = host.rows.keep(iteration, group, members) if host.rows is not None and split == "train" else None
    report(worker, host.spec, "group", **{k: v for k, v in meta.items() if k != "path"}, block=kept)
    return meta


async def _grade(host: LibraHost, member: Trajectory, episode: Episode, extra: list[float] | None, index: int) -> None:
    """Give one trajectory its reward, or its failure class where the reward is at fault.

    A grader that failed is asked again about the same trajectory: another one that it likes better would be a biased sample.
    """
    if not member.failure.trains:
        return
    failed = [member.retried] if member.retried else []
    for left in reversed(range(host.spec.config.trainer.resample + 1)):
        try:
            reward = await run_grader(host.environment, episode, GRADE_TIMEOUT_S)
            member.reward = reward + (0.0 if extra is None else _finite(float(extra[index]), member))
            break
        except RewardFault as error:
            failure = failure_of(error)
            if left:
                failed.append(str(failure))
                continue
            member.failure, member.failure_detail, member.reward = failure, str(error)[:2000], float("nan")
    member.retried = ",".join(failed)


def _finite(more: float, member: Trajectory) -> float:
    if not np.isfinite(more):
        raise RewardFault(f"{member.trajectory_id}: the reward node returned {more}; it must be a finite number")
    return more


def _group_meta(path: Path, split: str, iteration: int, group: int, members: list[Trajectory]) -> dict[str, Any]:
    rewards = [m.reward for m in members if m.failure.trains]
    failures: dict[str, int] = {}
    for member in members:
        graded = member.end_reason is not EndReason.FAILURE
        if not member.failure.trains and (
            graded or not member.prompt.messages
        ):  # others were reported by their quantum
            failures[str(member.failure)] = failures.get(str(member.failure), 0) + 1
    oldest = [m.oldest_version for m in members if m.num_action_tokens]
    return {
        "path": str(path),
        "split": split,
        "iteration": iteration,
        "group": group,
        "oldest_version": min(oldest, default=-1),
        "reward": float(np.mean(rewards)) if rewards else None,
        "failures": failures,
    }


async def batch(run: str, batch: int) -> dict[str, Any]:
    """Opened by the plugin with its members: compute advantages and commit the membership before the step."""
    from libra.train import batch_advantages

    host = _host(run)
    worker = host.worker
    trainer = host.spec.config.trainer
    members = await worker.scheduler.libra_members(run=run, batch=batch)
    paths = [group_path(host.spec.groups_dir, *member) for member in members]
    groups = [read_group(path) for path in paths]
    trajectories = [trajectory for group in groups for trajectory in group]
    advantages, trains = batch_advantages(
        [_group_rewards(group) for group in groups],
        trainer.advantage,
        normalize_std=trainer.normalize_std,
        eps=trainer.std_eps,
        drop_uniform_groups=trainer.drop_uniform_groups,
        drop_truncated=trainer.drop_truncated,
    )
    rows = [
        {
            "iteration": iteration,
            "group": group_index,
            "path": str(path),
            "advantages": advantages[index].tolist(),
            "trains": trains[index].tolist(),
        }
        for index, ((iteration, group_index), path) in enumerate(zip(members, paths, strict=True))
    ]
    lag = _lags(trajectories, batch)
    if lag.size and lag.max() > host.spec.config.run.eta:
        raise TrainError(
            f"batch {batch}: a token has lag {lag.max()}, above eta {host.spec.config.run.eta}; the batch is not trained on"
        )
    try:
        commit_batch(host.spec.batches_dir, batch, [t.trajectory_id for t in trajectories], groups=rows)
    except RecordExists:
        rows = read_batch_facts(host.spec.batches_dir, batch)["groups"]
    if trainer.dispatch == "peer":
        blocks = await worker.scheduler.libra_blocks(run=run, groups=members)
        for row, group, block in zip(rows, groups, blocks, strict=True):
            row |= {"rows": [str(t.trajectory_id) for t in group], "lengths": lengths(group), "block": block}
    return {"batch": batch, "members": rows, "stats": _batch_stats(trajectories, lag) | generated_for(groups, rows)}


def _group_rewards(group: list[Trajectory]) -> GroupRewards:
    from libra.train import GroupRewards

    return GroupRewards(
        reward=np.array([t.reward for t in group]),
        valid=np.array([t.failure.trains for t in group]),
        num_tokens=np.array([t.num_action_tokens for t in group]),
        finished=np.array([t.end_reason is not EndReason.LENGTH for t in group]),
    )


def _lags(trajectories: list[Trajectory], batch: int) -> np.ndarray:
    """Lag of every generated token that trains, in versions."""
    parts = [batch - t.weight_version[t.is_action] for t in trajectories if t.failure.trains]
    return np.concatenate(parts) if parts else np.zeros(0, np.int32)


def _batch_stats(trajectories: list[Trajectory], lag: np.ndarray) -> dict[str, float]:
    trains = [t for t in trajectories if t.failure.trains]
    failures = [t for t in trajectories if not t.failure.trains]
    return {
        "reward": float(np.mean([t.reward for t in trains])) if trains else float("nan"),
        "trajectories": len(trajectories),
        "failures": len(failures),
        **failure_counts(trajectories),
        "generated_tokens": int(sum(t.num_action_tokens for t in trajectories)),
        "tokens": int(sum(len(t.token_ids) for t in trajectories)),
        "turns": int(sum(len(t.turns) for t in trajectories)),
        "max_turns": max((len(t.turns) for t in trajectories), default=0),
        "length_ends_frac": float(np.mean([t.end_reason is EndReason.LENGTH for t in trajectories])),
        "lag": float(lag.mean()) if lag.size else 0.0,
        "lag_max": int(lag.max()) if lag.size else 0,
    }


def store(run: str, batch: dict[str, Any]) -> dict[str, Any]:
    """The one committer: append a batch's groups to zarr, then drop the records they were made of."""
    host = _host(run)
    assert host.store is not None
    started_s = time.time()
    _append(host, members_of(batch, host.spec.groups_dir), batch["batch"])
    return {"stored": host.store.num_trajectories, "store_s": time.time() - started_s}


def _append(host: LibraHost, trajectories: list[Trajectory], batch: int | None) -> None:
    """Append what is not in the store yet; the records it was made of are not needed any more."""
    assert host.store is not None
    host.store.append([t for t in trajectories if t.trajectory_id not in host.store], batch=batch)
    if not host.spec.config.store.keep_journals:
        for trajectory in trajectories:
            host.journal.remove(str(trajectory.trajectory_id))


def store_missing(run: str, batches: int) -> int:
    """Append committed batches that an earlier start of the run did not get to; returns how many trajectories."""
    host = _host(run)
    assert host.store is not None
    before = host.store.num_trajectories
    for number in range(batches):
        ids = read_batch(host.spec.batches_dir, number)
        if any(tid not in host.store for tid in ids):
            rows = read_batch_facts(host.spec.batches_dir, number)["groups"]
            _append(host, members_of({"members": rows}, host.spec.groups_dir), number)
        elif not host.spec.config.store.keep_journals:
            for tid in ids:
                host.journal.remove(str(tid))
    return host.store.num_trajectories - before


def step(run: str, batch: dict[str, Any], rank: int) -> dict[str, Any]:
    """One optimizer step (all epochs and minibatches of it) of replica ``rank`` on a committed batch."""
    host = _host(run)
    started_s = time.time()
    with turn(host, rank):
        assert host.checkpoints is not None, (
            f"rank {rank}: step {batch['batch']} was sent to a worker without a replica"
        )
        if host.paused is not None and batch["batch"] > host.paused[0]:
            raise MismatchAlarm(host.paused[1])
        catch_up(host, batch["batch"], or_next=True)  # a worker that was lost took its replica along
        if host.checkpoints.replica.steps_done > batch["batch"] + 1:
            return {**read_step_record(host.spec, batch["batch"]), "rank": rank}
        fetcher = None
        if host.spec.config.trainer.dispatch == "peer":
            fetcher = SliceFetcher(batch, host.worker.address, host.spec)
            result = host.checkpoints.step(batch_elsewhere(batch, fetcher), batch["batch"])
        else:
            result = host.checkpoints.step(members_of(batch, host.spec.groups_dir, of_the_step=True), batch["batch"])
        if (reason := pause_reason(host.spec, result.as_dict())) is not None:
            host.paused = batch["batch"], reason
        numbers = {**result.as_dict(), "rank": rank, "train_s": time.time() - started_s}
        numbers["train_on_gpu"] = int(host.checkpoints.replica.device.type == "cuda")
        numbers |= fetcher.numbers if fetcher is not None else {}
        if rank == 0:
            write_step_record(host.spec, batch["batch"], numbers)
    return numbers


def update(run: str, steps: list[dict[str, Any]]) -> dict[str, Any]:
    """Metadata only: every rank must be at the same step with the same digest."""
    first = steps[0]
    for other in steps[1:]:
        if (other["step"], other["digest"]) != (first["step"], first["digest"]):
            raise TrainError(
                f"ranks disagree after a step: rank 0 is at {first['step']} with {first['digest']}, "
                f"rank {other['rank']} at {other['step']} with {other['digest']}"
            )
    fetched = {name: sum(s.get(name, 0) for s in steps) for name in FETCHED if name in first}
    report(get_worker(), _host(run).spec, "step", step=first["step"], loss=first["loss"], train_s=first["train_s"])
    fullest = max(int(each.get("peak_bytes", 0)) for each in steps)
    return first | fetched | {"train_peak_bytes": fullest}


def first(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """What rank 0 answered."""
    return answers[0]


def publish(run: str, updated: dict[str, Any], rank: int = 0) -> dict[str, Any]:
    """Publish the replica's weights as the next version; ranks other than 0 help where each has a shard."""
    host = _host(run)
    with turn(host, rank):
        return _publish(host, updated["step"] + 1, rank)


def _publish(host: LibraHost, version: int, rank: int) -> dict[str, Any]:
    started_s = time.time()
    assert host.replica is not None
    catch_up(host, version)
    if rank > 0:
        if host.replica.is_sharded and host.replica.steps_done == version:
            assist(host.replica, host.spec.config.rollout.max_context_tokens)
        return {"version": version, "rank": rank}
    if host.replica.steps_done > version:  # asked again after later steps: it was published then
        published = host.weights.get(version)
    else:
        published = publish_checked(host.weights, host.replica, version, host.spec.config.rollout.max_context_tokens)
    host.weights.drop(keep_last=host.spec.config.store.keep_versions)
    report(
        host.worker,
        host.spec,
        "published",
        version=published.number,
        digest=published.digest,
        num_bytes=published.num_bytes,
        address=host.worker.address,
        weights=host.offered,
    )
    return {"version": published.number, "digest": published.digest, "publish_s": time.time() - started_s}


def restore(run: str, batches: int, stored: int, rank: int = 0) -> dict[str, Any]:
    """Bring the replica to where ``batches`` committed batches lead, without generating, and publish that version.

    ``replayed`` has the numbers of each step that was taken again.
    """
    host = _host(run)
    started_s = time.time()
    with turn(host, rank):
        replayed = [*host.replayed, *catch_up(host, batches)]
        published = _publish(host, batches, rank)
        assert host.checkpoints is not None
        saved = [str(path) for path in host.checkpoints.save_due(batches)]
    return {**published, "saved": saved, "replayed": replayed, "stored": stored, "restore_s": time.time() - started_s}


def batch_numbers(run: str, batch: int) -> dict[str, Any]:
    """What can be said of a committed batch without taking its step again."""
    spec = _host(run).spec
    trajectories = members_of({"members": read_batch_facts(spec.batches_dir, batch)["groups"]}, spec.groups_dir)
    return {"iteration": batch, **_batch_stats(trajectories, _lags(trajectories, batch))}


def checkpoint(run: str, published: dict[str, Any]) -> str:
    """Save model and optimizer in Hugging Face layout; returns the directory. Steps go on meanwhile."""
    host = _host(run)
    assert host.checkpoints is not None
    if host.gang is not None:  # a group is brought up to date when it forms
        return str(host.checkpoints.save_or_later(published["version"]))
    catch_up(host, published["version"])
    return str(host.checkpoints.save(published["version"]))


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
    report(get_worker(), _host(run).spec, "iteration", iteration=iteration, reward=reward, lag=values["lag"])
    return {"iteration": iteration, "version": published["version"], **values}


def evaluation(run: str, version: int, groups: list[dict[str, Any]]) -> dict[str, Any]:
    """Gather the held-out questions asked at a version: store them, and return mean reward, overall and by bin."""
    host = _host(run)
    if (made := read_evaluation(host.spec, version)) is not None:
        return made
    paths = [Path(meta["path"]) for meta in groups]
    trajectories = [member for path in paths for member in read_group(path)]
    _append(host, trajectories, None)
    graded = [t for t in trajectories if t.failure.trains]
    by_bin: dict[int, list[float]] = {}
    for t in graded:
        if "num_operations" in t.prompt.facts:
            by_bin.setdefault(int(t.prompt.facts["num_operations"]), []).append(t.reward)
    result: dict[str, Any] = {
        "version": version,
        "num": len(trajectories),
        "failures": len(trajectories) - len(graded),
        "reward": float(np.mean([t.reward for t in graded])) if graded else float("nan"),
        "bins": {str(k): [float(np.mean(v)), len(v)] for k, v in sorted(by_bin.items())},
    }
    known = result | {"reward": result["reward"] if np.isfinite(result["reward"]) else None}  # JSON has no word for NaN
    try:
        create_exclusive(evaluation_path(host.spec, version), json.dumps(known).encode(), fsync=True)
    except RecordExists:
        return read_evaluation(host.spec, version) or result
    return result


def evaluation_path(spec: RunSpec, version: int) -> Path:
    """Where the outcome of an evaluation lies."""
    return spec.directory / "evaluations" / f"version-{version:06d}.json"


def read_evaluation(spec: RunSpec, version: int) -> dict[str, Any] | None:
    """The outcome of an evaluation that was made, None where it was not."""
    path = evaluation_path(spec, version)
    if not path.exists():
        return None
    result: dict[str, Any] = json.loads(path.read_bytes())
    return result | {"reward": float("nan") if result["reward"] is None else result["reward"]}

"""Task functions of the rollout: gate, prompts, trajectories, their groups, and teacher scores.

Every task function of `libra.graph` receives the run's name, finds the rest on its worker's host,
and returns metadata (ids, counts, paths), never tensors. A repeated task finds its own records.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from distributed import Reschedule

from libra.envs import decode_state
from libra.envs.asked_services import asking
from libra.errors import (
    ActionRevoked,
    ConfigError,
    EngineAsleep,
    EnvironmentFault,
    LibraError,
    RecordExists,
    ServiceTimeout,
)
from libra.facts import GroupCommitted, GroupScored, RowsKept
from libra.named_parts import raised_at
from libra.store.run_records import group_path, read_group, scores_path, write_group, write_scores
from libra.types import EndReason, Episode, FailureClass, Prompt, Trajectory, TrajectoryId
from libra.untrusted import error_text
from libra.worker.dask_worker import quantum_here
from libra.worker.runtime import WorkerRuntime, runtime_here, runtime_of
from libra.worker.services.service_models import Scored, ToTeach, scores_of, scoring_of
from libra.worker.trajectory.graded_members import grade, score_fault

logger = logging.getLogger(__name__)


def gate(run: str, iteration: int) -> int:
    """``iteration``; the plugin opens the gate once version ``iteration - eta`` is published."""
    return iteration


def prompts(run: str, iteration: int, split: str, count: int) -> list[Prompt | str]:
    """Prompts of an iteration; a prompt that the environment fails to give is the error's text."""
    environment = runtime_here(run).context.environment
    first = iteration * count if split == "train" else 0
    questions: list[Prompt | str] = []
    for index in range(first, first + count):
        try:
            questions.append(environment.prompt(split, index))
        except LibraError:
            raise
        except Exception as error:  # noqa: BLE001 - the boundary to the user's environment, whose faults are data
            questions.append(
                f"{environment.name}.prompt({split!r}, {index}) raised {error_text(error)}{raised_at(error)}"
            )
    if all(isinstance(question, str) for question in questions):
        raise EnvironmentFault(
            f"environment {environment.name}: gave no prompt for iteration {iteration}; its first error: {questions[0]}"
        )
    return questions


async def trajectory(
    run: str, asked: list[Prompt | str], iteration: int, group: int, sample: int, split: str = "train"
) -> None:
    """Run one quantum, then ``Reschedule`` until the trajectory has ended; records are kept."""
    host = runtime_of(run)
    tid = TrajectoryId(iteration, group, sample, split)
    question = asked[group]
    key = host.spec.key("trajectory", iteration, group, sample, split=split)
    if isinstance(question, str):
        return
    try:
        with asking(host.services):
            state = await host.quanta.run(key, tid, question, quantum_here(host.context.worker, key))
    except (RecordExists, EngineAsleep, ActionRevoked):
        raise Reschedule() from None  # another worker ran this quantum, or has to; or it was stopped for another
    if state.phase is not None:
        raise Reschedule()


def _finished(
    host: WorkerRuntime, asked: list[Prompt | str], iteration: int, group: int, split: str, samples: int
) -> list[tuple[Trajectory, Episode]]:
    pairs: list[tuple[Trajectory, Episode]] = []
    question, decode = asked[group], partial(decode_state, host.context.environment)
    for tid in (TrajectoryId(iteration, group, sample, split) for sample in range(samples)):
        if isinstance(question, str):
            state = host.quanta.state(tid, Prompt(f"{split}-{iteration}-{group}", ()))
            state.end, state.failure, state.detail = EndReason.FAILURE, FailureClass.ENVIRONMENT, question
        else:
            state = host.quanta.state(tid, question)
        assert state.end is not None, f"{tid} has not ended"
        pairs.append((state.trajectory(host.spec.epoch), state.episode(decode)))
    return pairs


def episodes(run: str, asked: list[Prompt | str], ended: list[None], iteration: int, group: int) -> list[Episode]:
    """A group's finished trajectories as a grader sees them: the input of a user's own node."""
    return [episode for _, episode in _finished(runtime_here(run), asked, iteration, group, "train", len(ended))]


async def group(
    run: str,
    asked: list[Prompt | str],
    ended: list[None],
    iteration: int,
    group: int,
    split: str = "train",
    extra: list[float] | None = None,
) -> dict[str, Any]:
    """Grade a group, once its trajectories have ``ended``, and write its immutable record.

    ``extra``, from a user's own node, has one number per trajectory to add to its reward.
    """
    host = runtime_here(run)
    path = group_path(host.spec.groups_dir, iteration, group, split)
    if path.exists():
        members = read_group(path)
    else:
        members = await _graded(host, _finished(host, asked, iteration, group, split, len(ended)), extra)
        try:
            write_group(host.spec.groups_dir, iteration, group, members)
        except RecordExists:
            members = read_group(path)
    for member in members:
        host.quanta.drop(member.trajectory_id)
    rewards = [m.reward for m in members if m.failure.trains]
    failures = Counter(str(m.failure) for m in members if m.failure is not FailureClass.NONE)
    meta: dict[str, Any] = {
        "split": split,
        "iteration": iteration,
        "group": group,
        "oldest_version": min((m.oldest_version for m in members if m.num_action_tokens), default=-1),
        "reward": float(np.mean(rewards)) if rewards else None,
        "failures": dict(failures),
        "resampled": sum(member.attempt for member in members),
    }
    if host.rows is not None and split == "train":
        host.context.report(RowsKept(iteration, group, host.rows.keep(iteration, group, members)))
    host.context.report(GroupCommitted(**meta))
    return {"path": str(path), **meta}


async def _graded(
    host: WorkerRuntime, pairs: list[tuple[Trajectory, Episode]], extra: list[float] | None
) -> list[Trajectory]:
    if extra is not None and (fault := score_fault(extra, len(pairs))):
        raise ConfigError(f"{fault}; return a list with one number for each episode")
    environment, trainer, back_off = host.context.environment, host.spec.config.trainer, host.spec.back_off
    with asking(host.services):
        await asyncio.gather(
            *(
                grade(environment, trainer.resample, t, e, extra, i, late=trainer.late, back_off=back_off)
                for i, (t, e) in enumerate(pairs)
            )
        )
    return [trajectory for trajectory, _ in pairs]


async def teach(run: str, group: dict[str, Any] | None, iteration: int, number: int) -> dict[str, Any]:
    """Score a finished group by the teacher, and commit the scores beside its record, once.

    ``group`` is the result of its node. No batch depends on this node through Dask. A group that a
    service scores too late stays without scores.
    """
    host, began_s = runtime_here(run), time.time()
    path = group_path(host.spec.groups_dir, iteration, number)
    scores = scores_path(path)
    if not scores.exists():
        members, asked_s = read_group(path), time.perf_counter()
        try:
            found = await _scored(host, members)
            waited_s = max(0.0, time.perf_counter() - asked_s - found.seconds)
            with contextlib.suppress(RecordExists):
                write_scores(scores, found.taught)
                host.context.report(GroupScored(iteration, number, round(found.seconds, 6), round(waited_s, 6)))
        except ServiceTimeout as error:
            logger.warning("run %s: group %d of iteration %d is not scored: %s", run, number, iteration, error)
    return {"iteration": iteration, "group": number, "teach_s": time.time() - began_s}


async def _scored(host: WorkerRuntime, members: Sequence[Trajectory]) -> Scored:
    config = host.spec.config
    if (service := config.distil.service) is not None:
        assert host.services is not None, f"{host.context.name} was given a group to score and has no services"
        asked = ToTeach(members, scoring_of(config, host.context.model_dir), config.run.seed)
        answer: Scored = await host.services.answer(service, asked)
        return answer
    assert host.teacher is not None, f"{host.context.name} was given a group to score and supplies no TEACHER"
    return await asyncio.to_thread(scores_of, host.teacher, config.run.seed, members)

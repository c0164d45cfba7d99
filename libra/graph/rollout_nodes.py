"""Task functions of the rollout: gate, prompts, trajectories and their groups.

Every task function of `libra.graph` receives the run's name, finds the rest on its worker's host, and returns metadata (ids,
counts, paths), never tensors. Each may run twice: it finds what it wrote the first time.
"""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from distributed import Reschedule

from libra.envs import decode_state
from libra.envs.asked_services import asking
from libra.errors import ActionRevoked, ConfigError, EngineAsleep, EnvironmentFault, LibraError, RecordExists
from libra.facts import GroupCommitted, RowsKept
from libra.named_parts import raised_at
from libra.store.run_records import group_path, read_group, write_group
from libra.types import EndReason, Episode, FailureClass, Prompt, Trajectory, TrajectoryId
from libra.untrusted import error_text
from libra.worker.dask_worker import quantum_here
from libra.worker.runtime import WorkerRuntime, runtime_here, runtime_of
from libra.worker.trajectory.graded_members import grade, score_fault


def gate(run: str, iteration: int) -> int:
    """The plugin opens it once version ``iteration - eta`` is published."""
    return iteration


def prompts(run: str, iteration: int, split: str = "train", count: int = 0) -> list[Prompt | str]:
    """The prompts of one iteration; in place of one that the environment fails to give, the text of its error."""
    host = runtime_here(run)
    environment, count = host.context.environment, count or host.spec.config.trainer.prompts
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
    """One quantum of a trajectory, then ``Reschedule`` until the trajectory has ended; its records are in the journal."""
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


def finished(
    host: WorkerRuntime, asked: list[Prompt | str], iteration: int, group: int, split: str, samples: int
) -> list[tuple[Trajectory, Episode]]:
    """The ``samples`` trajectories of a group with their episodes, read from the journal."""
    pairs: list[tuple[Trajectory, Episode]] = []
    for sample in range(samples):
        tid, question = TrajectoryId(iteration, group, sample, split), asked[group]
        if isinstance(question, str):
            state = host.quanta.state(tid, Prompt(f"{tid.split}-{tid.iteration}-{tid.group}", ()))
            state.end, state.failure, state.detail = EndReason.FAILURE, FailureClass.ENVIRONMENT, question
        else:
            state = host.quanta.state(tid, question)
        assert state.end is not None, f"{tid} has not ended"
        decode = partial(decode_state, host.context.environment)
        pairs.append((state.trajectory(host.spec.epoch), state.episode(decode)))
    return pairs


def episodes(run: str, asked: list[Prompt | str], ended: list[None], iteration: int, group: int) -> list[Episode]:
    """The finished trajectories of a group as a grader sees them: the input of a user's own node."""
    return [episode for _, episode in finished(runtime_here(run), asked, iteration, group, "train", len(ended))]


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

    ``extra``, from a user's own node, has one number per trajectory, which is added to the environment's reward.
    """
    host = runtime_here(run)
    path = group_path(host.spec.groups_dir, iteration, group, split)
    if path.exists():
        members = read_group(path)
    else:
        pairs = finished(host, asked, iteration, group, split, len(ended))
        members = [trajectory for trajectory, _ in pairs]
        if extra is not None and (fault := score_fault(extra, len(pairs))):
            raise ConfigError(f"{fault}; return a list with one number for each episode")
        environment, trainer = host.context.environment, host.spec.config.trainer
        with asking(host.services):
            await asyncio.gather(
                *(
                    grade(environment, trainer.resample, t, e, extra, i, late=trainer.late, back_off=host.spec.back_off)
                    for i, (t, e) in enumerate(pairs)
                )
            )
        try:
            write_group(host.spec.groups_dir, iteration, group, members)
        except RecordExists:
            members = read_group(path)
    for member in members:
        host.quanta.drop(member.trajectory_id)
    meta = _group_meta(path, split, iteration, group, members)
    kept = host.rows.keep(iteration, group, members) if host.rows is not None and split == "train" else None
    rows = () if kept is None else (RowsKept(iteration, group, kept),)
    host.context.report(*rows, GroupCommitted(**{k: v for k, v in meta.items() if k != "path"}))
    return meta


def _group_meta(path: Path, split: str, iteration: int, group: int, members: list[Trajectory]) -> dict[str, Any]:
    rewards = [m.reward for m in members if m.failure.trains]
    failures: dict[str, int] = {}
    for member in members:
        if member.failure is not FailureClass.NONE:
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
        "resampled": sum(member.attempt for member in members),
    }

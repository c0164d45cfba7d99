"""Repairs of records from each other, the store, the event log and the teacher."""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from libra.config import resolve_model
from libra.config.service_devices import teacher_model
from libra.driver.damage import Repairs
from libra.driver.file_checks import RunCheck, journal_faults
from libra.driver.start_records import read_given
from libra.envs import decode_state
from libra.errors import LibraError, StoreError
from libra.facts import OpenBatch
from libra.policy import staleness_of
from libra.seals import parsed_json, sealed_text, unseal
from libra.store.event_log import lines_of
from libra.store.exclusive_files import create_exclusive
from libra.store.run_records import (
    commit_batch,
    group_path,
    groups_of,
    read_group,
    read_waves,
    write_group,
    write_scores,
)
from libra.store.trajectory_journal import Journal
from libra.store.trajectory_store import TrajectoryStore
from libra.types import Trajectory, TrajectoryId
from libra.worker.model_files import local_model
from libra.worker.run_spec import RunSpec
from libra.worker.trajectory.graded_members import grade
from libra.worker.trajectory.trajectory_state import TrajectoryRules, TrajectoryState

if TYPE_CHECKING:
    from libra.config import RunConfig
    from libra.types import Taught


_TRAJECTORY = re.compile(r"(?P<split>train|eval)-(?P<iteration>\d+)-(?P<group>\d+)-(?P<sample>\d+)")
_GROUP = re.compile(r"(?P<split>train|eval)-(?P<iteration>\d+)-(?P<group>\d+)\.group")


def repair_group(check: RunCheck, repairs: Repairs, name: str) -> None:
    """Rebuild a group record from the store, which has all its content; else from the journal, graded again.

    A record that no batch has is only set aside: a resumed run grades its trajectories again, or runs them.
    """
    match = _GROUP.fullmatch(Path(name).name)
    assert match is not None, name
    key = TrajectoryId(int(match["iteration"]), int(match["group"]), 0, match["split"])
    config = config_of(check)
    size = config.trainer.group_size if key.split == "train" else 1
    found = stored(check, key.split, key.iteration) or []
    members = [each.trajectory for each in found if each.trajectory.trajectory_id._replace(sample=0) == key]
    how = "made again from the store"
    if len(members) != size:
        if not any(Path(name).name in names for names in check.groups.values()):
            then = "its trajectories are graded again, or run again, when the run is resumed"
            repairs.done(f"{name}: set aside as {repairs.set_aside(name)}; {then}")
            return
        try:
            members, how = graded(check, config, key, size), "made again from the journal, and graded again"
        except LibraError as error:
            repairs.cannot(name, f"the store does not have it, and {error}")
            return
    for member in members:
        member.advantage = 0.0  # which a batch gives
    aside = repairs.set_aside(name)
    write_group(check.files.groups_dir, key.iteration, key.group, members, fsync=True)
    repairs.done(f"{name}: {how}{aside and f'; the old one is {aside}'}")


def graded(check: RunCheck, config: RunConfig, key: TrajectoryId, size: int) -> list[Trajectory]:
    """The trajectories of a group from its journal, graded by the run's environment.

    Raises StoreError if the journal does not have them whole, or rewards came from Python objects; ConfigError or
    EnvironmentFault if the environment cannot be made.
    """
    given = read_given(check.files.directory)
    if given["environment"] or given["score"]:
        raise StoreError("its rewards came from Python objects, which only the program that began the run has")
    journal, states = Journal(check.files.journal_dir), []
    environment = RunSpec(check.files.directory.name, 0, check.files.directory, "", config).make_environment()
    rules = TrajectoryRules.of(config, environment)
    index = key.group + (key.iteration * config.trainer.prompts if key.split == "train" else 0)
    prompt = environment.prompt(key.split, index)
    for sample in range(size):
        tid = key._replace(sample=sample)
        state = TrajectoryState(tid, prompt, rules)
        for record in journal.read(str(tid)):
            state.apply(record)
        if state.end is None:
            raise StoreError(f"the journal does not have all of {tid}")
        states.append(state)
    decode = partial(decode_state, environment)
    pairs = [
        (state.trajectory(max(record.epoch for record in state.records)), state.episode(decode)) for state in states
    ]

    async def grade_all() -> None:
        await environment.setup()
        try:
            await asyncio.gather(
                *(grade(environment, config.trainer.resample, *pair, late=config.trainer.late) for pair in pairs)
            )
        finally:
            await environment.close()

    asyncio.run(grade_all())
    return [member for member, _ in pairs]


def repair_batch(check: RunCheck, repairs: Repairs, name: str) -> None:
    """Rebuild the file of a batch: its members from the store or the event log, its advantages from their rewards."""
    from libra.graph.member_rows import member_rows  # brings torch

    number, config, files = int(Path(name).stem.split("-")[1]), config_of(check), check.files
    if config.trainer.late != "off":
        repairs.cannot(name, "which late rewards its batch took is recorded in no other file")
        return
    members = [each.trajectory for each in stored(check, "train") or [] if each.batch == number]
    how = "the store"
    groups: dict[tuple[int, int], list[Trajectory]] = {}
    for member in members:
        groups.setdefault((member.trajectory_id.iteration, member.trajectory_id.group), []).append(member)
    try:
        if not groups:
            how = "the event log and group records"
            groups = {
                group: read_group(group_path(files.groups_dir, *group))
                for group in opened_with(files.directory, number)
            }
        if not groups:
            raise StoreError("neither the store nor the event log has its members")
    except StoreError as error:
        repairs.cannot(name, str(error))
        return
    paths = [group_path(files.groups_dir, *group) for group in groups]
    rows = member_rows(config.trainer, [*groups.values()], paths, number, staleness_of(config))
    waves = [row for wave in read_waves(files.waves_dir, number) for row in wave]
    if groups_of(waves) == tuple(groups):  # a streamed step, which is repeated in the same waves
        rows = waves
    if members:
        for row, group in zip(rows, groups.values(), strict=True):
            row["advantages"] = [member.advantage for member in group]
    aside = repairs.set_aside(name)
    commit_batch(
        files.batches_dir, number, [each.trajectory_id for group in groups.values() for each in group], groups=rows
    )
    check.groups[number] = [path.name for path in paths]  # which may be repaired next
    repairs.done(f"{name}: made again from {how}{aside and f'; the old one is {aside}'}")


def repair_journal(check: RunCheck, repairs: Repairs, names: Sequence[str]) -> None:
    """Set aside unreadable records and the records after them: those quanta run again, unless the group's record exists."""
    if not names:
        return
    for trajectory, quantum, _ in list(journal_faults(check.files.journal_dir)):
        match = _TRAJECTORY.fullmatch(trajectory)
        key = (int(match["iteration"]), int(match["group"]), match["split"]) if match else None
        graded_already = key is not None and group_path(check.files.groups_dir, *key).exists()
        then = "its group is on record" if graded_already else "they run again, with the same seeds"
        asides = []
        number = quantum
        while repairs.exists(name := f"journal/{trajectory}.{number:04d}.rec") or number == quantum:
            asides += [aside] if (aside := repairs.set_aside(name)) else []
            number += 1
        for path in check.files.journal_dir.glob(f"{trajectory}.*.rec"):  # after a gap
            if int(path.name.split(".")[-2]) >= quantum:
                asides.append(repairs.set_aside(f"journal/{path.name}"))
        repairs.done(f"journal/{trajectory}: quanta from {quantum} on are set aside as {', '.join(asides)}; {then}")


def repair_evaluation(check: RunCheck, repairs: Repairs, name: str) -> None:
    """Rebuild the outcome of an evaluation from the store; without it a resumed run evaluates that version again."""
    from libra.graph.batch_nodes import evaluation_outcome  # brings torch

    version = int(Path(name).stem.split("-")[1])
    found = stored(check, "eval", version)
    if found is None:
        repairs.cannot(name, "the store, which has its trajectories, is damaged too")
        return
    aside = repairs.set_aside(name)
    if len(found) == config_of(check).evaluation.prompts:
        members = sorted((each.trajectory for each in found), key=lambda member: member.trajectory_id)
        text = sealed_text(evaluation_outcome(version, members))
        create_exclusive(check.files.directory / name, text.encode(), fsync=True)
        repairs.done(f"{name}: made again from the store{aside and f'; the old one is {aside}'}")
    else:
        repairs.done(f"{name}: set aside as {aside}; the store does not have its trajectories")


def repair_scores(check: RunCheck, repairs: Repairs) -> None:
    """Rebuild the scores of checkpoints, which determine the best one: from evaluations, or else from the metrics."""
    evaluated = bool(config_of(check).evaluation.every)
    scores: dict[str, float] = {}
    for step in check.whole_checkpoints:
        reward = _evaluated(check, step) if evaluated else _trained(check, step)
        if reward is not None and math.isfinite(reward):
            scores[f"step-{step:06d}"] = reward
    aside = repairs.set_aside("checkpoints/scores.json")
    (check.files.checkpoints_dir / "scores.json").write_text(sealed_text(scores) + "\n")
    repairs.done(
        f"checkpoints/scores.json: made again from {'evaluations' if evaluated else 'metrics'}"
        f"{aside and f'; the old one is {aside}'}"
    )


def _evaluated(check: RunCheck, step: int) -> float | None:
    try:
        reward = unseal((check.files.evaluations_dir / f"version-{step:06d}.json").read_bytes())["reward"]
    except (OSError, ValueError, KeyError):
        return None
    return None if reward is None else float(reward)


def _trained(check: RunCheck, step: int) -> float | None:
    found = None
    for line in (check.files.directory / "metrics.jsonl").read_text().splitlines():
        with contextlib.suppress(ValueError):
            values = parsed_json(line)
            if values.get("step") == step - 1 and values.get("reward") is not None:
                found = float(values["reward"])
    return found


class StoredTrajectory(NamedTuple):
    """A trajectory of the store, with the batch whose step consumed it; -1: none."""

    batch: int
    trajectory: Trajectory


def stored(check: RunCheck, split: str, iteration: int | None = None) -> list[StoredTrajectory] | None:
    """Trajectories of the store; None if it is damaged itself."""
    store = check.files.store_path
    if any(damage.kind in (store.name, f"{store.name}.digests") for damage in check.damages):
        return None
    with TrajectoryStore.open(store) as opened:
        columns = opened.columns()
        wanted = columns["split"] == split
        if iteration is not None:
            wanted &= columns["iteration"] == iteration
        rows = [int(row) for row in np.flatnonzero(wanted)]
        return [StoredTrajectory(int(columns["batch"][row]), opened.trajectory(row)) for row in rows]


def opened_with(run: Path, number: int) -> list[tuple[int, int]]:
    """The groups with which a batch was opened, by the event log; none if it does not say."""
    for line in lines_of(run / "events.jsonl", OpenBatch):
        with contextlib.suppress(ValueError, KeyError, TypeError):
            values = parsed_json(line)
            if values["batch"] == number and values["members"]:
                return [(int(iteration), int(group)) for iteration, group in values["members"]]
    return []


def config_of(check: RunCheck) -> RunConfig:
    """The configuration of the run."""
    from libra.config.load import load_resumed

    return load_resumed(check.files.directory)


def repair_teacher(check: RunCheck, repairs: Repairs, names: Sequence[str]) -> None:
    """Rebuild files of scores that committed batches were trained with; others are set aside, and a resumed run scores again."""
    taught = {f"{Path(name).stem}.scores" for batch in check.taught.values() for name in batch}
    asked: list[str] = []
    for name in names:
        if Path(name).name not in taught:
            then = "the teacher scores its group again when the run is resumed, if a batch is to have it"
            repairs.done(f"{name}: set aside as {repairs.set_aside(name)}; {then}")
        elif (scores := _stored_scores(check, Path(name).stem)) is not None:
            _replace(check, repairs, name, scores, "made again from the store")
        else:
            asked.append(name)
    if asked:
        _ask(check, repairs, asked)


def _stored_scores(check: RunCheck, stem: str) -> list[Taught | None] | None:
    split, iteration, group = stem.split("-")
    found = [
        each.trajectory
        for each in stored(check, split, int(iteration)) or []
        if each.trajectory.trajectory_id.group == int(group)
    ]
    scores = [each.taught for each in sorted(found, key=lambda each: each.trajectory_id.sample)]
    return scores if any(scores) else None


def _ask(check: RunCheck, repairs: Repairs, names: Sequence[str]) -> None:
    from libra.worker.services.service_models import load_teacher, scores_of  # brings torch

    config = config_of(check)
    try:
        model = load_teacher(config, Path(local_model(str(resolve_model(config.model.path)))))
    except LibraError as error:
        for name in names:
            repairs.cannot(name, f"the store does not have it, and its teacher cannot be asked again: {error}")
        return
    for name in names:
        try:
            members = read_group(check.files.groups_dir / f"{Path(name).stem}.group")
        except StoreError as error:
            repairs.cannot(name, f"the store does not have it, and {error}")
            continue
        taught = scores_of(model, config.run.seed, members).taught
        _replace(check, repairs, name, taught, f"{teacher_model(config)} was asked again")


def _replace(check: RunCheck, repairs: Repairs, name: str, scores: Sequence[Taught | None], how: str) -> None:
    aside = repairs.set_aside(name)
    path = check.files.directory / name
    path.parent.mkdir(exist_ok=True)
    write_scores(path, scores)
    repairs.done(f"{name}: {how}{aside and f'; the old one is {aside}'}")

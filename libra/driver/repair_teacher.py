"""Repairs what a teacher said of groups: from the store, which has what steps were taken with, or by asking it again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from libra.config import resolve_model
from libra.config.distil_checks import teacher_model
from libra.driver.damage import RunCheck
from libra.driver.repair_records import config_of, stored
from libra.driver.set_aside import Repairs
from libra.errors import LibraError, StoreError
from libra.store.group_records import read_group
from libra.store.teacher_scores import write_scores
from libra.worker.model_files import local_model

if TYPE_CHECKING:
    from libra.types import Taught


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
    """The scores of a group by the store; None if it does not have them."""
    split, iteration, group = stem.split("-")
    found = [
        each.trajectory
        for each in stored(check, split, int(iteration)) or []
        if each.trajectory.trajectory_id.group == int(group)
    ]
    scores = [each.taught for each in sorted(found, key=lambda each: each.trajectory_id.sample)]
    return scores if any(scores) else None


def _ask(check: RunCheck, repairs: Repairs, names: Sequence[str]) -> None:
    """Let the teacher score the groups again: the same tokens and draws, and the same numbers where the machine is the same."""
    from libra.worker.teacher_service import load_teacher, scores_of  # brings torch

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

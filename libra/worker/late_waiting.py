"""The groups that wait for late rewards after a batch, as its facts have them (``late.waiting``)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from libra.policy.late import GuessWorth, WaitingGroup
from libra.store.batch_membership import read_batch_facts
from libra.store.group_records import group_path
from libra.worker.run_spec import RunFiles


def waiting_after(files: RunFiles, batch: int) -> list[WaitingGroup]:
    """The groups that batch ``batch`` left with rewards to come; none for a batch before the first."""
    return [
        WaitingGroup(iteration, group, trained, tuple(missing), {int(s): float(v) for s, v in given.items()}, *slope)
        for iteration, group, trained, missing, given, *slope in _late_facts(files, batch).get("waiting", ())
    ]


def worth_after(files: RunFiles, batch: int) -> GuessWorth:
    """What guesses were worth by batch ``batch``."""
    return GuessWorth(*_late_facts(files, batch).get("worth", ()))


def waiting_row(group: WaitingGroup) -> list[Any]:
    """A group as `waiting_after` reads it."""
    given = {str(sample): value for sample, value in group.given.items()}
    return [group.iteration, group.group, group.batch, list(group.missing), given, group.slope]


def taught_names(facts: Mapping[str, Any]) -> list[str]:
    """Names of the group records of a batch that trained with scores of a teacher, by its facts."""
    return [Path(row["path"]).name for row in facts.get("groups", ()) if row.get("taught")]


def group_names(facts: Mapping[str, Any]) -> list[str]:
    """Names of the group records that a batch and those after it need, by its facts."""
    late = facts.get("late", {})
    rows = (*facts.get("groups", ()), *late.get("rows", ()))
    waiting = (group_path("", iteration, group).name for iteration, group, *_ in late.get("waiting", ()))
    return [*(Path(row["path"]).name for row in rows), *waiting]


def _late_facts(files: RunFiles, batch: int) -> dict[str, Any]:
    facts = read_batch_facts(files.batches_dir, batch) if batch >= 0 else {}
    late: dict[str, Any] = facts.get("late", {})
    return late

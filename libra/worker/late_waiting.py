"""What a batch leaves for the next one about late rewards, as its facts have it: groups that wait (``late.waiting``), and what
guesses are worth (``late.worth``)."""

from __future__ import annotations

from typing import Any

from libra.policy.late_rewards import GuessWorth, WaitingGroup
from libra.store.run_records import read_batch_facts
from libra.worker.run_spec import RunFiles


def waiting_after(files: RunFiles, batch: int) -> list[WaitingGroup]:
    """The groups that batch ``batch`` left with rewards to come; none for a batch before the first."""
    return [
        WaitingGroup(iteration, group, trained, tuple(missing), {int(s): float(v) for s, v in given.items()}, *weight)
        for iteration, group, trained, missing, given, *weight in _late_facts(files, batch).get("waiting", ())
    ]


def worth_after(files: RunFiles, batch: int) -> GuessWorth:
    """What guesses were worth by batch ``batch``."""
    return GuessWorth(*_late_facts(files, batch).get("worth", ()))


def waiting_row(group: WaitingGroup) -> list[Any]:
    """A group as `waiting_after` reads it."""
    given = {str(sample): value for sample, value in group.given.items()}
    return [group.iteration, group.group, group.batch, list(group.missing), given, group.guess_weight]


def _late_facts(files: RunFiles, batch: int) -> dict[str, Any]:
    facts = read_batch_facts(files.batches_dir, batch) if batch >= 0 else {}
    late: dict[str, Any] = facts.get("late", {})
    return late

"""The trajectories of a committed batch, with their advantages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from libra.store.group_records import read_group
from libra.types import Trajectory


def members_of(batch: dict[str, Any], groups_dir: Path, *, of_the_step: bool = False) -> list[Trajectory]:
    """All trajectories of a committed batch, with their advantages; ``of_the_step`` leaves out what a filter took out.

    ``groups_dir`` is where the run keeps its group records now; a batch remembers where they were, and a run may be moved.
    Failures that do not train are still among them: the replica counts those itself.
    """
    trajectories = []
    for row in batch["members"]:
        members = read_group(groups_dir / Path(row["path"]).name)
        for member, advantage, trains in zip(members, row["advantages"], row["trains"], strict=True):
            member.advantage = advantage
            if trains or not (of_the_step and member.failure.trains):
                trajectories.append(member)
    return trajectories

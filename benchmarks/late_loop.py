"""A loop in emulated time (`benchmarks.async_loop`) whose rewards come late, for `benchmarks.late --emulated`.

At the step of batch k the rewards of batch k - delay are there, and no others; until then the guess of `benchmarks.late_runs`
counts. What a batch does about late rewards (`libra.policy.late.settle`), the rows that correct a group
(`libra.graph.late_groups.corrections`), records of groups and what of them trains are the library's.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.async_loop import ENGINES, Loop, LoopSettings
from benchmarks.late_runs import guess
from benchmarks.report import QUICKSTART
from libra.config import RunConfig, load_config
from libra.envs.tool_arithmetic import ToolArithmetic
from libra.graph.late_groups import corrections, discount, guess_weight
from libra.graph.member_rows import member_rows
from libra.policy.late import GuessWorth, Place, WaitingGroup, settle
from libra.store.run_records import write_group
from libra.types import Episode, Trajectory
from libra.worker.batch_rows import members_of


class LateLoop(Loop):
    """A loop of ``config``, whose rewards come ``delay`` versions late."""

    def __init__(self, config: RunConfig, directory: Path, delay: int) -> None:
        environment = ToolArithmetic(timeout_rate=0.0, seed=config.run.seed)
        settings = LoopSettings(config.run.iterations, slots=config.rollout.slots // len(ENGINES), step_ticks=0)
        super().__init__(config, environment, directory / "weights", settings)
        self.delay, self.counted = delay, 0
        self.groups_dir = directory / "groups"
        self.groups_dir.mkdir()
        self._true: dict[Place, float] = {}
        self._late: tuple[WaitingGroup, ...] = ()
        self._worth = GuessWorth()

    def _take_reward(self, made: Trajectory, episode: Episode) -> None:
        super()._take_reward(made, episode)
        place = made.trajectory_id
        if place.split == "train" and self.delay:
            self._true[place.iteration, place.group, place.sample] = made.reward
            made.reward, made.late = guess(made.reward, self.config.run.seed, str(place)), [0.0, 1.0]

    def _rows(self, groups: list[list[Trajectory]], step: int) -> tuple[list[dict[str, Any]], list[Trajectory]]:
        if not self.delay:
            return super()._rows(groups, step)
        trainer, places = self.config.trainer, [group[0].trajectory_id for group in groups]
        paths = [
            write_group(self.groups_dir, place.iteration, place.group, group)
            for place, group in zip(places, groups, strict=True)
        ]
        rows = member_rows(trainer, groups, paths, step, self.staleness)
        due = [group for group in self._late if group.batch == step - self.delay]
        came = {place: self._true.pop(place) for group in due for place in group.places()}
        settled = settle(self._late, step, came, versions=trainer.late_versions)
        late, self._worth = corrections(self.config, self.groups_dir, settled.arrivals, self._worth)
        if trainer.late == "correct":
            self.counted += len(came)
            samples = tuple(range(trainer.group_size))
            weight = guess_weight(self.config, self._worth)
            begun = [WaitingGroup(place.iteration, place.group, step, samples, guess_weight=weight) for place in places]
            self._late = (*settled.waiting, *begun)
            for row, group in zip(rows, begun, strict=True):
                discount(row, group)
        return rows, members_of({"members": rows, "late": late}, self.groups_dir, of_the_step=True)


def learned(delay: int, late: str, seed: int, overrides: Sequence[str]) -> float:
    """Held-out reward at the end of a loop of the quick start's model."""
    typed = (f"run.seed={seed}", *([f"trainer.late={late}"] if delay else []), *overrides)
    with tempfile.TemporaryDirectory() as directory:
        loop = LateLoop(load_config(QUICKSTART, typed), Path(directory), delay)
        asyncio.run(loop.run())
        final = asyncio.run(loop.evaluate(loop.config.evaluation.prompts))
    words = f"{loop.counted} rewards counted late" if loop.counted else "none counted late"
    print(f"{late}, {delay} versions late, seed {seed}: {final:.3f} held out; {words}", flush=True)
    return final

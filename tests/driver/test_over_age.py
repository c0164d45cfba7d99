"""A group that comes too late, live: no batch waits for it, and a stopped run does not lose it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from distributed import Client

from libra.config import RunConfig
from libra.driver.session import Session
from libra.store.batch_membership import read_batch_facts
from libra.store.trajectories import TrajectoryStore
from libra.testing import FixedTurns
from libra.types import Episode


class HeldGrader(FixedTurns):
    """The graders of the first question read a pipe to its end, until the file ``released`` is there."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.directory = str(directory)

    def grade(self, episode: Episode) -> float:
        if episode.prompt.prompt_id == "train-0" and not (Path(self.directory) / "released").exists():
            (Path(self.directory) / "pipe").read_text()
        return super().grade(episode)


@contextmanager
def held(directory: Path) -> Iterator[Callable[[], None]]:
    """Within it graders are held, until the function that it gives is called, or its end."""
    os.mkfifo(directory / "pipe")
    writer = [os.open(directory / "pipe", os.O_RDWR)]

    def release() -> None:
        if writer:
            (directory / "released").touch()
            os.close(writer.pop())

    try:
        yield release
    finally:
        release()


def facts_of(directory: Path, batch: int) -> dict[tuple[int, int], dict[str, Any]]:
    return {(row["iteration"], row["group"]): row for row in read_batch_facts(directory / "batches", batch)["groups"]}


def test_a_late_group_is_dropped_by_the_batch_that_takes_it_also_after_a_stop(
    make_config: Callable[..., RunConfig], client: Client, tmp_path: Path
) -> None:
    config = make_config(run={"iterations": 5, "eta": 1}, staleness={"over_age": "drop"}, checkpoint={"every": 1})
    environment = HeldGrader(tmp_path)
    with held(tmp_path) as release:
        with Session(config, environment=environment, client=client) as session:
            iterations = session.iterations()
            rows = [next(iterations) for _ in range(4)]  # none of them waits for the group of iteration 0
            directory = session.directory
        release()
        with Session(config, environment=environment, client=client, resume=True) as session:
            rows += session.iterations()
    assert [row["iteration"] for row in rows] == list(range(5))
    taken = [facts_of(directory, batch) for batch in range(5)]
    assert sorted(group for batch in taken for group in batch) == [(k, g) for k in range(5) for g in range(2)]
    late = taken[4][0, 0]
    assert late["over_age"] == "drop" and not any("over_age" in row for batch in taken[:4] for row in batch.values())
    assert (rows[4]["over_age"], rows[4]["sequences"]) == (1, 2)
    assert max(row["lag_max"] for row in rows) <= 1
    columns = TrajectoryStore.open(directory / "trajectories.zarr").columns()
    advantages = columns["advantage"][(columns["iteration"] == 0) & (columns["group"] == 0)]
    assert len(advantages) == 2 and not advantages.any()

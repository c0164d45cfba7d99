"""Dynamic sampling, live: groups without signal are replaced by those that stand by, and all are stored."""

from __future__ import annotations

from collections.abc import Callable

from distributed import Client

from libra.config import RunConfig
from libra.driver.session import Session
from libra.store.batch_membership import read_batch_facts
from libra.store.trajectories import TrajectoryStore
from libra.testing import FixedTurns
from libra.types import Episode


class SomeAlike(FixedTurns):
    """The samples of the first question of each four have equal rewards."""

    def grade(self, episode: Episode) -> float:
        alike = int(episode.prompt.prompt_id.split("-")[1]) % 4 == 0
        return 0.5 if alike else float(episode.trajectory_id.endswith("-1"))


def test_a_step_trains_on_as_many_groups_with_a_signal_as_it_should(
    make_config: Callable[..., RunConfig], client: Client
) -> None:
    config = make_config(run={"iterations": 2}, trainer={"prompts": 4, "train_prompts": 2})
    with Session(config, environment=SomeAlike(), client=client) as session:
        rows = list(session.iterations())
        facts = [read_batch_facts(session.spec.batches_dir, batch)["groups"] for batch in range(2)]
        directory = session.directory
    for row, groups in zip(rows, facts, strict=True):
        assert [group.get("spare") for group in groups] == ["no signal", None, None, "not needed"]
        assert (row["groups_trained"], row["groups_replaced"], row["groups_spare"]) == (2, 1, 1)
        assert row["sequences"] == 4 and row["trajectories"] == 8  # denominators of the step, and of what was generated
    with TrajectoryStore.open(directory / "trajectories.zarr") as store:
        assert store.num_trajectories == 16

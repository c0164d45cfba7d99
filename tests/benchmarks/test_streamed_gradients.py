"""Steps taken again from a record, in waves and whole: equal, and found apart when a wave's gradient is not what it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.random_training import random_trajectories
from benchmarks.streamed_gradients import SAME, apart, recorded_waves
from libra.config import config_from_dict, dump_config
from libra.config.model_paths import resolve_model
from libra.store.batch_membership import commit_batch
from libra.store.trajectories import TrajectoryStore
from libra.train import Replica, TrainSettings
from libra.types import FailureClass
from libra.weights import WeightStore

WAVES = [[2, 0], [1], [5, 3, 4]]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose batch 0 has six groups of one trajectory in three waves; one failed, one was left out."""
    directory = tmp_path_factory.mktemp("runs") / "demo"
    config = config_from_dict({"trainer": {"prompts": 6, "group_size": 2, "streaming": "on", "lr": 1e-3}})
    directory.mkdir()
    (directory / "config.resolved.yaml").write_text(dump_config(config))
    model_dir = Path(resolve_model(config.model.path))
    replica = Replica(model_dir, TrainSettings.of_run(config))
    store = WeightStore(directory / "weights")
    store.publish(0, replica.weights())
    members = random_trajectories(6, 40, 8, 90)
    members[3].failure = FailureClass.WORKER
    rows = [
        {"iteration": 0, "group": g, "path": "", "advantages": [members[g].advantage], "trains": [g not in (3, 4)], "wave": w}
        for w, wave in enumerate(WAVES)
        for g in wave
    ]  # fmt: skip
    commit_batch(directory / "batches", 0, [members[row["group"]].trajectory_id for row in rows], groups=rows)
    with TrajectoryStore.create(directory / "trajectories.zarr") as stored:
        stored.append(members, batch=0)
    return directory


def test_the_record_has_its_waves_in_order_without_what_the_step_left_out(run_dir: Path) -> None:
    waves = recorded_waves(run_dir, 0)
    assert [[one.trajectory_id.group for one in wave] for wave in waves] == [[2, 0], [1], [5, 3]]
    assert {one.advantage for wave in waves for one in wave} == {1.0, -1.0}


def test_a_step_in_waves_is_the_whole_step_and_another_gradient_is_found(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = apart(run_dir, 0, 1)
    assert found.equal and found.waves == 3 and found.grad_norm > 1e-3
    accumulate = Replica.accumulate

    def heavier(replica: Replica, members: Any, step: int) -> int:
        """The third wave begins with a sum that is a little more than that of the first two."""
        if replica.open_step is not None and replica.open_step.waves == 2:
            for parameter in replica.optimized().values():
                if parameter.grad is not None:
                    parameter.grad.mul_(1 + 1e-9)
        return accumulate(replica, members, step)

    monkeypatch.setattr(Replica, "accumulate", heavier)
    again = apart(run_dir, 0, 1)
    assert again.gradient > SAME and not again.equal

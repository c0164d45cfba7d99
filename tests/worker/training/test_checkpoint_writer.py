"""Checkpoints of real runs: what is kept, that they hold the version they name, and that a step does not wait for the disk."""

import shutil
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from libra.config import config_from_dict
from libra.driver.run_session import run
from libra.errors import CheckpointError, ConfigError
from libra.testing import FixedTurns
from libra.train import checkpoint as checkpoint_module
from libra.train.checkpoint import complete, newest, read_facts, verify
from libra.weights import WeightStore
from libra.worker.training.checkpoint_writer import CheckpointWriter, checkpoint_is_due


def test_when_a_checkpoint_is_due():
    evaluation = {"every": 8, "prompts": 1}
    for checkpoint, asked, expected in (
        ({}, {}, [10, 20, 25]),
        ({"every": 0}, {}, [25]),
        ({"every": 12}, {}, [12, 24, 25]),
        ({}, evaluation, [8, 16, 24, 25]),
        ({"every": 4}, evaluation, [4, 8, 12, 16, 20, 24, 25]),
    ):
        config = config_from_dict({"run": {"iterations": 25}, "checkpoint": checkpoint, "evaluation": asked})
        assert [version for version in range(26) if checkpoint_is_due(config, version)] == expected
    with pytest.raises(ConfigError, match=r"checkpoint\.every"):
        config_from_dict({"checkpoint": {"every": 5}, "evaluation": evaluation})


class FakeReplica:
    """Counts steps; its snapshot is its step count, its steps can be watched."""

    def __init__(self):
        self.steps_done = 0

    def snapshot(self):
        return self.steps_done

    def step(self, trajectories, step):
        assert step == self.steps_done
        self.steps_done += 1
        return SimpleNamespace(step=step)


@pytest.fixture
def disk(monkeypatch):
    """A disk that holds what was written, and writes only when ``gate`` is open."""
    disk = SimpleNamespace(gate=threading.Event(), writing=threading.Event(), held={})

    def save(directory, snapshot):
        disk.writing.set()
        assert disk.gate.wait(60)
        disk.held[directory.name] = snapshot

    monkeypatch.setattr(checkpoint_module, "save_checkpoint", save)
    return disk


def writer(replica, tmp_path):
    config = config_from_dict({"run": {"iterations": 4}, "checkpoint": {"every": 1}})
    return CheckpointWriter(replica, tmp_path, config)


def test_steps_go_on_while_the_disk_is_slow_and_what_is_written_is_the_version_named(tmp_path, disk):
    replica = FakeReplica()
    checkpoints = writer(replica, tmp_path)
    checkpoints.step([], 0)
    saving = threading.Thread(target=checkpoints.save, args=(1,))
    saving.start()
    assert disk.writing.wait(60)
    checkpoints.step([], 1)
    checkpoints.step([], 2)  # version 2 has not been asked for yet, and is due: this step copies it
    assert replica.steps_done == 3 and disk.held == {}
    disk.gate.set()
    saving.join()
    for version in (2, 3):
        checkpoints.save(version)
    assert disk.held == {"step-000001": 1, "step-000002": 2, "step-000003": 3}
    checkpoints.save(2)  # the task is run again
    assert disk.held["step-000002"] == 2


def test_a_version_that_nobody_copied_is_an_error_and_never_another_one(tmp_path, disk):
    replica = FakeReplica()
    replica.steps_done = 3
    with pytest.raises(CheckpointError, match="after 2 steps"):
        writer(replica, tmp_path).save(2)
    assert disk.held == {}


class Scored(FixedTurns):
    """Every answer of iteration k is worth ``rewards[k]``, so that the best version is known."""

    rewards = (0.0, 0.3, 0.9, 0.1, 0.2, 0.4)

    def grade(self, episode):
        split, iteration, *_ = episode.trajectory_id.split("-")
        return self.rewards[int(iteration) - (split == "eval")]


def digest_of(version, directory):
    return WeightStore(directory / "weights").get(version).digest


def test_the_last_and_the_best_are_kept_and_hold_the_weights_they_name(make_config, client):
    config = make_config(run={"iterations": 6}, checkpoint={"every": 1, "keep": 2}, store={"keep_versions": 10})
    summary = run(config, environment=Scored(), client=client)
    directory = summary.directory / "checkpoints"
    assert summary.checkpoint == newest(directory) == directory / "step-000006"
    assert [path.name for path in complete(directory)] == ["step-000003", "step-000005", "step-000006"]
    assert (directory / "best").resolve() == summary.best == directory / "step-000003"
    assert not [path for path in directory.iterdir() if path.name.startswith(".")]
    for path in complete(directory):
        version = int(path.name[5:])
        assert verify(path)["digest"] == digest_of(version, summary.directory)
        assert read_facts(path)["steps_done"] == version
        AutoModelForCausalLM.from_pretrained(path)


def test_where_questions_are_asked_their_reward_decides_what_is_best(make_config, client):
    config = make_config(run={"iterations": 5}, checkpoint={"keep": 1}, evaluation={"prompts": 1, "every": 1})

    class Otherwise(Scored):
        def grade(self, episode):  # training says that the last is the best, the questions: version 2
            split, iteration, *_ = episode.trajectory_id.split("-")
            return float(iteration) if split == "train" else {"2": 1.0}.get(iteration, 0.0)

    summary = run(config, environment=Otherwise(), client=client)
    assert summary.best is not None and summary.best.name == "step-000002"
    assert [path.name for path in complete(summary.directory / "checkpoints")] == ["step-000002", "step-000005"]


def test_a_run_from_a_checkpoint_serves_and_trains_its_weights(make_config, client, tmp_path):
    first = run(make_config(run={"iterations": 2, "name": "first"}), client=client)
    assert first.checkpoint is not None
    start = {"name": "second", "iterations": 1, "from_checkpoint": str(first.checkpoint)}
    second = run(make_config(run=start, store={"keep_versions": 5}, checkpoint={"keep": 9}), client=client)
    assert digest_of(0, second.directory) == read_facts(first.checkpoint)["digest"]
    assert second.iterations[0]["mismatch_max_abs"] < 1e-3, "engine and trainer began with different weights"
    assert second.checkpoint is not None and second.checkpoint.name == "step-000001"
    steps = load_file(second.checkpoint / "optimizer.safetensors")
    assert {float(value) for name, value in steps.items() if name.endswith(".step")} == {3.0}, "two before, one here"
    only_weights = Path(shutil.copytree(first.checkpoint, tmp_path / "weights_only"))
    for name in ("trainer.json", "optimizer.safetensors"):
        (only_weights / name).unlink()
    start = {"name": "third", "iterations": 1, "from_checkpoint": str(only_weights)}
    third = run(make_config(run=start), client=client)
    steps = load_file(third.checkpoint / "optimizer.safetensors")
    assert {float(value) for name, value in steps.items() if name.endswith(".step")} == {1.0}

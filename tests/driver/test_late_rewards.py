"""Runs whose rewards come late: corrected, dropped, or refused; each counts once, also after kills."""

import os
import shutil
import signal
from collections import Counter

import numpy as np
import pytest
from click.testing import CliRunner
from whole_run import address_of

import libra
from libra import Late
from libra.cli.main import cli
from libra.config import dump_config
from libra.driver.run_session import Session
from libra.errors import BatchFailed, LateRefused, RunDirectoryError
from libra.facts import LateRewardsTaken, from_dict
from libra.graph.late_groups import LATE_TAU
from libra.policy.late_rewards import age_weight
from libra.policy.log_replay import replay
from libra.store.event_log import read_events
from libra.store.run_records import read_batch_facts
from libra.testing import FixedTurns
from libra.weights import WeightStore
from libra.worker.training.checkpoint_writer import CheckpointWriter
from libra.worker.training.worker_trainer import make_replica, recover


class Judged(FixedTurns):
    def grade(self, episode):
        return Late(fast=FixedTurns.grade(self, episode))


Judged.__module__ = "__main__"  # by value to the workers, which cannot import this file


def late_of(session, batches):
    return [read_batch_facts(session.spec.batches_dir, batch)["late"] for batch in range(batches)]


def test_a_reward_counts_in_the_next_batch_as_what_it_changes(make_config, client):
    import torch

    from libra.train import grpo

    class Later(FixedTurns):
        """A worker delivers the rewards of an iteration while it grades the next but one: 1 for sample 0, 0 for others."""

        def grade(self, episode):
            _, iteration, group, sample = episode.trajectory_id.split("-")
            if int(iteration) >= 2:
                libra.deliver(f"train-{int(iteration) - 2}-{group}-{sample}", float(sample == "0"))
            return Late(fast=None if sample == "3" else 0.5)

    trainer = {"late": "correct", "group_size": 4, "lr": 1e-3, "dispatch": "peer"}
    config = make_config(run={"iterations": 5}, trainer=trainer, checkpoint={"every": 3})
    with Session(config, environment=Later(), client=client) as session:
        rows = list(session.iterations())
    spec, late = session.spec, late_of(session, 5)
    assert [row["late_came"] for row in rows] == [0, 0, 8, 8, 8]
    assert [row["late_waiting"] for row in rows] == [8, 16, 16, 16, 16]
    assert [row["late_delay"] for row in rows] == [0, 0, 2, 2, 2]
    assert [row["late_dropped"] for row in rows] == [0] * 5
    taken = Counter(tuple(place[:3]) for facts in late for place in facts["came"])
    assert taken == {(iteration, group, sample): 1 for iteration in range(3) for group in (0, 1) for sample in range(4)}
    after = grpo(torch.tensor([1.0, 0.0, 0.0, 0.0], dtype=torch.float64), torch.zeros(4, dtype=torch.int64), eps=1e-6)
    for batch, facts in enumerate(late):
        groups = 2 * (batch >= 2)
        assert [(row["iteration"], row["delay"]) for row in facts["rows"]] == [(batch - 2, 2)] * groups
        for row in facts["rows"]:  # before, three rewards were equal and the fourth was missing: no advantage
            np.testing.assert_allclose(row["advantages"], age_weight(2, LATE_TAU) * after.numpy(), atol=1e-6)
            assert row["trains"] == [True] * 4 and row["counts"] == [False, False, False, True]
    assert [row["sequences"] for row in rows] == [6, 6, 14, 14, 14]
    assert [bool(row["no_signal"]) for row in rows] == [True, True, False, False, False]
    assert rows[0]["optimizer_steps"] == 0 and rows[2]["optimizer_steps"] == 1
    inspected = ["inspect", str(session.directory), "--iteration", "1", "--sample", "0", "--index", "8"]
    assert "counts from batch 3 on, 2 versions late" in CliRunner().invoke(cli, inspected).output
    # Groups that a kept checkpoint needs are kept, trained before it or not, and the same steps are taken again from it.
    kept = {int(path.name.split("-")[1]) for path in spec.groups_dir.glob("train-*.group")}
    assert kept == {1, 2, 3, 4}
    store = WeightStore(spec.weights_dir)
    shutil.rmtree(spec.checkpoints_dir / "step-000005")
    replica = make_replica(spec, spec.model_dir, None)
    again = recover(CheckpointWriter(replica, spec.checkpoints_dir, config), spec, store, 5)
    assert [step["digest"] for step in again] == [store.get(number).digest for number in (4, 5)]
    logged = enumerate(from_dict(event).fact for event in read_events(session.directory / "events.jsonl").events)
    told = [each for each in replay(logged) if isinstance(each.event, LateRewardsTaken)]
    assert len(told) == 5 and not any(each.difference for each in told)


def dies_in_a_step(run, first, dask_worker):
    """The trainer is killed in the next step that is not before this one."""
    replica = dask_worker.plugins[f"libra-{run}"].trainer.replica
    accumulate = replica.gradient.accumulate

    def deadly(*arguments):
        if replica.steps_done >= first:
            os.kill(os.getpid(), signal.SIGKILL)
        return accumulate(*arguments)

    replica.gradient.accumulate = deadly


def test_a_run_that_was_stopped_and_whose_trainer_is_killed_takes_each_of_twenty_rewards_once(make_config, client):
    trainer = {"late": "correct", "prompts": 5, "group_size": 4}
    config = make_config(run={"iterations": 4}, trainer=trainer, checkpoint={"every": 2})
    with Session(config, environment=Judged(), client=client) as session:
        directory, iterations = session.directory, session.iterations()
        first = [next(iterations)["iteration"], next(iterations)["iteration"]]
    for group in range(5):  # the 20 rewards of iteration 0, while nobody runs
        for sample in range(4):
            libra.deliver(f"train-0-{group}-{sample}", float(sample), run=directory)
    with Session(config, environment=Judged(), client=client, resume=True) as session:
        client.run(dies_in_a_step, "demo", 2, workers=[address_of(client, "train-0")])
        assert first + [row["iteration"] for row in session.iterations()] == [0, 1, 2, 3]
    came = [tuple(place[:3]) for facts in late_of(session, 4) for place in facts["came"]]
    assert sorted(came) == [(0, group, sample) for group in range(5) for sample in range(4)]
    with pytest.raises(LateRefused, match="train-0-3-1"):
        libra.deliver("train-0-3-1", 0.5, run=directory)


@pytest.mark.parametrize(("trajectory", "value"), [
    ("train-0-0", 1.0), ("train-0-2-0", 1.0), ("train-0-0-2", 1.0), ("train-0-0-0", float("nan")), ("train-0-0-0", 2e9),
])  # fmt: skip
def test_what_cannot_be_a_late_reward_is_refused(trajectory, value, make_config, tmp_path):
    directory = tmp_path / "demo"
    directory.mkdir()
    (directory / "config.resolved.yaml").write_text(dump_config(make_config(trainer={"late": "wait"})))
    with pytest.raises(LateRefused):
        libra.deliver(trajectory, value, run=directory)
    assert not (directory / "late").exists()


def test_the_command_line_delivers_and_the_second_delivery_is_refused(make_config, tmp_path):
    directory = tmp_path / "demo"
    directory.mkdir()
    (directory / "config.resolved.yaml").write_text(dump_config(make_config(trainer={"late": "drop"})))
    first = CliRunner().invoke(cli, ["deliver", str(directory), "train-1-0-1", "--", "-0.5"])
    assert first.exit_code == 0
    with pytest.raises(LateRefused, match=r"-0\.5"):
        libra.deliver("train-1-0-1", 0.75, run=directory)
    with pytest.raises(RunDirectoryError):
        libra.deliver("train-1-0-1", 0.75, run=tmp_path)
    with pytest.raises(RunDirectoryError, match="run=DIRECTORY"):
        libra.deliver("train-1-0-1", 0.75)


@pytest.mark.parametrize("late", ["off", "drop"])
def test_a_reward_that_is_not_waited_for_is_refused(make_config, client, late):
    config = make_config(run={"iterations": 1}, trainer={"late": late})
    with Session(config, environment=Judged(), client=client) as session:
        iterations = session.iterations()
        row = next(iterations)
        with pytest.raises(BatchFailed) if late == "off" else pytest.raises(StopIteration):
            next(iterations)
        with pytest.raises(LateRefused, match=f"trainer.late={late}"):
            libra.deliver("train-0-0-0", 1.0)
    if late == "off":
        assert row["failures/reward"] == 4 and "trainer.late=correct" in row["no_signal"] and "late_came" not in row
    else:
        assert (row["late_came"], row["late_dropped"]) == (0, 4) and row["reward"] > 0

"""A run that was stopped goes on from what it committed: nothing lost, nothing twice, the same weights; or is refused."""

import logging
import os
from types import SimpleNamespace

import pytest
import torch
import whole_run

import factories
import libra
from libra.cli.run import nothing_left
from libra.config import dump_config
from libra.config.load import load_resumed
from libra.driver import submitted_graphs
from libra.driver.run_client import learned_before
from libra.driver.run_session import Session, evaluation_is_due, run
from libra.driver.rundir import lock_run
from libra.errors import ConfigError, RunDirectoryError
from libra.observe.metrics import read_metrics
from libra.observe.run_directory import summary_row
from libra.store.run_records import commit_batch, write_group
from libra.store.start_records import newest_epoch
from libra.testing import FixedTurns
from libra.train import Replica, TrainSettings
from libra.types import TrajectoryId
from libra.weights import WeightStore
from libra.worker.run_spec import RunSpec
from libra.worker.training.checkpoint_writer import CheckpointWriter
from libra.worker.training.worker_trainer import recover


def trajectory(iteration, sample):
    made = {"version": iteration, "seed": 10 * iteration + sample, "reward": float(sample)}
    return factories.trajectory(TrajectoryId(iteration, 0, sample), lengths=(5, 7), **made)


STEPS = 4
ADVANTAGES = [1.0, -0.5, -0.5]


@pytest.fixture
def committed(tmp_path, make_config, random_model):
    """A run directory with `STEPS` committed batches and nothing else."""
    config = make_config(run={"iterations": 9}, checkpoint={"every": 2})
    spec = RunSpec("run", 0, tmp_path / "run", str(random_model), config)
    for batch in range(STEPS):
        members = [trajectory(batch, sample) for sample in range(3)]
        path = write_group(spec.groups_dir, batch, 0, members)
        row = {"iteration": batch, "group": 0, "path": str(path), "advantages": ADVANTAGES, "trains": [True] * 3}
        commit_batch(spec.batches_dir, batch, [m.trajectory_id for m in members], groups=[row])
    return spec


def trainer_of(spec):
    replica = Replica(spec.model_dir, TrainSettings(lr=1e-2, minibatches=2), dtype=torch.float32, threads=1, seed=7)
    writer = CheckpointWriter(replica, spec.checkpoints_dir, spec.config)
    return SimpleNamespace(spec=spec, replica=replica, checkpoints=writer, weights=WeightStore(spec.weights_dir))


def recovered(trainer, steps, *, or_next=False):
    return recover(trainer.checkpoints, trainer.spec, trainer.weights, steps, or_next=or_next)


def step_of_batch(trainer, batch):
    members = [trajectory(batch, sample) for sample in range(3)]
    for member, advantage in zip(members, ADVANTAGES, strict=True):
        member.advantage = advantage
    return trainer.checkpoints.step(members, batch)


@pytest.mark.parametrize("checkpoint", [False, True])
def test_committed_batches_taken_again_give_the_same_weights_bit_for_bit(committed, checkpoint):
    straight = trainer_of(committed)
    for batch in range(STEPS):
        if checkpoint and batch == 2:
            straight.checkpoints.save(2)
        step_of_batch(straight, batch)
    resumed = trainer_of(committed)
    replayed = recovered(resumed, STEPS)
    assert [taken["step"] for taken in replayed] == ([2, 3] if checkpoint else [0, 1, 2, 3])
    assert resumed.replica.steps_done == STEPS and recovered(resumed, STEPS) == recovered(resumed, 1) == []
    start = trainer_of(committed).replica.weights()
    for name, tensor in straight.replica.weights().items():
        assert torch.equal(resumed.replica.weights()[name], tensor), name
    assert any(not torch.equal(start[name], tensor) for name, tensor in straight.replica.weights().items())
    after = [step_of_batch(trainer, STEPS).digest for trainer in (straight, resumed)]  # optimizer and random stream too
    assert after[0] == after[1]


def test_a_step_whose_result_was_lost_is_answered_from_the_checkpoint_after_it(committed):
    first = trainer_of(committed)
    taken = [step_of_batch(first, batch) for batch in range(2)]
    path = first.checkpoints.save(2)
    for group in committed.groups_dir.glob("*.group"):
        group.unlink()  # as when they are older than the oldest checkpoint kept
    again = trainer_of(committed)
    assert recovered(again, 1, or_next=True) == []
    assert step_of_batch(again, 1).digest == taken[1].digest
    assert again.checkpoints.save(2) == path  # and so is its checkpoint


def test_weights_that_were_published_otherwise_are_taken_and_said(committed, caplog):
    trainer = trainer_of(committed)
    other = {name: tensor + 0.5 for name, tensor in trainer.replica.weights().items()}
    trainer.weights.publish(1, other)
    with caplog.at_level(logging.WARNING):
        recovered(trainer, 1)
    assert all(torch.equal(other[name], tensor) for name, tensor in trainer.replica.weights().items())
    assert "the published ones are taken" in caplog.text


def stopped(config, client, iterations, **given):
    """Directory of a run whose driver left after some iterations, with work in flight."""
    with Session(config, client=client, **given) as session:
        if evaluation_is_due(config, 0):
            session.evaluate(0)
        left = session.iterations()
        for _ in range(iterations):
            values = next(left)
            if evaluation_is_due(config, values["iteration"] + 1):
                session.evaluate(values["iteration"] + 1)
        next(left)  # whose metrics are written, and whose evaluation is not made
    return session.directory


def check_whole(directory, config):
    """As every run, and with the metrics and evaluations of every step once."""
    whole_run.check_once(directory, config.run.iterations)
    stored = whole_run.columns(directory)
    held_out = stored["batch"] < 0
    due = [version for version in range(config.run.iterations + 1) if evaluation_is_due(config, version)]
    asked = sorted(zip(stored["iteration"][held_out].tolist(), stored["group"][held_out].tolist(), strict=True))
    assert asked == [(version, g) for version in due for g in range(config.evaluation.prompts)]
    rows = read_metrics(directory)
    assert [row["step"] for row in rows if "reward" in row] == list(range(config.run.iterations))
    assert [row["step"] for row in rows if "evaluation/reward" in row] == due


@pytest.mark.live
def test_a_stopped_run_that_was_moved_goes_on_without_losing_or_repeating_anything(make_config, client):
    config = make_config(
        run={"iterations": 5, "eta": 1}, evaluation={"prompts": 2, "every": 2}, checkpoint={"every": 2},
        store={"keep_journals": True},
    )  # fmt: skip
    begun = stopped(config, client, 2)
    directory = begun.parent / "elsewhere" / "demo2"
    directory.parent.mkdir()
    begun.rename(directory)
    before = whole_run.journal_records(directory)
    summary = run(load_resumed(directory), client=client, resume=True)
    check_whole(directory, config)
    assert newest_epoch(directory / "epochs") == 1
    assert [result["version"] for result in summary.evaluations] == [0, 2, 4, 5]
    assert summary.iterations[0]["iteration"] >= 3 and summary.iterations[-1]["iteration"] == 4
    assert max(values["lag_max"] for values in summary.iterations) <= 1
    assert summary.checkpoint is not None and summary.checkpoint.name == "step-000005"
    after = whole_run.journal_records(directory)
    assert before.items() <= after.items() and len(after) == (5 * 4 + 4 * 2) * 5


@pytest.mark.live
def test_metrics_of_a_step_that_died_before_its_line_are_written_by_the_next_start(make_config, client, monkeypatch):
    # Records of groups go after the line is written.
    monkeypatch.setattr(submitted_graphs, "prune_groups", lambda spec, first, before: before)
    config = make_config(run={"iterations": 2}, checkpoint={"every": 2})
    path = run(config, client=client).directory / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    (whole,) = (row for row in read_metrics(path.parent) if row["step"] == 1 and "reward" in row)
    path.write_text("".join(line for line in lines if '"step": 1,' not in line))
    run(config, client=client, resume=True)
    (row,) = (row for row in read_metrics(path.parent) if row["step"] == 1 and "reward" in row)
    for name in ("reward", "loss", "grad_norm", "train_s"):
        assert row[name] == whole[name], name


@pytest.mark.live
def test_a_run_that_goes_on_has_what_its_policy_had_learned(make_config, client):
    config = make_config(run={"iterations": 4})
    directory = stopped(config, client, 2)
    before = whole_run.events_of(directory)
    ended = [event for event in before if event["name"] == "trajectory_ended" and event["completed"]]
    run(config, client=client, resume=True)
    events = whole_run.events_of(directory)
    begin = next(event for event in events[len(before) :] if event["name"] == "policy_snapshot")
    weight, _, _, running, *_ = begin["order"]["forecaster"]["all"]
    assert 0.6 * len(ended) < weight <= len(ended)  # a new version lets older ones count a little less
    assert running == pytest.approx(0, abs=1e-9)
    assert begin["order"]["trajectories"]["by_key"] == {}
    assert whole_run.unexplained(directory) == []


def test_a_log_that_cannot_be_read_teaches_nothing(tmp_path):
    (tmp_path / "events.jsonl").write_text('{"schema":1,"name":"policy_snapshot","made_up":1}\n')
    assert learned_before(tmp_path) is learned_before(tmp_path / "not there") is None


@pytest.mark.live
def test_a_finished_run_is_left_as_it_is_and_may_get_more_iterations(make_config, client):
    summary = run(make_config(evaluation={"prompts": 2}), client=client)
    directory = summary.directory
    kept = ("metrics.jsonl", "trajectories.zarr/zarr.json", "batches/batch-000001.json")
    before = {name: (directory / name).read_bytes() for name in kept}
    assert nothing_left(directory, load_resumed(directory)) is not None
    model, config = load_resumed(directory).model.path, directory / "config.resolved.yaml"
    answered = libra.train(model, config=config, resume=True)
    assert (answered.evaluations, answered.checkpoint) == (summary.evaluations, summary.checkpoint)
    assert newest_epoch(directory / "epochs") == 0, "nothing has started"
    again = run(load_resumed(directory), client=client, resume=True)
    assert {name: (directory / name).read_bytes() for name in kept} == before
    assert again.iterations == [] and again.evaluations == summary.evaluations
    assert again.checkpoint == summary.checkpoint
    events = whole_run.events_of(directory)
    start = max(index for index, event in enumerate(events) if event["name"] == "run_started")
    assert not [event for event in events[start:] if event["name"].startswith(("quantum", "step", "batch"))]

    more = load_resumed(directory, ["run.iterations=3"])
    assert nothing_left(directory, more) is None
    assert [values["iteration"] for values in run(more, client=client, resume=True).iterations] == [2]
    assert [row["step"] for row in read_metrics(directory) if "reward" in row] == [0, 1, 2]
    assert (summary_row(directory).iterations, summary_row(directory).of_iterations) == (3, 3)


def test_a_directory_without_a_run_is_refused(make_config, tmp_path):
    with pytest.raises(RunDirectoryError):
        run(make_config(), resume=True)
    with pytest.raises(RunDirectoryError):
        load_resumed(tmp_path / "demo")
    assert not (tmp_path / "demo").exists()


@pytest.mark.live
def test_a_run_with_a_driver_at_work_is_refused_and_not_fenced_off(make_config, client):
    config = make_config(run={"iterations": 1})
    directory = stopped(config, client, 0)
    held = lock_run(directory)
    with pytest.raises(RunDirectoryError, match=f"process {os.getpid()} on "):
        run(config, client=client, resume=True)
    assert newest_epoch(directory / "epochs") == 0
    held.release()
    run(config, client=client, resume=True)
    assert newest_epoch(directory / "epochs") == 1


@pytest.mark.parametrize("override", ["trainer.lr=0.5", "run.eta=1", "rollout.max_turns=9"])
def test_what_would_make_another_run_of_it_is_refused_by_name(override, make_config, tmp_path):
    (tmp_path / "config.resolved.yaml").write_text(dump_config(make_config()))
    name, _, value = override.partition("=")
    with pytest.raises(ConfigError, match=rf"^{name}: .*got {value};"):
        load_resumed(tmp_path, [override])
    allowed = load_resumed(tmp_path, ["run.iterations=9", "cluster.rollout_workers=2", "checkpoint.every=1"])
    assert (allowed.run.iterations, allowed.cluster.rollout_workers, allowed.checkpoint.every) == (9, 2, 1)


@pytest.mark.live
def test_a_run_needs_the_objects_and_the_settings_that_it_was_begun_with(make_config, client):
    config = make_config(run={"iterations": 1})
    directory = stopped(config, client, 0, environment=FixedTurns())
    with pytest.raises(ConfigError, match="environment"):
        run(config, client=client, resume=True)
    changed = make_config(run={"iterations": 1}, trainer={"lr": 0.5})
    with pytest.raises(ConfigError, match=r"trainer\.lr: .* 0\.001, got 0\.5"):
        run(changed, client=client, resume=True, environment=FixedTurns())
    assert newest_epoch(directory / "epochs") == 0
    assert run(config, client=client, resume=True, environment=FixedTurns()).iterations == []

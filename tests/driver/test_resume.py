"""A run that was stopped goes on from what it committed: nothing lost, nothing twice, the same weights; or is refused."""

from __future__ import annotations

import errno
import json
import logging
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from distributed import Client

from libra import keys
from libra.cli import run_command
from libra.cli.main import main
from libra.cli.run_files import nothing_left
from libra.config import RunConfig, config_from_dict, dump_config
from libra.config.resume_changes import load_resumed
from libra.driver import run_checkpoints
from libra.driver.resume import learned_before
from libra.driver.run_lock import lock_run
from libra.driver.session import RunSummary, Session, evaluation_is_due, run
from libra.errors import ConfigError, RunDirectoryError
from libra.events import from_dict
from libra.observe.metrics import read_metrics
from libra.observe.run_directory import summary_row
from libra.policy.log_replay import replay
from libra.store import committer_lock
from libra.store.batch_membership import commit_batch
from libra.store.epochs import newest_epoch
from libra.store.event_log import read_events
from libra.store.group_records import write_group
from libra.store.trajectory_journal import Journal
from libra.testing import FixedTurns
from libra.train import Replica, TrainSettings
from libra.types import EndReason, Prompt, Trajectory, TrajectoryId
from libra.weights import WeightStore
from libra.worker.checkpoint_writer import CheckpointWriter
from libra.worker.run_spec import RunSpec
from libra.worker.trainer import recover

Config = Callable[..., RunConfig]
TURNS = 3
QUANTA = 2 * TURNS - 1  # a generation each, and an action between two


def journal_records(directory: Path) -> dict[str, str]:
    """Every record of a journal as text, by name."""
    found = {}
    for name in {path.name.split(".")[0] for path in (directory / "journal").glob("*.rec")}:
        for quantum, record in enumerate(Journal(directory / "journal").read(name)):
            found[f"{name}.{quantum}"] = json.dumps(record, default=lambda array: array.tolist(), sort_keys=True)
    return found


def spec_of(directory: Path, config: RunConfig | None = None, model: Path = Path("none")) -> RunSpec:
    return RunSpec("run", 0, directory, str(model), config or config_from_dict({}))


# ------------------------------------------------------------------------------------------------ the same weights


def trajectory(iteration: int, sample: int) -> Trajectory:
    rng = np.random.default_rng([iteration, sample])
    action = np.arange(12) >= 5
    return Trajectory(
        trajectory_id=TrajectoryId(iteration, 0, sample),
        prompt=Prompt("p", ()),
        token_ids=rng.integers(0, 200, 12).astype(np.int32),
        is_action=action,
        behaviour_logprob=np.where(action, -5 - rng.random(12), 0).astype(np.float32),
        weight_version=np.where(action, iteration, -1).astype(np.int32),
        kv_version=np.where(action, iteration, -1).astype(np.int32),
        turns=[],
        end_reason=EndReason.ANSWERED,
        reward=float(sample),
    )


STEPS = 4
ADVANTAGES = [1.0, -0.5, -0.5]


@pytest.fixture
def committed(tmp_path: Path, make_config: Config, random_model: Path) -> RunSpec:
    """A run directory with `STEPS` committed batches and nothing else."""
    spec = spec_of(tmp_path / "run", make_config(run={"iterations": 9}, checkpoint={"every": 2}), random_model)
    for batch in range(STEPS):
        members = [trajectory(batch, sample) for sample in range(3)]
        path = write_group(spec.groups_dir, batch, 0, members)
        row = {"iteration": batch, "group": 0, "path": str(path), "advantages": ADVANTAGES, "trains": [True] * 3}
        commit_batch(spec.batches_dir, batch, [m.trajectory_id for m in members], groups=[row])
    return spec


def trainer_of(spec: RunSpec) -> Any:
    replica = Replica(spec.model_dir, TrainSettings(lr=1e-2, minibatches=2), dtype=torch.float32, threads=1, seed=7)
    writer = CheckpointWriter(replica, spec.checkpoints_dir, spec.config)
    return SimpleNamespace(spec=spec, replica=replica, checkpoints=writer, weights=WeightStore(spec.weights_dir))


def recovered(trainer: Any, steps: int, *, or_next: bool = False) -> list[dict[str, Any]]:
    return recover(trainer.checkpoints, trainer.spec, trainer.weights, steps, or_next=or_next)


def step_of_batch(trainer: Any, batch: int) -> Any:
    members = [trajectory(batch, sample) for sample in range(3)]
    for member, advantage in zip(members, ADVANTAGES, strict=True):
        member.advantage = advantage
    return trainer.checkpoints.step(members, batch)


@pytest.mark.parametrize("checkpoint", [False, True])
def test_committed_batches_taken_again_give_the_same_weights_bit_for_bit(committed: RunSpec, checkpoint: bool) -> None:
    straight = trainer_of(committed)
    for batch in range(STEPS):
        if checkpoint and batch == 2:
            straight.checkpoints.save(2)
        step_of_batch(straight, batch)
    resumed = trainer_of(committed)
    replayed = recovered(resumed, STEPS)
    assert [taken["step"] for taken in replayed] == ([2, 3] if checkpoint else [0, 1, 2, 3])
    assert resumed.replica.steps_done == STEPS
    start = trainer_of(committed).replica.weights()
    for name, tensor in straight.replica.weights().items():
        assert torch.equal(resumed.replica.weights()[name], tensor), name
    assert any(not torch.equal(start[name], tensor) for name, tensor in straight.replica.weights().items())
    after = [step_of_batch(trainer, STEPS).digest for trainer in (straight, resumed)]  # optimizer and random stream too
    assert after[0] == after[1]


def test_a_step_whose_result_was_lost_is_answered_from_the_checkpoint_after_it(committed: RunSpec) -> None:
    first = trainer_of(committed)
    taken = [step_of_batch(first, batch) for batch in range(2)]
    path = first.checkpoints.save(2)
    for group in committed.groups_dir.glob("*.group"):
        group.unlink()  # as when they are older than the oldest checkpoint kept
    again = trainer_of(committed)
    assert recovered(again, 1, or_next=True) == []
    assert step_of_batch(again, 1).digest == taken[1].digest
    assert again.checkpoints.save(2) == path  # and so is its checkpoint


def test_a_replica_that_is_there_is_left_alone(committed: RunSpec) -> None:
    trainer = trainer_of(committed)
    recovered(trainer, 2)
    before = {name: tensor.clone() for name, tensor in trainer.replica.weights().items()}
    assert recovered(trainer, 2) == recovered(trainer, 1) == []
    assert all(torch.equal(before[name], tensor) for name, tensor in trainer.replica.weights().items())


def test_weights_that_were_published_otherwise_are_taken_and_said(
    committed: RunSpec, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = trainer_of(committed)
    other = {name: tensor + 0.5 for name, tensor in trainer.replica.weights().items()}
    trainer.weights.publish(1, other)
    with caplog.at_level(logging.WARNING):
        recovered(trainer, 1)
    assert all(torch.equal(other[name], tensor) for name, tensor in trainer.replica.weights().items())
    assert "the published ones are taken" in caplog.text


# ------------------------------------------------------------------------------------------------ a run that was stopped


def stopped(config: RunConfig, client: Client, iterations: int, **given: Any) -> Path:
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


def check_whole(directory: Path, config: RunConfig) -> None:
    """Every trajectory once, in the batch of one step each; every step's metrics once; no quantum twice."""
    iterations, prompts, size = config.run.iterations, config.trainer.prompts, config.trainer.group_size
    group = zarr.open_group(directory / "trajectories.zarr", mode="r")
    columns = {name: array[:] for name, array in group["trajectory"].arrays()}
    train = columns["batch"] >= 0
    ids = list(zip(*(columns[name][train].tolist() for name in ("iteration", "group", "sample")), strict=True))
    assert sorted(ids) == [(k, g, s) for k in range(iterations) for g in range(prompts) for s in range(size)]
    assert Counter(columns["batch"][train].tolist()) == dict.fromkeys(range(iterations), prompts * size)
    assert set(columns["num_turns"].tolist()) == {TURNS} and np.isfinite(columns["reward"]).all()
    due = [version for version in range(iterations + 1) if evaluation_is_due(config, version)]
    asked = list(zip(columns["iteration"][~train].tolist(), columns["group"][~train].tolist(), strict=True))
    assert sorted(asked) == [(version, g) for version in due for g in range(config.evaluation.prompts)]
    rows = read_metrics(directory)
    assert [row["step"] for row in rows if "reward" in row] == list(range(iterations))
    assert [row["step"] for row in rows if "evaluation/reward" in row] == due
    quanta: Counter[Any] = Counter()
    for event in read_events(directory / "events.jsonl").events:
        if event["name"] == "quantum_finished":
            key = keys.parse(event["key"])
            assert key is not None
            quanta[key.split, key.indices, event["quantum"]] += 1
    assert quanta and set(quanta.values()) == {1}


@pytest.mark.parametrize("eta", [0, 1])
def test_a_stopped_run_goes_on_without_losing_or_repeating_anything(
    eta: int, make_config: Config, client: Client
) -> None:
    config = make_config(
        run={"iterations": 5, "eta": eta},
        evaluation={"prompts": 2, "every": 2},
        checkpoint={"every": 2},
        store={"keep_journals": True},
    )
    directory = stopped(config, client, 2)
    before = journal_records(directory)
    summary = run(config, client=client, resume=True)
    check_whole(directory, config)
    assert newest_epoch(directory / "epochs") == 1
    assert [result["version"] for result in summary.evaluations] == [0, 2, 4, 5]
    assert summary.iterations[0]["iteration"] >= 3 and summary.iterations[-1]["iteration"] == 4
    assert max(values["lag_max"] for values in summary.iterations) <= eta
    assert summary.checkpoint is not None and summary.checkpoint.name == "step-000005"
    after = journal_records(directory)
    assert before.items() <= after.items()
    assert len(after) == (5 * 4 + 4 * 2) * QUANTA
    assert {json.loads(record)["epoch"] for record in after.values()} == {0, 1}


def test_metrics_of_a_step_that_died_between_its_checkpoint_and_its_line_are_written_by_the_next_start(
    make_config: Config, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Records of groups go after the line is written.
    monkeypatch.setattr(run_checkpoints, "prune_groups", lambda spec, first, before: before)
    config = make_config(run={"iterations": 2}, checkpoint={"every": 2})
    path = run(config, client=client).directory / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    (whole,) = (json.loads(line) for line in lines if '"step": 1,' in line and '"reward"' in line)
    path.write_text("".join(line for line in lines if '"step": 1,' not in line))
    run(config, client=client, resume=True)
    (row,) = (row for row in read_metrics(path.parent) if row["step"] == 1 and "reward" in row)
    for name in ("reward", "loss", "grad_norm", "train_s"):
        assert row[name] == whole[name], name


def test_a_run_that_goes_on_has_what_its_policy_had_learned(make_config: Config, client: Client) -> None:
    config = make_config(run={"iterations": 4})
    directory = stopped(config, client, 2)
    before = read_events(directory / "events.jsonl").events
    ended = [event for event in before if event["name"] == "trajectory_ended" and event["completed"]]
    run(config, client=client, resume=True)
    events = read_events(directory / "events.jsonl").events
    begin = next(event for event in events[len(before) :] if event["name"] == "policy_snapshot")
    weight, _, _, _, running = begin["order"]["forecaster"]["all"]
    assert 0.6 * len(ended) < weight <= len(ended)  # a new version lets older ones count a little less
    assert running == pytest.approx(0, abs=1e-9)
    assert begin["order"]["lives"]["lives"] == {}
    told = replay((line, from_dict(event)) for line, event in enumerate(events, start=1))
    assert [step.difference for step in told if step.difference] == []


def test_a_log_that_cannot_be_read_costs_a_run_that_goes_on_only_what_was_learned(
    make_config: Config, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    config = make_config(run={"iterations": 3})
    directory = stopped(config, client, 0)
    log = directory / "events.jsonl"
    log.write_text(log.read_text().replace('"name":"policy_snapshot"', '"name":"policy_snapshot","made_up":1'))
    with caplog.at_level(logging.WARNING):
        assert learned_before(directory) is None
        assert learned_before(directory / "not there") is None
    assert "learns again" in caplog.text and "made_up" in caplog.text
    summary = run(config, client=client, resume=True)
    assert summary.iterations[-1]["iteration"] == 2


def test_torn_last_lines_of_both_logs_are_cut_and_said(
    make_config: Config, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    config = make_config(run={"iterations": 3})
    directory = stopped(config, client, 0)
    for name, torn in (("events.jsonl", '{"schema":1,"name":"quantum_fi'), ("metrics.jsonl", '{"step": 1, "rew')):
        with (directory / name).open("a") as file:
            file.write(torn)
    with caplog.at_level(logging.WARNING):
        run(config, client=client, resume=True)
    for name in ("events.jsonl", "metrics.jsonl"):
        assert f"{name}: cut off a torn last line" in caplog.text
    check_whole(directory, config)


def test_a_finished_run_is_left_as_it_is_and_may_get_more_iterations(
    make_config: Config, client: Client, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(evaluation={"prompts": 2})
    summary = run(config, client=client)
    check_only_what_is_left_is_begun(summary.directory, capsys, monkeypatch)
    kept = ("metrics.jsonl", "trajectories.zarr/zarr.json", "batches/batch-000001.json")
    before = {name: (summary.directory / name).read_bytes() for name in kept}
    again = run(load_resumed(summary.directory), client=client, resume=True)
    assert {name: (summary.directory / name).read_bytes() for name in kept} == before
    assert again.iterations == [] and again.evaluations == summary.evaluations
    assert again.checkpoint == summary.checkpoint
    events = read_events(summary.directory / "events.jsonl").events
    start = max(index for index, event in enumerate(events) if event["name"] == "run_started")
    assert not [event for event in events[start:] if event["name"].startswith(("quantum", "step", "batch"))]

    more = load_resumed(summary.directory, ["run.iterations=3"])
    assert [values["iteration"] for values in run(more, client=client, resume=True).iterations] == [2]
    assert [row["step"] for row in read_metrics(summary.directory) if "reward" in row] == [0, 1, 2]
    assert (summary_row(summary.directory).iterations, summary_row(summary.directory).of_iterations) == (3, 3)
    told = nothing_left(summary.directory, load_resumed(summary.directory))
    assert told is not None and "all its 3 iterations have ended" in told and "step-000003" in told


def check_only_what_is_left_is_begun(
    directory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """``libra resume`` of a finished run is one line before anything starts; where the last evaluation is missing, it starts."""

    def resumed(*overrides: str) -> str:
        with pytest.raises(SystemExit) as ended:
            main(["resume", str(directory), *overrides])
        written = capsys.readouterr()
        assert ended.value.code == 0, written.err
        return written.out

    begun: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(run_command, "run_to_its_end", lambda config, **_: begun.append(config.run.iterations))
        told = resumed()
        assert told.startswith(
            f"{directory}: all its 2 iterations have ended, and nothing is left to do; its model is "
        )
        assert told.endswith(f"type libra resume {directory} run.iterations=4\n") and told.count("\n") == 1
        assert (begun, summary_row(directory).state) == ([], "finished")
        resumed("run.iterations=4")
        outcome, metrics = directory / "evaluations" / "version-000002.json", directory / "metrics.jsonl"
        whole = {path: path.read_bytes() for path in (outcome, metrics)}
        outcome.unlink()
        *before, last = whole[metrics].splitlines(keepends=True)
        assert b"evaluation/reward" in last
        metrics.write_bytes(b"".join(before))
        assert resumed() == ""
        assert (begun, summary_row(directory).state) == ([4, 2], "unevaluated")
        for path, content in whole.items():
            path.write_bytes(content)


# ------------------------------------------------------------------------------------------------ refused


def test_a_directory_without_a_run_is_refused(make_config: Config, tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match=r"demo: no run to resume here; type the directory of a run"):
        run(make_config(), resume=True)
    with pytest.raises(RunDirectoryError, match=r"no run here, it has no config\.resolved\.yaml"):
        load_resumed(tmp_path / "demo")
    assert not (tmp_path / "demo").exists()


def test_a_file_system_without_locks_is_no_other_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(committer_lock.fcntl, "flock", none)
    with pytest.raises(
        RunDirectoryError, match=r"demo/driver\.lock: cannot lock it \(No locks available\); put the run"
    ):
        lock_run(tmp_path / "demo")


HOLDER = """
import sys
from pathlib import Path
from libra.driver.run_lock import lock_run
lock = lock_run(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.readline()
"""


def test_a_run_with_a_driver_at_work_is_refused_and_not_fenced_off(make_config: Config, client: Client) -> None:
    config = make_config(run={"iterations": 1})
    directory = stopped(config, client, 0)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(directory)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    with pytest.raises(RunDirectoryError, match=f"another driver has this run, process {holder.pid} on "):
        run(config, client=client, resume=True)
    assert newest_epoch(directory / "epochs") == 0
    holder.kill()  # the kernel gives the lock back
    holder.communicate()
    run(config, client=client, resume=True)
    assert newest_epoch(directory / "epochs") == 1


@pytest.mark.parametrize(
    ("override", "allowed"),
    [
        ("trainer.lr=0.5", False),
        ("trainer.prompts=3", False),
        ("run.seed=9", False),
        ("run.eta=1", False),
        ("rollout.max_turns=9", False),
        ("run.iterations=9", True),
        ("cluster.rollout_workers=2", True),
        ("checkpoint.every=1", True),
    ],
)
def test_what_would_make_another_run_of_it_is_refused_by_name(
    override: str, allowed: bool, make_config: Config, tmp_path: Path
) -> None:
    (tmp_path / "config.resolved.yaml").write_text(dump_config(make_config()))
    name, _, value = override.partition("=")
    if allowed:
        section, _, field = name.partition(".")
        assert str(getattr(getattr(load_resumed(tmp_path, [override]), section), field)) == value
        return
    with pytest.raises(
        ConfigError, match=rf"^{name}: the run was started with .*, got {value}; .*resumed run keeps it"
    ):
        load_resumed(tmp_path, [override])


def test_objects_a_run_was_begun_with_are_asked_for(make_config: Config, client: Client) -> None:
    config = make_config(run={"iterations": 1})
    directory = stopped(config, client, 0, environment=FixedTurns())
    with pytest.raises(ConfigError, match=r"begun with an object as its environment.*without one.*run__name='demo'"):
        run(config, client=client, resume=True)
    assert newest_epoch(directory / "epochs") == 0
    summary: RunSummary = run(config, client=client, resume=True, environment=FixedTurns())
    assert summary.iterations == [] and json.loads((directory / "given.json").read_text())["environment"]


def test_a_run_that_was_moved_is_resumed_where_it_is_now(make_config: Config, client: Client) -> None:
    config = make_config(run={"iterations": 4}, checkpoint={"every": 100})
    directory = stopped(config, client, 2)
    there = directory.parent / "elsewhere" / "demo2"
    there.parent.mkdir()
    directory.rename(there)
    run(load_resumed(there), client=client, resume=True)
    check_whole(there, config)


def test_python_may_not_change_a_run_either(make_config: Config, client: Client) -> None:
    stopped(make_config(run={"iterations": 3}), client, 1)
    with pytest.raises(ConfigError, match=r"trainer\.lr: the run was started with 0\.001, got 0\.5"):
        run(make_config(run={"iterations": 3}, trainer={"lr": 0.5}), client=client, resume=True)

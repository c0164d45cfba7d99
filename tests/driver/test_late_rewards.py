"""Runs whose rewards come late: corrected, waited for, dropped; each counts once, also after kills."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import late_judge
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from distributed import Client

import libra
from benchmarks.late_runs import killed_in_step, times_applied
from libra import Late
from libra.cli.main import cli
from libra.config import RunConfig, dump_config
from libra.driver.session import Session
from libra.errors import LateRefused, RunDirectoryError
from libra.events import LateRewardsTaken, from_dict
from libra.policy.late import age_weight
from libra.policy.log_replay import replay
from libra.store.batch_membership import batch_path, read_batch_facts
from libra.store.event_log import read_events
from libra.store.trajectories import TrajectoryStore
from libra.testing import FixedTurns
from libra.train import grpo
from libra.types import Episode
from libra.weights import WeightStore
from libra.worker.checkpoint_writer import CheckpointWriter
from libra.worker.replica_factory import make_replica
from libra.worker.trainer import recover

Config = Callable[..., RunConfig]


def late_of(session: Session, batches: int) -> list[dict[str, Any]]:
    return [read_batch_facts(session.spec.batches_dir, batch)["late"] for batch in range(batches)]


@pytest.mark.parametrize("dispatch", ["storage", "peer"])
def test_a_reward_counts_in_the_next_batch_as_what_it_changes(
    make_config: Config, client: Client, dispatch: str
) -> None:
    class Later(FixedTurns):
        """A worker delivers the rewards of an iteration while it grades the next but one: 1 for sample 0, 0 for others."""

        def grade(self, episode: Episode) -> float | Late:
            _, iteration, group, sample = episode.trajectory_id.split("-")
            if int(iteration) >= 2:
                libra.deliver(f"train-{int(iteration) - 2}-{group}-{sample}", float(sample == "0"))
            return Late(fast=None if sample == "3" else 0.5)

    config = make_config(
        run={"iterations": 5},
        trainer={"late": "correct", "late_tau": 10.0, "group_size": 4, "lr": 1e-3, "dispatch": dispatch},
        checkpoint={"every": 3},
    )
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
        assert [(row["iteration"], row["delay"]) for row in facts["rows"]] == [(batch - 2, 2)] * (
            2 if batch >= 2 else 0
        )
        for row in facts["rows"]:  # before, three rewards were equal and the fourth was missing: no advantage
            np.testing.assert_allclose(row["advantages"], age_weight(2, 10.0) * after.numpy(), atol=1e-6)
            assert row["trains"] == [True] * 4 and row["counts"] == [False, False, False, True]
    assert [row["sequences"] for row in rows] == [6, 6, 14, 14, 14]
    assert [bool(row["no_signal"]) for row in rows] == [True, True, False, False, False]
    assert rows[0]["optimizer_steps"] == 0 and rows[2]["optimizer_steps"] == 1
    shown = CliRunner().invoke(
        cli, ["inspect", str(session.directory), "--iteration", "1", "--sample", "0", "--index", "8"]
    )
    assert "late reward  1, counts from batch 3 on, 2 versions late" in shown.output
    # Groups that a kept checkpoint needs are kept, trained before it or not, and the same steps are taken again from it.
    kept = {int(path.name.split("-")[1]) for path in spec.groups_dir.glob("train-*.group")}
    assert kept == {1, 2, 3, 4}
    store = WeightStore(spec.weights_dir)
    shutil.rmtree(spec.checkpoints_dir / "step-000005")
    replica = make_replica(spec, spec.model_dir, None)
    again = recover(CheckpointWriter(replica, spec.checkpoints_dir, config), spec, store, 5)
    assert [step["digest"] for step in again] == [store.get(number).digest for number in (4, 5)]
    logged = enumerate(map(from_dict, read_events(session.directory / "events.jsonl").events))
    told = [each for each in replay(logged) if isinstance(each.event, LateRewardsTaken)]
    assert len(told) == 5 and not any(each.difference for each in told)


def test_a_batch_waits_for_late_rewards_and_not_for_ever(make_config: Config, client: Client) -> None:
    class Soon(FixedTurns):
        """Rewards come from threads, that of sample 2 never."""

        def grade(self, episode: Episode) -> float | Late:
            name, value = episode.trajectory_id, super().grade(episode)
            if not name.endswith("-2"):
                threading.Timer(0.2, libra.deliver, (name, value)).start()
            return Late(fast=0.25 if name.endswith("-0-2") else None)

    config = make_config(run={"iterations": 1}, trainer={"late": "wait", "late_wait_s": 3.0, "group_size": 3})
    with Session(config, environment=Soon(), client=client) as session:
        (row,) = session.iterations()
    assert (row["late_came"], row["late_dropped"], row["late_waiting"]) == (4, 2, 0)
    assert row["left_out"] == row["failures/reward"] == 1
    with TrajectoryStore.open(session.spec.store_path) as store:
        members = [store.trajectory(index) for index in range(store.num_trajectories)]
    given = {str(m.trajectory_id): m.reward for m in members}
    assert given["train-0-0-2"] == 0.25 and np.isnan(given["train-0-1-2"])
    assert sum(np.isfinite(reward) for reward in given.values()) == 5
    events = map(from_dict, read_events(session.directory / "events.jsonl").events)
    assert any(isinstance(each, LateRewardsTaken) and each.awaited for each in events)


def test_a_killed_run_takes_each_of_twenty_rewards_once(
    make_config: Config, tmp_path: Path, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(
        run={"iterations": 3},
        environment={"name": "late_judge:Judged"},
        trainer={"late": "correct", "prompts": 5, "group_size": 4},
        checkpoint={"every": 2},
    )
    file, directory = tmp_path / "config.yaml", tmp_path / "demo"
    file.write_text(dump_config(config))
    path = [str(Path(late_judge.__file__).parent), str(repository), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))

    killed_in_step(file, 1)  # the 20 rewards of iteration 0 are to come, and batch 1 is committed without them
    assert batch_path(directory / "batches", 1).exists()
    for group in range(5):
        for sample in range(4):
            libra.deliver(f"train-0-{group}-{sample}", float(sample), run=directory)
    killed_in_step(file, 2)  # batch 2 has them, and its step is not taken
    facts = [read_batch_facts(directory / "batches", batch)["late"] for batch in range(3)]
    assert [len(each["came"]) for each in facts] == [0, 0, 20]
    command = [sys.executable, "-m", "libra", "resume", str(directory)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert times_applied(directory) == {f"train-0-{group}-{sample}": 1 for group in range(5) for sample in range(4)}
    with pytest.raises(LateRefused, match=r"train-0-3-1: 1 was delivered before, and the first one counts"):
        libra.deliver("train-0-3-1", 0.5, run=directory)


@pytest.mark.parametrize(
    ("trajectory", "value", "words"),
    [
        ("train-0-0", 1.0, "give it as episode.trajectory_id is"),
        ("eval-0-0-0", 1.0, "waits for no late reward"),
        ("train-0-2-0", 1.0, "there is no group 2; this run has groups 0 to 1"),
        ("train-0-0-2", 1.0, "there is no sample 2; this run has samples 0 to 1"),
        ("train-0-0-0", float("nan"), "must be one finite number"),
        ("train-0-0-0", True, "must be one finite number"),
        ("train-0-0-0", 2e9, "at most 1e[+]09"),
    ],
)
def test_what_cannot_be_a_late_reward_is_refused(
    trajectory: str, value: float, words: str, make_config: Config, tmp_path: Path
) -> None:
    directory = tmp_path / "demo"
    directory.mkdir()
    (directory / "config.resolved.yaml").write_text(dump_config(make_config(trainer={"late": "wait"})))
    with pytest.raises(LateRefused, match=words):
        libra.deliver(trajectory, value, run=directory)
    assert not (directory / "late").exists()


def test_the_command_line_delivers_and_the_second_delivery_is_refused(make_config: Config, tmp_path: Path) -> None:
    directory = tmp_path / "demo"
    directory.mkdir()
    config = directory / "config.resolved.yaml"
    config.write_text(dump_config(make_config(trainer={"late": "drop"})))
    runner = CliRunner()
    first = runner.invoke(cli, ["deliver", str(directory), "train-1-0-1", "--", "-0.5"])
    assert (first.exit_code, first.output) == (0, "train-1-0-1: -0.5 counts in the batch of its group\n")
    with pytest.raises(
        LateRefused, match=r"train-1-0-1: got 0.75, and -0.5 was delivered before; the first one counts"
    ):
        libra.deliver("train-1-0-1", 0.75, run=directory)
    with pytest.raises(RunDirectoryError, match="no run here"):
        libra.deliver("train-1-0-1", 0.75, run=tmp_path)
    with pytest.raises(RunDirectoryError, match="give run=DIRECTORY"):
        libra.deliver("train-1-0-1", 0.75)


def test_a_run_without_late_rewards_says_what_to_type(make_config: Config, client: Client) -> None:
    with Session(make_config(run={"iterations": 1}), environment=late_judge.Judged(), client=client) as session:
        (row,) = session.iterations()
        with pytest.raises(LateRefused, match=r"trainer.late=off\); type trainer.late=correct"):
            libra.deliver("train-0-0-0", 1.0)
    assert row["failures/reward"] == 4 and "type trainer.late=correct, wait or drop" in row["no_signal"]
    assert "late_came" not in row


def test_what_is_dropped_is_counted_and_its_delivery_refused(make_config: Config, client: Client) -> None:
    config = make_config(run={"iterations": 1}, trainer={"late": "drop"})
    with Session(config, environment=late_judge.Judged(), client=client) as session:
        (row,) = session.iterations()
        with pytest.raises(LateRefused, match=r"too late; batch 0 trained it.*\(trainer.late=drop\)"):
            libra.deliver("train-0-0-0", 1.0)
    assert (row["late_came"], row["late_dropped"]) == (0, 4) and row["reward"] > 0

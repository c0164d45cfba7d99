"""Rows of a batch from the workers that graded them, and from the run directory where those are gone."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from factories import trajectory
from libra.driver.run_session import Session
from libra.errors import TransferError
from libra.policy.late_rewards import GuessWorth, WaitingGroup
from libra.store.run_records import commit_batch, group_path, pack_trajectory, write_group
from libra.types import FailureClass, TrajectoryId
from libra.worker.run_spec import RunSpec
from libra.worker.training.batch_rows import (
    FETCHED,
    RowKeeper,
    SliceFetcher,
    lazy_batch,
    lengths,
    num_kept,
    waiting_after,
    waiting_row,
    worth_after,
)


def test_training_ranks_fetch_their_slices_and_read_no_record(make_config, client_wide):
    cluster = {"rollout_workers": 2, "hybrid_workers": 1, "train_workers": 2}
    config = make_config(trainer={"group_size": 3, "dispatch": "peer"}, cluster=cluster)
    with Session(config, client=client_wide) as session:
        rows = list(session.iterations())
    assert [row["sequences"] for row in rows] == [6, 6]
    for row in rows:  # both ranks together each row once: none of them had the whole batch
        assert (row["fetched_rows"], row["stored_rows"], row["replicas"]) == (6, 0, 2)
        assert row["fetched_bytes"] > row["tokens"]


@pytest.fixture
def spec(make_config, tmp_path):
    config = make_config(trainer={"group_size": 3, "dispatch": "peer"})
    made = RunSpec("demo", 0, tmp_path, "model", config, secret="known here")
    made.groups_dir.mkdir()
    return made


def group_of(iteration, group, num=3):
    """Of a prompt of one token and an observation between actions; the last one failed."""
    ids = [TrajectoryId(iteration, group, sample) for sample in range(num)]
    made = [trajectory(tid, lengths=(1, 2, 1, tid.sample), advantage=1.0) for tid in ids]
    made[-1].failure = FailureClass.ENGINE
    return made


def facts_of(members, path, block):
    return {
        "path": str(path), "advantages": [1.0] * len(members),
        "trains": [bool(member.failure.trains) for member in members],
        "rows": [str(member.trajectory_id) for member in members], "lengths": lengths(members), "block": block,
    }  # fmt: skip


def keeper(spec):
    worker = SimpleNamespace(address="tcp://127.0.0.1:7")
    return RowKeeper(worker, spec)


def test_what_a_lost_holder_had_is_read_from_the_run_directory(spec):
    first, second = group_of(0, 0), group_of(0, 1)
    kept = keeper(spec)
    rows = []
    for number, members in enumerate((first, second)):
        write_group(spec.groups_dir, 0, number, members)
        rows.append(facts_of(members, group_path(spec.groups_dir, 0, number), kept.keep(0, number, members)))
    fetcher = SliceFetcher({"members": rows}, spec)
    names = [*rows[0]["rows"], *rows[1]["rows"]]
    assert [str(t.trajectory_id) for t in fetcher(names)] == names
    assert [fetcher.numbers[name] for name in FETCHED] == [6, sum(map(len, map(pack_trajectory, (*first, *second)))), 0]
    kept.close()
    again = fetcher(names[:4])
    assert [t.token_ids.tolist() for t in again] == [t.token_ids.tolist() for t in (*first, *second)][:4]
    assert fetcher.numbers["stored_rows"] == 4
    stored = SliceFetcher({"members": [rows[0] | {"block": None}]}, spec)  # a group that nobody offers
    assert len(stored(names[1:3])) == 2 and stored.numbers == {"fetched_rows": 0, "fetched_bytes": 0, "stored_rows": 2}
    group_path(spec.groups_dir, 0, 1).unlink()
    with pytest.raises(TransferError):
        fetcher(names)


def test_old_groups_are_let_go(spec):
    kept = keeper(spec)
    for group in range(num_kept(spec.config) + 1):
        kept.keep(0, group, group_of(0, group))
    kept.keep(0, 1, group_of(0, 1))  # graded again: offered again
    held = [group for group in range(num_kept(spec.config) + 1) if f"train-0-{group}-0" in kept.server]
    kept.close()
    assert held == [*range(1, num_kept(spec.config) + 1)]


def test_failures_and_what_a_filter_took_out_are_not_fetched():
    members = group_of(0, 0, num=4)
    row = facts_of(members, Path("g"), None)
    row["trains"][0] = False
    batch = lazy_batch({"members": [row]}, None)
    assert [fact.row for fact in batch.facts] == row["rows"][1:3]
    assert [(fact.num_tokens, fact.num_actions) for fact in batch.facts] == [(4, 3), (5, 4)]
    assert len(batch) == 3  # the failure is counted, what the filter took out is not


def test_groups_and_the_worth_of_guesses_are_read_back_from_the_file_of_a_batch(tmp_path):
    files = SimpleNamespace(batches_dir=tmp_path)
    group = WaitingGroup(3, 1, 4, (0, 2), {1: 0.5}, guess_weight=0.25)
    late = {"waiting": [waiting_row(group)], "worth": [2.0, 8.0]}
    commit_batch(tmp_path, 0, [TrajectoryId(0, 0, 0)])
    commit_batch(tmp_path, 1, [TrajectoryId(1, 0, 0)], late=late)
    assert waiting_after(files, 1) == [group]
    assert worth_after(files, 1) == GuessWorth(2.0, 8.0) and worth_after(files, 1).slope == 0.25
    assert worth_after(files, 0) == worth_after(files, -1) == GuessWorth()

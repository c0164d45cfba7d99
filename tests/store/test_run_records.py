"""Record files of a run: written once, whole or refused, each by its key."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from libra.errors import RecordExists, StoreError
from libra.seals import sealed_text
from libra.store.run_records import (
    LATE,
    WAVES,
    batch_path,
    came,
    commit_batch,
    commit_wave,
    group_path,
    groups_of,
    in_waves,
    read_batch,
    read_batch_facts,
    read_group,
    read_late,
    read_waves,
    write_group,
    write_late,
)
from libra.types import EndReason, FailureClass, Prompt, TrajectoryId

MEMBERS = [TrajectoryId(2, 1, 0), TrajectoryId(1, 7, 3), TrajectoryId(2, 0, 1)]


def test_members_come_back_in_order_with_the_facts(tmp_path):
    commit_batch(tmp_path / "batches", 4, MEMBERS, epoch=2, oldest_version=1)
    assert read_batch(tmp_path / "batches", 4) == MEMBERS
    assert read_batch_facts(tmp_path / "batches", 4) == {"epoch": 2, "oldest_version": 1}


def test_the_first_membership_stands(tmp_path):
    commit_batch(tmp_path, 0, MEMBERS)
    with pytest.raises(RecordExists, match=r"batch-000000.json"):
        commit_batch(tmp_path, 0, MEMBERS[:1])
    assert read_batch(tmp_path, 0) == MEMBERS
    for members, facts in (([], {}), ([MEMBERS[0], MEMBERS[0]], {}), (MEMBERS, {"bad": object()})):
        with pytest.raises(StoreError):
            commit_batch(tmp_path, 1, members, **facts)


def test_it_is_on_the_device_before_commit_returns(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr("os.fsync", synced.append)
    commit_batch(tmp_path, 0, MEMBERS)
    assert len(synced) == 2  # the file and its directory


def test_missing_torn_and_foreign_files_are_named(tmp_path):
    with pytest.raises(StoreError, match=r"batch-000003.json"):
        read_batch(tmp_path, 3)
    for content in (b'{"schema": 1, "mem', b"[]", b"{}"):
        batch_path(tmp_path, 3).write_bytes(content)
        with pytest.raises(StoreError, match=r"batch-000003.json: torn or altered"):
            read_batch(tmp_path, 3)
    batch_path(tmp_path, 3).write_text(sealed_text({"schema": 2}))
    with pytest.raises(StoreError, match="schema 2, this Libra reads 1"):
        read_batch(tmp_path, 3)


def rows(*groups):
    return [{"iteration": 3, "group": g, "path": f"{g}.group", "advantages": [0.5, -0.5]} for g in groups]


def test_the_waves_of_a_batch_come_back_in_order_and_end_at_a_gap(tmp_path):
    for wave, groups in ((0, (2,)), (1, (0, 3)), (3, (1,))):
        commit_wave(tmp_path, 3, wave, rows(*groups))
    commit_wave(tmp_path, 4, 0, rows(9))
    found = read_waves(tmp_path, 3)
    assert [groups_of(wave) for wave in found] == [((3, 2),), ((3, 0), (3, 3))]
    assert found[1][0]["advantages"] == [0.5, -0.5]
    batch = [row for wave in found for row in wave]
    assert in_waves(batch) == found and in_waves(rows(0, 1)) == []
    assert read_waves(tmp_path, 7) == read_waves(tmp_path / "none", 3) == []


def test_a_second_writer_gets_the_first_ones_wave_and_an_altered_one_is_refused(tmp_path):
    commit_wave(tmp_path, 3, 0, rows(2))
    with pytest.raises(RecordExists):
        commit_wave(tmp_path, 3, 0, rows(1))
    path = WAVES.path(tmp_path, 3, 0)
    text = path.read_text()
    path.write_text(text.replace("0.5", "0.6"))
    with pytest.raises(StoreError, match="type libra repair"):
        read_waves(tmp_path, 3)
    path.write_text(text)
    path.rename(WAVES.path(tmp_path, 3, 1))
    commit_wave(tmp_path, 3, 0, rows(2))
    with pytest.raises(StoreError, match="it is of another wave"):
        read_waves(tmp_path, 3)


ONE = TrajectoryId(3, 0, 7)
NO_NUMBER = lambda _: b'{"schema": 1, "trajectory": [3, 0, 7, "train"], "value": NaN}'  # noqa: E731


def test_of_many_deliveries_one_counts(tmp_path):
    def deliver(value):
        try:
            write_late(tmp_path / "late", ONE, float(value))
        except RecordExists:
            return None
        return value

    with ThreadPoolExecutor(8) as pool:
        first = [value for value in pool.map(deliver, range(8)) if value is not None]
    assert [read_late(tmp_path / "late", ONE)] == first
    assert came(tmp_path / "late", [ONE, ONE._replace(sample=0)]) == {ONE: float(first[0])}
    assert [path.name for path in (tmp_path / "late").iterdir()] == [f"{ONE}.json"]


@pytest.mark.parametrize(
    "harm", [lambda text: text.replace(b"0.25", b"0.75"), lambda text: text[:-10], lambda _: b"{}", NO_NUMBER]
)
def test_a_changed_file_says_what_to_do(harm, tmp_path):
    path = write_late(tmp_path / "late", ONE, 0.25)
    path.write_bytes(harm(path.read_bytes()))
    with pytest.raises(StoreError, match=r"libra deliver .* train-3-0-7 VALUE"):
        read_late(tmp_path / "late", ONE)


def test_a_file_of_another_trajectory_is_refused(tmp_path):
    other = ONE._replace(sample=2)
    write_late(tmp_path, other, 1.0).rename(LATE.path(tmp_path, ONE))
    with pytest.raises(StoreError, match=r"of train-3-0-2.*of train-3-0-7"):
        read_late(tmp_path, ONE)


def test_every_field_of_every_trajectory_comes_back(tmp_path, make_trajectory, assert_same):
    group = [
        make_trajectory(3, 5, 0),
        make_trajectory(3, 5, 1, num_tokens=0, num_turns=0, end_reason=EndReason.FAILURE, failure=FailureClass.TOOL),
        make_trajectory(
            3, 5, 2, reward=float("nan"), failure=FailureClass.WORKER, failure_detail="a\nb", retried="engine"
        ),
        make_trajectory(3, 5, 3, experts=(2, 3)),
    ]
    path = write_group(tmp_path / "groups", 3, 5, group)
    assert path == group_path(tmp_path / "groups", 3, 5)
    for got, expected in zip(read_group(path), group, strict=True):
        assert_same(got, expected)


def test_a_group_is_written_once(tmp_path, make_trajectory, assert_same):
    first, second = make_trajectory(seed=1), make_trajectory(seed=2)
    path = write_group(tmp_path, 0, 0, [first])
    with pytest.raises(RecordExists, match=r"train-000000-000000.group"):
        write_group(tmp_path, 0, 0, [second])
    assert_same(read_group(path)[0], first)
    other = write_group(tmp_path, 0, 0, [make_trajectory(split="eval")])
    assert [read_group(each)[0].trajectory_id.split for each in (path, other)] == ["train", "eval"]


def test_strangers_doubles_and_empty_groups_are_refused(tmp_path, make_trajectory):
    for trajectories in (
        [],
        [make_trajectory(0, 1, 0)],
        [make_trajectory(0, 0, 0), make_trajectory(0, 0, 0)],
        [make_trajectory(0, 0, 0), make_trajectory(0, 0, 1, "eval")],
        [make_trajectory(prompt=Prompt("q7", (), {"answer": np.zeros(2)}))],  # not JSON
    ):
        with pytest.raises(StoreError):
            write_group(tmp_path, 0, 0, trajectories)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_or_torn_group_is_named(tmp_path, make_trajectory):
    with pytest.raises(StoreError, match=r"train-000000-000001.group"):
        read_group(group_path(tmp_path, 0, 1))
    path = write_group(tmp_path, 0, 0, [make_trajectory()])
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(StoreError, match=r"train-000000-000000.group"):
        read_group(path)

"""Membership of a batch is decided once."""

import pytest

from libra.errors import RecordExists, StoreError
from libra.store.run_records import batch_path, commit_batch, read_batch, read_batch_facts
from libra.types import TrajectoryId

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
    batch_path(tmp_path, 3).write_bytes(b'{"schema": 2}')
    with pytest.raises(StoreError, match="schema 2, this Libra reads 1"):
        read_batch(tmp_path, 3)

"""One record per quantum, whole or absent, whoever writes and whatever dies."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libra.errors import RecordExists, StoreError
from libra.store.journal import Journal

ID = "train-0-1-2"


def test_records_come_back_in_order_from_any_start(tmp_path):
    journal = Journal(tmp_path)
    for quantum in range(4):
        journal.append(ID, quantum, {"quantum": quantum, "token_ids": np.arange(quantum, dtype=np.int32)})
    assert [record["quantum"] for record in journal.read(ID)] == [0, 1, 2, 3]
    assert [record["quantum"] for record in Journal(tmp_path).read(ID, start=2)] == [2, 3]
    assert journal.read(ID, start=4) == []
    assert journal.read("train-9-9-9") == []
    assert journal.read(ID)[3]["token_ids"].tolist() == [0, 1, 2]


def test_reading_ends_before_the_first_quantum_that_is_missing(tmp_path):
    journal = Journal(tmp_path)
    for quantum in (0, 1, 3):
        journal.append(ID, quantum, {"quantum": quantum})
    assert [record["quantum"] for record in journal.read(ID)] == [0, 1]


def test_of_writers_at_once_exactly_one_wins_and_its_record_is_the_one_read(tmp_path):
    start, results = threading.Barrier(8), {}

    def write(writer: int) -> None:
        start.wait()
        try:
            Journal(tmp_path).append(ID, 0, {"writer": writer, "load": np.full(5000, writer)})
            results[writer] = "won"
        except RecordExists as error:
            results[writer] = str(error)

    threads = [threading.Thread(target=write, args=(writer,)) for writer in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (winner,) = [writer for writer, result in results.items() if result == "won"]
    assert all("0000.rec" in result for writer, result in results.items() if writer != winner)
    (record,) = Journal(tmp_path).read(ID)
    assert record["writer"] == winner
    assert set(record["load"].tolist()) == {winner}
    assert [path.name for path in tmp_path.iterdir()] == [f"{ID}.0000.rec"]


def test_a_link_whose_answer_was_lost_counts_as_won(tmp_path, monkeypatch):
    def link_then_complain(source: str, target: str) -> None:
        real_link(source, target)
        raise FileExistsError(errno.EEXIST, "File exists")  # what an NFS client sees when the server's answer was lost

    real_link = os.link
    monkeypatch.setattr(os, "link", link_then_complain)
    Journal(tmp_path).append(ID, 0, {"x": 1})
    assert Journal(tmp_path).read(ID) == [{"x": 1}]


@settings(max_examples=30, deadline=None)
@given(keep=st.floats(0, 1, exclude_max=True))
def test_a_torn_record_is_an_error_that_names_the_file(tmp_path_factory, keep):
    journal = Journal(tmp_path_factory.mktemp("journal"))
    journal.append(ID, 0, {"token_ids": np.arange(50)})
    path = Path(journal.root) / f"{ID}.0000.rec"
    whole = path.read_bytes()
    path.write_bytes(whole[: int(keep * len(whole))])
    with pytest.raises(StoreError, match=r"0000.rec"):
        journal.read(ID)


def test_a_temporary_file_left_by_a_crash_is_ignored(tmp_path, monkeypatch):
    journal = Journal(tmp_path)
    journal.append(ID, 0, {"x": 0})
    (tmp_path / f".{ID}.0001.rec.abc.tmp").write_bytes(b"half")
    assert journal.read(ID) == [{"x": 0}]
    journal.append(ID, 1, {"x": 1})
    assert journal.read(ID) == [{"x": 0}, {"x": 1}]


@pytest.mark.parametrize(
    ("number", "words"), [(errno.ENOSPC, "disk full"), (errno.EDQUOT, "quota"), (errno.EIO, "write")]
)
def test_a_full_disk_is_named_and_leaves_nothing_behind(tmp_path, monkeypatch, number, words):
    journal = Journal(tmp_path)
    journal.append(ID, 0, {"x": 0})
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda *_: (_ for _ in ()).throw(OSError(number, os.strerror(number))))
        with pytest.raises(StoreError, match=words) as caught:
            journal.append(ID, 1, {"x": 1})
    assert "0001.rec" in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == [f"{ID}.0000.rec"]
    journal.append(ID, 1, {"x": 1})
    assert len(journal.read(ID)) == 2


def test_fsync_reaches_file_and_directory(tmp_path, monkeypatch):
    synced, real = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(Path(f"/proc/self/fd/{fd}").readlink()), real(fd)))
    Journal(tmp_path).append(ID, 0, {"x": 0})
    assert synced == []
    Journal(tmp_path, fsync=True).append(ID, 1, {"x": 1})
    assert [path.name.startswith(f".{ID}.0001") or path.name for path in synced] == [True, tmp_path.name]


def test_remove_forgets_one_trajectory(tmp_path):
    journal = Journal(tmp_path)
    journal.append(ID, 0, {})
    journal.append("eval-0-0-0", 0, {})
    journal.remove(ID)
    journal.remove(ID)
    assert journal.read(ID) == []
    assert [path.name for path in tmp_path.iterdir()] == ["eval-0-0-0.0000.rec"]


@pytest.mark.parametrize(("trajectory", "quantum"), [("../x", 0), ("", 0), ("a/b", 0), (".hidden", 0), (ID, -1)])
def test_a_name_that_would_leave_the_journal_is_refused(tmp_path, trajectory, quantum):
    with pytest.raises(StoreError, match="got"):
        Journal(tmp_path).append(trajectory, quantum, {})
    assert [path.name for path in tmp_path.iterdir()] == []

"""One record per quantum, whole or absent, whoever writes and whatever dies."""

import errno
import os
import threading
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra.errors import RecordExists, StoreError
from libra.store import trajectory_journal as journal_module
from libra.store.quantum_records import ActionRecord, QuantumRecord, RestartRecord
from libra.store.record_codec import joined, pack, struct_decoder, unpack_all
from libra.store.trajectory_journal import LOG_PREFIX, Journal, sweep_logs
from libra.types import ToolReturn, ToolStatus

ID = "train-0-1-2"


def note(text):
    return RestartRecord(detail=str(text))


def action(turn, ids, content=""):
    return ActionRecord(turn=turn, observation_ids=ids, returns=(ToolReturn("t", ToolStatus.OK, content),))


def names(directory):
    """Records that a directory shows; the logs that hold them are hidden."""
    return [path.name for path in directory.iterdir() if not path.name.startswith(LOG_PREFIX)]


def open_logs(directory):
    held = (str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.is_symlink())
    return sum(path.startswith(f"{directory}/") for path in held)


def test_records_appended_together_are_read_and_removed_together(tmp_path):
    journal = Journal(tmp_path)
    (tmp_path / f".{ID}.0001.rec.abc.tmp").write_bytes(b"half")  # left by a crash
    records = [action(q, np.arange(q, dtype=np.int32), "x" * 900 * q) for q in range(5)]
    journal.append(ID, 0, records[0])
    journal.append(ID, 1, journal.pack(ID, 1, records[1]), records[2])
    journal.append(ID, 3, records[3], records[4])
    for quantum in (0, 2):  # which ends at its gap
        journal.append("eval-0-0-0", quantum, note(quantum))
    (tmp_path / f".{ID}.0001.rec.abc.tmp").unlink()
    assert sorted(names(tmp_path))[2:] == [f"{ID}.{quantum:04d}.rec" for quantum in (0, 1, 3)]
    assert journal.read("eval-0-0-0") == [note(0)]
    assert [record.turn for record in Journal(tmp_path).read(ID)] == [0, 1, 2, 3, 4]
    assert [record.turn for record in journal.read(ID, start=3)] == [3, 4]
    assert [len(record.observation_ids) for record in journal.read_at(ID, 1)] == [1, 2]
    with pytest.raises(RecordExists):
        journal.append(ID, 1, records[1])
    for _ in range(2):
        journal.remove(ID)
    assert journal.read(ID) == [] and len(names(tmp_path)) == 2


@pytest.mark.parametrize("cut", [0, 1, 15, 16, 17, 25, -1])
def test_of_records_appended_together_all_are_read_or_none(cut):
    packed = [pack(note(number), source="x") for number in (1, 2)]
    whole, decoder = joined(packed), struct_decoder(QuantumRecord)
    assert unpack_all(whole, decoder, source="x") == [note(1), note(2)]
    with pytest.raises(StoreError, match="x: "):
        unpack_all(whole[:cut], decoder, source="x")
    with pytest.raises(StoreError, match="x: "):
        unpack_all(whole + packed[0], decoder, source="x")


def test_of_writers_at_once_exactly_one_wins_and_its_record_is_the_one_read(tmp_path):
    start, results = threading.Barrier(8), {}

    def write(writer):
        start.wait()
        try:
            Journal(tmp_path).append(ID, 0, action(writer, np.full(5000, writer)))
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
    assert record.turn == winner
    assert set(record.observation_ids.tolist()) == {winner}
    assert names(tmp_path) == [f"{ID}.0000.rec"]


def test_a_link_whose_answer_was_lost_counts_as_won(tmp_path, monkeypatch):
    def link_then_complain(source, target):
        real_link(source, target)
        raise FileExistsError(errno.EEXIST, "File exists")  # what an NFS client sees when the server's answer was lost

    real_link = os.link
    monkeypatch.setattr(os, "link", link_then_complain)
    Journal(tmp_path).append(ID, 0, note(1))
    assert Journal(tmp_path).read(ID) == [note(1)]


@given(keep=st.floats(0, 1, exclude_max=True))
def test_a_torn_record_is_an_error_that_names_the_file(tmp_path_factory, keep):
    journal = Journal(tmp_path_factory.mktemp("journal"))
    journal.append(ID, 0, action(0, np.arange(50)))
    path = Path(journal.root) / f"{ID}.0000.rec"
    whole = path.read_bytes()
    path.write_bytes(whole[: int(keep * len(whole))])
    with pytest.raises(StoreError, match=r"0000.rec"):
        journal.read(ID)


@pytest.mark.parametrize(("number", "words"), [(errno.ENOSPC, "disk full"), (errno.EIO, "write")])
def test_a_full_disk_is_named_and_leaves_nothing_behind(tmp_path, monkeypatch, number, words):
    journal = Journal(tmp_path)
    journal.append(ID, 0, note(0))
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", lambda *_: (_ for _ in ()).throw(OSError(number, os.strerror(number))))
        with pytest.raises(StoreError, match=words) as caught:
            journal.append(ID, 1, note(1))
    assert "0001.rec" in str(caught.value)
    assert names(tmp_path) == [f"{ID}.0000.rec"]
    journal.append(ID, 1, note(1))
    assert len(journal.read(ID)) == 2


def test_fsync_reaches_file_and_directory(tmp_path, monkeypatch):
    synced, real = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(Path(f"/proc/self/fd/{fd}").readlink()), real(fd)))
    Journal(tmp_path).append(ID, 0, note(0))
    assert synced == []
    Journal(tmp_path, fsync=True).append(ID, 1, note(1))
    assert [path.name.startswith(LOG_PREFIX) or path.name for path in synced] == [True, tmp_path.name]


@pytest.mark.parametrize("one_machine", [False, True])
def test_many_records_of_many_trajectories_lie_in_few_files(tmp_path, monkeypatch, one_machine):
    monkeypatch.setattr(journal_module, "MOST_RECORDS", 10)
    writer, reader = Journal(tmp_path, one_machine=one_machine), Journal(tmp_path)
    for quantum in range(4):
        for sample in range(8):
            writer.append(f"train-0-0-{sample}", quantum, note((sample, quantum)))
            if quantum == 2:  # a reader between two appends sees what is committed then, and later the rest
                assert len(reader.read(f"train-0-0-{sample}")) == 3
    assert len({path.stat().st_ino for path in tmp_path.iterdir()}) == 4
    assert len([path for path in tmp_path.iterdir() if path.name.startswith(LOG_PREFIX)]) == 1
    for one in (reader, Journal(tmp_path)):
        for sample in reversed(range(8)):
            assert one.read(f"train-0-0-{sample}") == [note((sample, q)) for q in range(4)]
    assert open_logs(tmp_path) == one_machine
    writer.close()
    assert open_logs(tmp_path) == 0
    sweep_logs(tmp_path)
    for sample in range(8):
        writer.remove(f"train-0-0-{sample}")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("one_machine", [False, True])
def test_a_reader_forgets_logs_that_are_read_no_more(tmp_path, monkeypatch, one_machine):
    monkeypatch.setattr(journal_module, "MOST_RECORDS", 10)
    monkeypatch.setattr(journal_module, "KEPT_LOOKUPS", 40)
    writer, reader = Journal(tmp_path), Journal(tmp_path, one_machine=one_machine)
    for number in range(150):
        trajectory = f"train-{number}-0-0"
        writer.append(trajectory, 0, note(number))
        assert reader.read(trajectory) == [note(number)]
        assert reader.trajectories() == {trajectory, "train-0-0-0"}
        assert reader.read("train-0-0-0") == [note(0)]  # its log is read on, and kept
        if number:
            writer.remove(trajectory)
    assert (0 < open_logs(tmp_path) < 8) == one_machine
    reader.close()
    assert open_logs(tmp_path) == 0
    assert reader.read("train-0-0-0") == [note(0)]
    reader.close()


def test_a_reader_that_keeps_logs_open_follows_a_name_to_another_log(tmp_path):
    reader, first, second = (Journal(tmp_path, one_machine=True) for _ in range(3))
    first.append(ID, 0, note("first"))
    first.append(ID, 1, note("first"))
    second.append("train-0-0-9", 0, note("second"))
    assert [record.detail for record in reader.read(ID)] == ["first", "first"]
    first.remove(ID)
    assert reader.read(ID) == []
    second.append(ID, 0, note("second, of another draw"))
    second.append(ID, 1, note("second, again"))
    assert [record.detail for record in reader.read(ID)] == ["second, of another draw", "second, again"]


@pytest.mark.parametrize("one_machine", [False, True])
def test_a_frame_whose_link_failed_is_overwritten_and_never_read(tmp_path, one_machine):
    loser, winner, reader = Journal(tmp_path, one_machine=one_machine), Journal(tmp_path), Journal(tmp_path)
    loser.append(ID, 0, note("loser"))
    assert len(reader.read(ID)) == 1
    winner.append(ID, 1, note("winner"))
    with pytest.raises(RecordExists):
        loser.append(ID, 1, note("loser" + "x" * 500))
    loser.append("train-0-1-3", 0, note("loser, short"))
    loser.append("train-0-1-3", 1, note("loser, after"))
    for one in (reader, Journal(tmp_path)):
        assert [record.detail for record in one.read(ID)] == ["loser", "winner"]
        assert [record.detail for record in one.read("train-0-1-3")] == ["loser, short", "loser, after"]


@given(
    steps=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(0, 300)), max_size=40),
    read_bytes=st.sampled_from([1, 64, journal_module._READ_BYTES]),
)
def test_writers_and_readers_in_any_order_agree_with_a_dict(tmp_path_factory, steps, read_bytes):
    with patch.object(journal_module, "_READ_BYTES", read_bytes):  # records longer than what is read at first
        agree_with_a_dict(tmp_path_factory.mktemp("journal"), steps)


def agree_with_a_dict(root, steps):
    writers, readers = ([Journal(root, one_machine=n > 0) for n in range(count)] for count in (3, 2))
    model = {}
    for writer, sample, size in steps:
        name = f"train-0-0-{sample}"
        done = model.setdefault(name, [])
        writers[writer].append(name, len(done), action(writer, np.zeros(0), "x" * size))
        done.append((writer, size))
        if done[:-1]:
            with pytest.raises(RecordExists):
                writers[(writer + 1) % 3].append(name, len(done) - 1, note(""))
        found = readers[size % 2].read(name)
        assert [(record.turn, len(record.returns[0].content)) for record in found] == done
    for each in writers:
        each.close()


@pytest.mark.parametrize(("trajectory", "quantum"), [("../x", 0), ("", 0), ("a/b", 0), (".hidden", 0), (ID, -1)])
def test_a_name_that_would_leave_the_journal_is_refused(tmp_path, trajectory, quantum):
    with pytest.raises(StoreError, match="got"):
        Journal(tmp_path).append(trajectory, quantum, note(""))
    assert names(tmp_path) == []

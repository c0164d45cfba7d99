"""Lines arrive whole and in order; a log in parts reads as one file, while it is written and after a kill at any step."""

from __future__ import annotations

import errno
import gzip
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from libra.errors import StoreError
from libra.facts import Line, OpenGate, PolicySnapshot, WorkerLost, from_dict
from libra.store import event_log
from libra.store.event_log import EventLog, EventReader, from_last_snapshot, lines_of, read_events, segments_of


def _gate(number):
    return Line("demo", float(number), OpenGate(iteration=number, reason="because"))


def _snapshot(number):
    return Line("demo", float(number), PolicySnapshot("fifo", "", {"arrivals": number}, {}))


@pytest.fixture(autouse=True)
def _small_segments(monkeypatch):
    monkeypatch.setattr(event_log, "SEGMENT_BYTES", 200)


def _write(path, parts):
    """Parts of nine gates behind a snapshot each; returns the number of lines."""
    with EventLog(path) as log:
        for part in range(parts):
            log.rotate()
            log.write(_snapshot(part))
            for number in range(9):
                log.write(_gate(number))
    return 10 * parts


def _as_user(path):
    """What the documentation has a user type."""
    command = f"zcat -f '{event_log.segments_directory(path)}'/* '{path}'"
    return subprocess.run(command, shell=True, check=True, capture_output=True).stdout.splitlines(keepends=True)


@pytest.mark.live
def test_a_log_in_parts_is_the_log_in_one_file(tmp_path, monkeypatch):
    path, whole = tmp_path / "events.jsonl", tmp_path / "whole.jsonl"
    count = _write(path, 7)
    monkeypatch.setattr(event_log, "SEGMENT_BYTES", 10**9)
    _write(whole, 7)
    assert [segment.packed.is_file() and not segment.plain.exists() for segment in segments_of(path)] == [True] * 6
    assert _as_user(path) == whole.read_bytes().splitlines(keepends=True)
    assert read_events(path) == read_events(whole)
    assert list(EventReader(path).raw()) == list(enumerate(_as_user(path), 1))
    for line in (1, 10, 11, 15, 60, 61, 70, 71):  # first and last lines of parts among them
        assert [number for number, _ in EventReader(path, line=line)] == list(range(line, count + 1))


def test_reading_from_a_line_opens_no_part_before_it(tmp_path):
    path = tmp_path / "events.jsonl"
    _write(path, 5)
    for segment in segments_of(path)[:3]:
        segment.packed.write_bytes(b"damaged")
    assert len(list(EventReader(path, line=31))) == 20
    reader = from_last_snapshot(path)
    assert reader is not None and [number for number, _ in reader] == list(range(41, 51))
    with pytest.raises(StoreError, match=r"000000001-000000010.jsonl.gz.*--from-snapshot"):
        read_events(path)
    with EventLog(path) as log:  # the last snapshot is then in an older part
        log.rotate()
        log.write(_gate(0))
    reader = from_last_snapshot(path)
    assert reader is not None and [number for number, _ in reader] == list(range(41, 52))


def test_a_log_without_parts_is_read_and_becomes_the_first_part(tmp_path):
    path = tmp_path / "events.jsonl"
    with EventLog(path) as log:
        for number in range(50):
            log.write(_gate(number))
    assert not event_log.segments_directory(path).exists()
    assert len(read_events(path).events) == 50
    _write(path, 1)
    assert [(segment.first, segment.last) for segment in segments_of(path)] == [(1, 50)]
    assert len(read_events(path).events) == 60


def test_a_missing_or_short_part_is_named_with_its_lines(tmp_path):
    path = tmp_path / "events.jsonl"
    _write(path, 4)
    second, third = segments_of(path)[1:]
    third.packed.write_bytes(gzip.compress(b"{}\n" * 4))
    with pytest.raises(StoreError, match="ends with line 24"):
        read_events(path)
    second.packed.unlink()
    with pytest.raises(StoreError, match="lines 11 to 20"):
        read_events(path)
    with EventLog(path) as log:  # a run goes on, and what is newer is read
        log.rotate()
        log.write(_gate(40))
    assert [number for number, _ in EventReader(path, line=31)] == list(range(31, 42))
    assert len(list(lines_of(path, OpenGate))) == 9 + 9 + 1  # and whatever can be read, by those who repair


KILLED = """
import os, pathlib, signal, sys
from libra.facts import Line, OpenGate
from libra.store import event_log
event_log.SEGMENT_BYTES = 200
path, step = pathlib.Path(sys.argv[1]), sys.argv[2]

def die(*arguments, **named):
    os.kill(os.getpid(), signal.SIGKILL)

log = event_log.EventLog(path)
for number in range(30):
    log.write(Line("demo", float(number), OpenGate(number, "because")))
match step:
    case "close": pathlib.Path.rename = die
    case "empty the file": pathlib.Path.rename = lambda self, target: os.rename(self, target) if self == path else die()
    case "compress": event_log.Segment.compress = die
    case "end to compress": event_log.gzip.compress = die
    case "rename": os.fsync = die
    case "remove the plain one": event_log.sync_directory = die
log.rotate()
log.close()
"""
STEPS = ("close", "empty the file", "compress", "end to compress", "rename", "remove the plain one")


@pytest.mark.live
def test_a_kill_before_any_step_of_closing_a_part_loses_nothing_and_repeats_nothing(tmp_path):
    logs = {step: tmp_path / step / "events.jsonl" for step in STEPS}
    commands = [[sys.executable, "-c", KILLED, str(path), step] for step, path in logs.items()]
    assert [process.wait() for process in map(subprocess.Popen, commands)] == [-signal.SIGKILL] * len(STEPS)
    for path in logs.values():
        assert [event["iteration"] for event in read_events(path).events] == list(range(30))
        with EventLog(path) as log:  # the next writer finishes
            log.write(_gate(30))
            log.rotate()
        assert [event["iteration"] for event in read_events(path).events] == list(range(31))
        assert len(_as_user(path)) == 31
        assert all(found.name.endswith(".gz") for found in (path.parent / "events").iterdir())
        assert sorted(found.name for found in path.parent.iterdir()) == ["events", "events.jsonl"]


def test_a_reader_sees_each_line_once_while_parts_are_closed_and_compressed(tmp_path):
    path, done = tmp_path / "events.jsonl", threading.Event()
    with EventLog(path) as log:
        log.write(_gate(0))

    def write():
        with EventLog(path) as log:
            for number in range(1, 400):
                log.write(_gate(number))
                if number % 5 == 0:
                    log.rotate()
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    looks = 0
    while not done.is_set():
        events = read_events(path).events
        assert [event["iteration"] for event in events] == list(range(len(events)))
        looks += 1
    writer.join()
    assert looks and len(read_events(path).events) == 400
    assert len(segments_of(path)) > 30


def test_a_writer_whose_log_was_taken_over_closes_no_part(tmp_path):
    path = tmp_path / "events.jsonl"
    old, new = EventLog(path), EventLog(path)
    for number in range(10):
        new.write(_gate(number))
    new.rotate()
    for number in range(10, 20):
        new.write(_gate(number))
        old.write(_gate(100 + number))
    new.flush()
    old.rotate()
    old.close()
    new.close()
    assert [event["iteration"] for event in read_events(path).events] == list(range(20))


def test_a_close_that_was_cut_short_loses_no_line_written_since(tmp_path, monkeypatch):
    path = tmp_path / "events.jsonl"
    with EventLog(path) as log:
        for number in range(3):
            log.write(_gate(number))
        with monkeypatch.context() as patch:
            patch.setattr(Path, "rename", lambda *names: (_ for _ in ()).throw(OSError(28, "No space left on device")))
            log.rotate()
        log.write(_gate(3))
        log.rotate()
        log.write(_gate(4))
    assert [event["iteration"] for event in read_events(path).events] == list(range(5))
    assert [(segment.first, segment.last) for segment in segments_of(path)] == [(1, 4)]


def test_a_part_that_cannot_be_made_is_no_end_of_the_log(tmp_path, caplog, monkeypatch):
    path = tmp_path / "events.jsonl"
    with EventLog(path) as log:
        for number in range(10):
            log.write(_gate(number))
        with monkeypatch.context() as patch:
            patch.setattr(Path, "rename", lambda *names: (_ for _ in ()).throw(PermissionError("not here")))
            log.rotate()
        log.write(_gate(10))
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", lambda descriptor: (_ for _ in ()).throw(OSError(28, "No space left on device")))
            log.rotate()
            log.write(_gate(11))
            log.close()
    assert "goes on without a new segment" in caplog.text and "stays uncompressed" in caplog.text
    assert [event["iteration"] for event in read_events(path).events] == list(range(12))
    assert [segment.plain.exists() for segment in segments_of(path)] == [True]


def test_events_and_lines_come_back_in_order(tmp_path):
    path = tmp_path / "run" / "events.jsonl"
    with EventLog(path) as log:
        log.write(_gate(0))
        log.write_line('{"schema":1,"name":"custom","t_s":1.0}')
        log.flush()
        log.flush()
        log.write(Line("demo", 2.0, WorkerLost("tcp://w0")))
        for iteration in range(2000):  # more than the buffer holds
            log.write(_gate(iteration))
        assert 3 < len(read_events(path).events) < 2003
    events, torn = read_events(path)
    assert torn is None
    assert [event["name"] for event in events][:3] == ["gate_opened", "custom", "worker_lost"]
    assert [event["iteration"] for event in events[3:]] == list(range(2000))
    assert from_dict(events[0]) == _gate(0)


@pytest.mark.parametrize("tail", [b'{"schema":1,"na', b"\xff\xfe", b"x" * 200_000])
def test_a_torn_last_line_is_reported_and_cut_by_the_next_writer(tmp_path, caplog, tail):
    path = tmp_path / "events.jsonl"
    with EventLog(path) as log:
        log.write(_gate(0))
    path.write_bytes(path.read_bytes() + tail)
    events, torn = read_events(path)
    assert [event["iteration"] for event in events] == [0]
    assert torn == tail.decode(errors="replace")
    assert "torn" in caplog.text
    with EventLog(path) as log:
        log.write(_gate(1))
    assert read_events(path).torn is None
    assert [event["iteration"] for event in read_events(path).events] == [0, 1]


@pytest.mark.parametrize("line", [b"{not json}", b"[1]"])
def test_a_bad_line_in_the_middle_is_an_error_with_its_number(tmp_path, line):
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"name":"a"}\n' + line + b'\n{"name":"b"}\n')
    with pytest.raises(StoreError, match="line 2"):
        read_events(path)


def test_a_full_disk_is_named_and_the_lines_wait_for_space(tmp_path, monkeypatch):
    log = EventLog(tmp_path / "events.jsonl")
    log.write(_gate(0))
    real = os.write

    def half(fd, data):
        if len(data) < 20:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, data[: len(data) // 2])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", half)
        with pytest.raises(StoreError, match="disk full"):
            log.flush()
    assert read_events(log.path) == ([], None)
    log.close()
    assert len(read_events(log.path).events) == 1

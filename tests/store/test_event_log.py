"""Lines arrive whole and in order; a torn last line is left out and said."""

import errno
import os

import pytest

from libra.errors import StoreError
from libra.facts import Line, OpenGate, WorkerLost, from_dict
from libra.store.event_log import EventLog, read_events


def _gate(iteration):
    return Line("demo", float(iteration), OpenGate(iteration, "because"))


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

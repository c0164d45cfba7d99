"""What the benchmark of the start reads off a terminal and an event log; the runs themselves are in tests/first_hour."""

from __future__ import annotations

import gzip
import sys
from pathlib import Path

import pytest

from benchmarks.pseudo_terminal import Terminal, lines_after, screen
from benchmarks.start import Watched, log_size, stages_of

LIVE = "\x1b[1mr\x1b[0m 0 of 9\r\n \x1b[32mtable\x1b[0m"


@pytest.mark.parametrize(
    ("before", "after", "lines"),
    [
        ("start: libraries", "^C\r\x1b[Klibra: one\r\n", ["libra: one"]),  # written over the line that grew
        ("start: libraries", "^C\r\nlibra: one\r\n", ["libra: one"]),
        (LIVE, f"^C\r\x1b[2K\x1b[1A\x1b[2K{LIVE}\r\nlibra: a\r\nlibra: b\r\n", ["libra: a", "libra: b"]),
        ("a line\r\n", "", []),
        ("a line\r\n", "^C\r\x1b[Klibra: a\r\n\r\n", ["libra: a"]),
    ],
)
def test_lines_after_a_key_are_those_that_a_reader_sees(before: str, after: str, lines: list[str]) -> None:
    assert lines_after(before, before + after) == lines


def test_a_screen_has_what_is_left_after_rewriting() -> None:
    assert screen("one\r\ntwo\x1b[1A\r\x1b[2KONE\r\n\x1b[1mTwo\x1b[0m") == ["ONE", "Two"]


def test_stages_are_read_with_their_seconds() -> None:
    assert stages_of("r: 3 iterations\r\nstart: libraries 1.9 s, model 0.2 s, workers 2.0 s\r\n") == {
        "libraries": 1.9,
        "model": 0.2,
        "workers": 2.0,
    }
    assert stages_of("nothing") == {}


def test_an_event_log_is_followed_up_to_its_last_whole_line(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    watched = Watched(path)
    assert not watched.has("run_started")
    path.write_text('{"name": "run_started"}\n{"name": "trajectory_ended", "key": "train-0-0-0"}\n{"name": "step_fi')
    assert watched.has("run_started") and not watched.has("step_finished")
    with path.open("a") as file:
        file.write('nished"}\n')
    assert watched.has("step_finished")
    path.write_text('{"name": "batch_opened"}\n')  # older lines were moved
    assert watched.has("batch_opened") and watched.has("run_started")


def test_the_size_of_a_log_has_its_segments(tmp_path: Path) -> None:
    lines = [f'{{"name": "trajectory_ended", "key": "train-0-0-{i}"}}\n' for i in range(3)]
    (tmp_path / "events").mkdir()
    segment = gzip.compress("".join(lines[:2]).encode())
    (tmp_path / "events" / "0-1.jsonl.gz").write_bytes(segment)
    (tmp_path / "events.jsonl").write_text(lines[2] + '{"name": "run_started"}\n')
    assert log_size(tmp_path) == (len(segment) + (tmp_path / "events.jsonl").stat().st_size, 3)


def test_ctrl_c_of_a_terminal_reaches_the_command(tmp_path: Path) -> None:
    code = "import sys, time\ntry:\n    print('ready', flush=True)\n    time.sleep(60)\nexcept KeyboardInterrupt: sys.exit(7)"
    with Terminal([sys.executable, "-c", code], tmp_path) as process:
        process.wait_for(lambda: "ready\r\n" in process.text, 60.0)
        assert process.first_s is not None and process.first_s > 0
        process.press_ctrl_c()
        assert process.wait(60.0) == 7


def test_what_does_not_happen_is_an_error_with_the_output(tmp_path: Path) -> None:
    with (
        Terminal([sys.executable, "-c", "print('something else')"], tmp_path) as process,
        pytest.raises(TimeoutError, match="something else"),
    ):
        process.wait_for(lambda: "never" in process.text, 60.0)

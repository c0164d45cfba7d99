"""Progress of a start and of a run, on a terminal and in a pipe, with a console and a clock of our own."""

import io
import logging
import math
import re
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from libra.observe.progress import RunProgress, StartStages, sparkline

URL = "http://127.0.0.1:8787/libra"


def values(iteration, **changes):
    return {
        "iteration": iteration, "reward": 0.25 + 0.1 * iteration, "tokens_per_s": 12345.6, "lag": 0.5, "loss": -0.01234,
        "grad_norm": 0.456, "iteration_s": 3.21, "rollout_s": 2.0, "train_s": 1.1, "turns": 3.25, "failures": 4,
    } | changes  # fmt: skip


def pipe():
    return Console(file=io.StringIO(), force_terminal=False, width=80)


def test_nothing_to_learn_is_told_once_with_its_cause_and_when_it_ends():
    console = pipe()
    with RunProgress("demo", 4, URL, console=console, clock_s=lambda: 0.0) as progress:
        none = "all 4 rewards are 0"
        for k, cause in enumerate(["", none, "", none, none, none, none, "", none]):
            progress.iteration(values(k, no_signal=cause, groups_without_signal=2 * bool(cause)))
    told = [line for line in console.file.getvalue().splitlines() if "to learn" in line]
    assert told == [
        "iteration 1: nothing to learn: all 4 rewards are 0",
        "iteration 5: nothing to learn, 3 iterations in a row: all 4 rewards are 0",
        "iteration 7: something to learn again, after 4 without",
    ]


def terminal(width=120):
    return Console(file=io.StringIO(), force_terminal=True, width=width, height=40, _environ={"TERM": "xterm"})


def screen(raw, height=60):
    """Lines that a terminal would show after these bytes: carriage return, cursor up, erase line; colours dropped."""
    lines, row, col = [""], 0, 0
    for token in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|[\r\n]|[^\x1b\r\n]+", raw):
        if token == "\r":
            col = 0
        elif token == "\n":
            row, col = row + 1, 0
            if row == len(lines):
                lines.append("")
        elif token.startswith("\x1b["):
            count = int(re.sub(r"\D", "", token) or 1)
            if token.endswith("A"):
                row = max(0, row - count)
            elif token.endswith("K"):
                lines[row] = ""
        else:
            lines[row] = lines[row][:col].ljust(col) + token + lines[row][col + len(token) :]
            col += len(token)
    return [line.rstrip() for line in lines]


def test_pipe_has_one_line_a_second_and_always_the_first_and_the_last():
    now, console = [0.0], pipe()
    with RunProgress("demo", 20, URL, console=console, clock_s=lambda: now[0]) as progress:
        for iteration in range(20):
            now[0] += 0.3
            progress.iteration(values(iteration))
    lines = console.file.getvalue().splitlines()
    assert lines[0] == f"demo: 20 iterations, watch them at {URL}"
    shown = [int(re.match(r"iteration (\d+) ", line)[1]) for line in lines[1:]]
    assert shown == [0, 4, 8, 12, 16, 19]
    assert lines[1] == (
        "iteration 0 (1 of 20): reward 0.250, tokens/s 12,346, lag 0.50, turns 3.2, failures 4, iteration s 3.2, "
        "rollout s 2.0, train s 1.1, loss -0.0123, grad norm 0.456"
    )
    assert "\x1b" not in console.file.getvalue()


def test_pipe_says_the_newest_iteration_when_the_run_breaks_off():
    console = pipe()

    def interrupted():
        with RunProgress("demo", 9, URL, console=console, clock_s=lambda: 0.0) as progress:
            for iteration in range(3):
                progress.iteration(values(iteration))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert [line[:11] for line in console.file.getvalue().splitlines()[1:]] == ["iteration 0", "iteration 2"]


def test_disabled_writes_nothing():
    for console in (pipe(), terminal()):
        with RunProgress("demo", 2, URL, enabled=False, console=console) as progress:
            progress.message("m")
            progress.evaluated("v", 0.5, 1)
            progress.iteration(values(0))
        assert console.file.getvalue() == ""


def test_terminal_ends_with_messages_above_and_the_last_rows_below():
    now, console = [0.0], terminal()
    with RunProgress("demo", 12, URL, console=console, clock_s=lambda: now[0], refreshes_per_s=0) as progress:
        progress.evaluated("version 0", 0.4, 256)
        for iteration in range(12):
            now[0] += 10.0
            progress.iteration(values(iteration))
            if iteration == 5:
                sys.stdout.write("a print from elsewhere\n")
        progress.message("checkpoint written")
    left = [line for line in screen(console.file.getvalue()) if line]
    assert left[:4] == [
        f"demo: 12 iterations, watch them at {URL}",
        "evaluation, version 0: mean reward 0.400 on 256 held-out questions",
        "a print from elsewhere",
        "checkpoint written",
    ]
    assert left[4].startswith("demo ")
    assert left[4].endswith("12 of 12 iterations in 2:00")
    assert "0.250 to 1.350" in left[5]
    assert "▁" in left[5]
    assert "█" in left[5]
    assert left[6].split()[:4] == ["iteration", "reward", "tokens/s", "lag"]
    assert [line.split()[0] for line in left[7:]] == [str(i) for i in range(4, 12)]
    assert left[-1].split() == ["11", "1.350", "12,346", "0.50", "3.2", "4", "3.2", "2.0", "1.1", "-0.0123", "0.456"]


def test_no_line_is_wider_than_the_terminal():
    console = terminal(80)
    with RunProgress("demo", 12, URL, console=console, clock_s=lambda: 0.0, refreshes_per_s=0) as progress:
        for iteration in range(12):
            progress.iteration(values(iteration))
    lines = screen(console.file.getvalue())
    assert max(map(len, lines)) <= 80
    assert not any("…" in line for line in lines)


def test_log_records_go_above_the_table_and_handlers_are_given_back(monkeypatch):
    console = terminal()
    stderr = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stderr)
    handler = logging.StreamHandler()  # to stderr, as distributed's is
    logger = logging.getLogger("libra.test.progress")
    monkeypatch.setattr(logger, "handlers", [handler])
    with RunProgress("demo", 2, URL, console=console, clock_s=lambda: 0.0, refreshes_per_s=0) as progress:
        logger.warning("engine restarted")
        progress.iteration(values(0))
    lines = [line for line in screen(console.file.getvalue()) if line]
    assert lines[1] == "engine restarted"
    assert lines[2].startswith("demo ")
    assert stderr.getvalue() == ""
    assert handler.stream is stderr


@given(st.lists(st.floats(-10, 10) | st.just(math.nan), max_size=50))
def test_sparkline_has_a_character_per_value_and_keeps_their_order(series):
    steps = "abcdefgh"
    line = sparkline(series, steps)
    assert len(line) == len(series)
    drawn = sorted((value, char) for value, char in zip(series, line, strict=True) if not math.isnan(value))
    assert [char for _, char in drawn] == sorted(char for _, char in drawn)
    assert all((char == " ") == math.isnan(value) for value, char in zip(series, line, strict=True))
    if len({value for value, _ in drawn}) > 1:
        assert {"a", "h"} <= set(line)


def test_an_iteration_says_how_far_it_is_on_a_terminal():
    now, console = [0.0], terminal()
    with RunProgress("demo", 4, URL, console=console, clock_s=lambda: now[0], refreshes_per_s=0) as progress:
        progress.part("evaluation of version 0", 64)
        for second in range(1, 9):
            now[0] = float(second)
            progress.counted(8 * second, 500 * second)
        progress.part("iteration 0", 128)  # what ended before does not count
        now[0] = 10.0
        progress.counted(64 + 32, 4000 + 3000)
        progress.message("drawn anew")
    shown = screen(console.file.getvalue())
    assert any("iteration 0: 32 of 128 trajectories have ended, " in line for line in shown)
    # A sixteenth of the run is done.
    assert any("0 of 4 iterations in 0:10, about 2:30 to go" in line for line in shown)


def test_the_rate_is_of_the_last_seconds():
    now, console = [0.0], pipe()
    with RunProgress("demo", 4, URL, console=console, clock_s=lambda: now[0]) as progress:
        progress.part("iteration 0", 10)
        tokens = 0
        for second in range(62):
            now[0] = float(second)
            tokens += 1000 if second < 40 else 10
            progress.counted(second // 10, tokens)
    assert "10 tokens/s" in console.file.getvalue().splitlines()[-1]


def test_a_long_iteration_in_a_pipe_has_a_line_every_half_minute():
    now, console = [0.0], pipe()
    with RunProgress("demo", 2, URL, console=console, clock_s=lambda: now[0]) as progress:
        progress.part("iteration 0", 100)
        for second in range(1, 130):
            now[0] = float(second)
            progress.counted(second, 100 * second, training="training for 9 s")
    assert console.file.getvalue().splitlines()[1:] == [
        "iteration 0: 30 of 100 trajectories have ended, 100 tokens/s, about 2:50 to go",
        "iteration 0: 60 of 100 trajectories have ended, 100 tokens/s, about 2:20 to go",
        "iteration 0: 90 of 100 trajectories have ended, 100 tokens/s, about 1:50 to go",
        "iteration 0: training for 9 s; all 100 trajectories have ended, about 2:00 to go",
    ]


@pytest.mark.parametrize(
    ("is_terminal", "fails", "written"),
    [
        (False, False, "demo: 3 iterations\nstart: model 0.2 s\nstart: workers 2.0 s\n"),
        (True, False, "demo: 3 iterations\nstart: model 0.2 s, workers 2.0 s\n"),
        (False, True, "demo: 3 iterations\nstart: model 0.2 s\n"),  # a stage that failed has no seconds
        (True, True, "demo: 3 iterations\nstart: model 0.2 s, workers\n"),
    ],
)
def test_stages_of_a_start_are_lines_of_a_pipe_and_one_that_grows_on_a_terminal(is_terminal, fails, written):
    stream, now = io.StringIO(), [0.0]
    stream.isatty = lambda: is_terminal
    with StartStages(enabled=True, stream=stream, clock_s=lambda: now[0]) as stages:
        stages.say("demo: 3 iterations")
        for stage, seconds in (("model", 0.25), ("workers", 2.0)):
            stages.begin(stage)
            now[0] += seconds
        if fails:
            stages.end(failed=True)
    assert stream.getvalue() == written

"""Ctrl-C as a user types it: `libra run` under a terminal of its own, once and twice, while it starts and while it runs.

The lines below the last one before the key are counted: at most three, the last of them what to type.
"""

import json
import os
import sys

import psutil
import pytest

from benchmarks.live.pseudo_terminal import Terminal, lines_after
from libra.config import dump_config

LIMIT_S = 800.0
"""After this a process that does not do what is waited for fails its test; nothing waits that long."""

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]


@pytest.fixture
def libra_run(make_config, tmp_path):
    config = make_config(run={"iterations": 100_000, "dir": "runs"}, observe={"progress": False, "trackers": []})
    (tmp_path / "run.yaml").write_text(dump_config(config))
    return [sys.executable, "-m", "libra", "run", "run.yaml"]


SHOWN = "observe.progress=true"


def terminal(command, directory, repository):
    path = os.pathsep.join(filter(None, (str(repository), os.environ.get("PYTHONPATH"))))
    return Terminal(command, directory, {"PYTHONPATH": path})


def logged(events, name):
    return events.exists() and f'"{name}"' in events.read_text()


def test_ctrl_c_in_a_run_says_in_three_lines_how_to_continue_it(libra_run, tmp_path, repository):
    events = tmp_path / "runs" / "demo" / "events.jsonl"
    with terminal(libra_run, tmp_path, repository) as process:
        process.wait_for(lambda: logged(events, "step_finished"), LIMIT_S)
        before = process.text
        process.press_ctrl_c()
        assert process.wait(LIMIT_S) == 130
        lines = lines_after(before, process.text)
    assert len(lines) == 3, process.text
    assert lines[0] == "libra: interrupted, stopping the run; Ctrl-C again: at once"
    assert "of 100000 iterations; what is committed is kept" in lines[1]
    assert lines[2] == "libra resume runs/demo"
    assert (tmp_path / "runs/demo/logs/driver.log").exists()
    with terminal([sys.executable, "-m", *lines[2].split(), SHOWN], tmp_path, repository) as again:
        again.wait_for(lambda: "of 100000 iterations in" in again.text, LIMIT_S)  # the live table
        before = again.text
        again.press_ctrl_c()
        again.wait_for(lambda: "stopping the run" in again.text, LIMIT_S)
        again.press_ctrl_c()
        assert again.wait(LIMIT_S) == 130
        lines = lines_after(before, again.text)
    assert "Traceback" not in again.text
    first = next(i for i, line in enumerate(lines) if line.startswith("libra:"))  # the table may have grown by a row
    told = lines[first:]
    assert len(told) == 3, again.text
    assert told[0].startswith("libra: interrupted, stopping the run")
    assert told[1].startswith("libra: stopped at once after")
    assert told[2] == f"libra resume runs/demo {SHOWN}"


@pytest.mark.parametrize("stage", ["libraries", "workers"])
def test_ctrl_c_in_the_start_is_one_line_or_says_how_to_go_on(libra_run, tmp_path, repository, stage):
    with terminal([*libra_run, SHOWN], tmp_path, repository) as process:
        process.wait_for(lambda: stage in process.text, LIMIT_S)
        before = process.text
        process.press_ctrl_c()
        assert process.wait(LIMIT_S) == 130
        lines = lines_after(before, process.text)
    run = tmp_path / "runs" / "demo"
    if stage == "libraries":
        assert lines == ["libra: interrupted during the start, which left no run"], process.text
        assert not run.exists()
    else:
        assert len(lines) <= 3, process.text
        assert lines[-1] == "libra resume runs/demo"
        assert json.loads((run / "starts.jsonl").read_text().splitlines()[0])["epoch"] == 0


def test_nothing_of_a_killed_driver_is_left(libra_run, tmp_path, repository):
    with terminal(libra_run, tmp_path, repository) as process:
        process.wait_for(lambda: logged(tmp_path / "runs/demo/events.jsonl", "quantum_finished"), LIMIT_S)
        before = process.text
        started = psutil.Process(process.process.pid).children(recursive=True)
        process.process.kill()
        process.wait(LIMIT_S)
        _, left = psutil.wait_procs(started, LIMIT_S)
        assert lines_after(before, process.text) == []
    assert len(started) >= 5, "a resource tracker, a fork server, three workers"
    assert left == []

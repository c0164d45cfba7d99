"""Ctrl-C in a program of `libra.train`: no traceback where nobody catches it, and the exception where somebody does. In the
midst of a run: tests/core/test_durability.py."""

import signal
import subprocess
import sys

import pytest

pytestmark = pytest.mark.live

SCRIPT = """
import signal, sys
from pathlib import Path
from libra.driver.run_console import Interruption

def train():
    with Interruption(overrides=("run.iterations=100", "observe.trackers=[a, b]")) as interruption:
        interruption.of(Path("runs/demo"), "libra resume runs/demo")
        signal.raise_signal(signal.SIGINT)

"""


@pytest.mark.parametrize(("program", "begun", "status", "last"), [
    ("train()", True, -signal.SIGINT, "libra resume runs/demo run.iterations=100 'observe.trackers=[a, b]'"),
    ("train()", False, -signal.SIGINT, "libra: interrupted during the start, which left no run"),
    ("try: train()\nexcept KeyboardInterrupt: pass\n1 / 0", True, 1, "ZeroDivisionError: division by zero"),
    ("try: train()\nexcept KeyboardInterrupt: pass\nsignal.raise_signal(2)", True, -2, "KeyboardInterrupt"),
])  # fmt: skip
def test_the_end_of_a_program_that_ctrl_c_reaches(program, begun, status, last, tmp_path):
    if begun:
        (tmp_path / "runs/demo").mkdir(parents=True)
        (tmp_path / "runs/demo/starts.jsonl").touch()
    command = [sys.executable, "-c", SCRIPT + program]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert (ended.returncode, ended.stderr.splitlines()[-1]) == (status, last)
    assert ("Traceback" in ended.stderr) == (program != "train()")

"""Ctrl-C in a program of `libra.train`: no traceback where nobody catches it, and the exception where somebody does."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from libra.driver.interruption import Interruption, resume_words
from libra.driver.start_records import STARTS_FILE

SCRIPT = """
import signal, sys
from pathlib import Path
from libra.driver.interruption import Interruption

def train():
    with Interruption() as interruption:
        interruption.of(Path("runs/demo"), "libra resume runs/demo")
        signal.raise_signal(signal.SIGINT)

"""


def ending_of(program: str) -> tuple[int, str]:
    """Exit status and standard error of a program that Ctrl-C reaches, as in a terminal; in a shell's background it is ignored."""
    before = signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a child inherits that it is ignored, and nothing else
    try:
        ended = subprocess.run([sys.executable, "-c", SCRIPT + program], capture_output=True, text=True, timeout=120)
    finally:
        signal.signal(signal.SIGINT, before)
    return ended.returncode, ended.stderr


@pytest.mark.parametrize("begun", [True, False])
def test_an_interruption_that_nobody_catches_has_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begun: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    if begun:
        (tmp_path / "runs/demo").mkdir(parents=True)
        (tmp_path / "runs/demo/starts.jsonl").touch()
    status, told = ending_of("train()")
    assert status == -signal.SIGINT  # as a shell's 130
    assert told.splitlines()[-1] == (
        "libra resume runs/demo" if begun else "libra: interrupted during the start, which left no run"
    )
    assert "Traceback" not in told and "KeyboardInterrupt" not in told


def test_who_catches_it_gets_it_and_other_errors_keep_their_traceback() -> None:
    status, told = ending_of("try: train()\nexcept KeyboardInterrupt as error: print('caught', file=sys.stderr)\n1 / 0")
    assert status == 1
    assert "caught\n" in told and "ZeroDivisionError" in told
    status, told = ending_of(
        "try: train()\nexcept KeyboardInterrupt: pass\ntry: train()\nexcept KeyboardInterrupt: pass\nsignal.raise_signal(2)"
    )
    assert "Traceback" in told and "KeyboardInterrupt" in told  # one of the program's own


def test_settings_that_a_resumed_run_was_given_are_typed_again(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / STARTS_FILE).write_text("")
    interruption = Interruption(overrides=("run.iterations=100", "observe.trackers=[a, b]"))
    interruption.of(tmp_path, resume_words(tmp_path, given=False))
    interruption._say_end("stopped")
    last = capfd.readouterr().err.splitlines()[-1]
    assert last == f"libra resume {tmp_path} run.iterations=100 'observe.trackers=[a, b]'"

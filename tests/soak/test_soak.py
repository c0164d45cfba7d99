"""Five cases of ``make soak``: whoever is killed, whenever, nothing is lost and nothing done twice."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CASES = {0: "driver", 1: "scheduler", 4: "tool-0", 12: "train-0", 28: "rollout-0"}
"""Seed and victim; see `Case.of_seed`."""


@pytest.mark.timeout(200)
@pytest.mark.parametrize("seed", CASES, ids=list(CASES.values()))
def test_a_killed_run_is_resumed_to_the_end(seed: int) -> None:
    command = [sys.executable, str(Path(__file__).with_name("case.py")), str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert f"victim='{CASES[seed]}'" in done.stdout

"""One kill of each kind that needs no Slurm: no wrong update, and nothing consumed twice; ``kills.py`` has all of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SEEDS = {0: "core", 1: "engine", 2: "fetch", 3: "hybrid"}


@pytest.mark.timeout(400)
def test_runs_go_on_past_kills_as_if_nothing_had_happened() -> None:
    command = [sys.executable, str(Path(__file__).with_name("kills.py")), "--seed", *map(str, SEEDS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {"passed": dict.fromkeys(SEEDS.values(), 1), "failed_seeds": []}

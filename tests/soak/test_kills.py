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


@pytest.mark.parametrize(
    ("name", "changed"), [("digest", "b"), ("loss", 0.25), ("grad_norm", 2.0), ("action_tokens", 7), ("sequences", 3)]
)
def test_a_step_that_is_another_is_found(name: str, changed: object) -> None:
    step = {"digest": "a", "loss": 0.5, "grad_norm": 1.0, "action_tokens": 8, "sequences": 4}
    for other, code in ((step, 0), (step | {name: changed}, 1)):
        program = f"import kills; kills.check_steps([{step}, {step}], [{step}, {other}])"
        done = subprocess.run(
            [sys.executable, "-c", program], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
        )
        assert done.returncode == code, done.stderr
        assert code == 0 or f"AssertionError: step 1: {name}" in done.stderr

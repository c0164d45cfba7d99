"""One moment of each kind of victim of `make soak` and `make kills`: nothing is lost, nothing done twice, no update wrong."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1200)]


def done(script, *arguments):
    command = [sys.executable, str(Path(__file__).with_name(script)), *map(str, arguments)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout[-8000:] + ended.stderr[-2000:]
    return ended.stdout


def test_a_run_whose_driver_scheduler_workers_nanny_and_disk_are_struck_ends_as_an_undisturbed_one():
    said = done("case.py", "--together", 8, *range(8))
    for victim in ("driver", "scheduler", "train-0", "rollout-0", "tool-0", "nanny of", "stopped"):
        assert victim in said, said


def test_engines_that_turn_lose_nothing_where_the_trainer_is_killed_in_a_return():
    assert "train-0" in done("case.py", "--turning", 11)


def test_a_core_killed_in_the_sum_and_a_hybrid_killed_in_its_gradient_change_no_update():
    said = done("kills.py", "--seed", 0, 3).splitlines()[-1]
    assert json.loads(said) == {"passed": {"core": 1, "hybrid": 1}, "failed_seeds": []}

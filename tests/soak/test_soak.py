"""Twenty moments of ``make soak`` in one run: whatever is struck, whenever, nothing is lost and nothing done twice.

The twenty have every stage and every kind of victim at least twice (see `case.py`), among them what five runs that were killed once
covered here before: driver, scheduler, training, rollout and tool worker.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SEEDS = range(20)
CASE = Path(__file__).with_name("case.py")

OF_ALL = """
import json, case
print(json.dumps([vars(case.Case.of_seed(seed).moments[0]) for seed in range(200)]))
"""


@pytest.mark.timeout(1200)
def test_a_run_that_is_struck_at_twenty_moments_ends_as_an_undisturbed_one() -> None:
    command = [sys.executable, str(CASE), "--together", str(len(SEEDS)), *map(str, SEEDS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


def test_the_seeds_have_every_stage_with_every_victim() -> None:
    done = subprocess.run([sys.executable, "-c", OF_ALL], cwd=CASE.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    moments = json.loads(done.stdout)
    workers, stages = {"train-0", "rollout-0", "tool-0"}, {moment["stage"] for moment in moments}
    assert len(stages) == 7
    killed = {(m["stage"], m["victim"].split()[0]) for m in moments if not m["stop_s"]}
    assert killed == {(s, victim) for s in stages for victim in ("driver", "scheduler", *workers, "nanny", "disk")}
    assert {m["victim"] for m in moments if m["stop_s"]} == {"driver", "scheduler", *workers}
    assert {m["victim"] for m in moments if m["victim"].startswith("nanny")} == {f"nanny of {name}" for name in workers}
    of_the_test = [moments[seed] for seed in SEEDS]
    assert {m["stage"] for m in of_the_test} == stages
    assert {"driver", "scheduler", "disk", *workers} <= {m["victim"] for m in of_the_test}
    assert any(m["stop_s"] for m in of_the_test) and any(m["victim"].startswith("nanny") for m in of_the_test)


@pytest.mark.timeout(900)
def test_engines_that_turn_lose_nothing_where_driver_and_trainer_are_killed_in_a_wave_and_in_a_return() -> None:
    command = [sys.executable, str(CASE), "--turning", "--together", "2", "2", "11"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert "driver before slice" in done.stdout and "train-0" in done.stdout

"""Wrong input to real processes: what they print, their exit code, and that nothing is left; programs without a file."""

import os
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]

TRAIN = """
import libra

def reward(completion: str) -> float:
    return 0.0

libra.train(prompts=["a", "b"], reward=reward, cluster__dashboard_port=0)
"""
GUARDED = TRAIN.replace("libra.train(", 'if __name__ == "__main__":\n    libra.train(')
CELL = """
import asyncio, libra

def reward(completion: str) -> float:
    return float(len(completion))

async def cell() -> None:
    summary = libra.train(
        prompts=["1", "2"], reward=reward, run__iterations=1, trainer__prompts=1, trainer__group_size=2,
        rollout__max_new_tokens=2, rollout__slots=2, cluster__threads=1, cluster__dashboard_port=0, run__name="cell",
    )
    print(len(summary.iterations), "iteration")

asyncio.run(cell())
"""


def python(here, repository, *arguments, stdin=""):
    """A Python process in ``here`` that imports this checkout."""
    settings = os.environ | {"PYTHONPATH": str(repository)}
    return subprocess.run(
        [sys.executable, *arguments], input=stdin, capture_output=True, text=True, cwd=here, env=settings, timeout=550, check=False
    )  # fmt: skip


def test_a_program_without_a_guard_is_told_where_to_put_one(tmp_path, repository):
    (tmp_path / "train.py").write_text(TRAIN)
    done = python(tmp_path, repository, "train.py")
    assert done.returncode != 0
    assert "train.py, line 7" in done.stderr
    assert 'if __name__ == "__main__":' in done.stderr
    assert done.stderr.count("Traceback") == 1, "of this program, and of no worker"
    assert not (tmp_path / "runs").exists()


def test_a_program_from_standard_input_is_told_to_be_a_file(tmp_path, repository):
    done = python(tmp_path, repository, "-", stdin=GUARDED)
    assert done.returncode != 0
    assert "<stdin>" in done.stderr
    assert "python train.py" in done.stderr
    assert done.stderr.count("Traceback") == 1
    assert not (tmp_path / "runs").exists()


def test_a_program_with_a_guard_gets_past_it(tmp_path, repository):
    (tmp_path / "train.py").write_text(GUARDED.replace("cluster__dashboard_port=0", "model='./gone'"))
    assert "'./gone'" in python(tmp_path, repository, "train.py").stderr


def test_a_cell_of_a_notebook_trains(tmp_path, repository):
    """A notebook's main module has no file, and its event loop runs while a cell does."""
    done = python(tmp_path, repository, "-c", CELL)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "1 iteration"

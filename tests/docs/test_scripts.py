"""Whole scripts of the pages run as they are, and learn: with the model that ships, without a network."""

import os
import re
import subprocess
import sys

import pytest

from libra.observe.metrics import read_metrics

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]


@pytest.mark.parametrize(("page", "first"), [("README.md", "import random"), ("docs/agents.md", "# train.py")])
def test_a_script_as_it_stands_on_a_page_learns(page, first, repository, tmp_path):
    (script,) = re.findall(rf"^```python\n({first}.*?)^```", (repository / page).read_text(), re.M | re.S)
    (tmp_path / "script.py").write_text(script)
    environment = {**os.environ, "PYTHONPATH": str(repository), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "script.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    assert "iterations of libra/tiny-arithmetic (0.5 M parameters" in done.stdout.splitlines()[0]
    (run,) = (tmp_path / "runs").iterdir()
    rewards = [row["reward"] for row in read_metrics(run) if "reward" in row]
    assert len(rewards) == 6 and rewards[-1] > rewards[0] + 0.2

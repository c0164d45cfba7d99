"""What all tests share: one thread per process, no network, the same Hypothesis examples on every machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

for _name, _value in {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
}.items():
    os.environ.setdefault(_name, _value)

# No deadline: the machine is shared. Derandomised: a red build is the change's doing, not the day's.
settings.register_profile("libra", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("libra")


@pytest.fixture(scope="session")
def repository() -> Path:
    """Root of the repository."""
    return Path(__file__).resolve().parent.parent

"""The process of a vLLM engine, and the worker that started it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from libra.rollout.vllm_settings import PARENT, is_installed

END = "from libra.rollout.vllm_scheduler import _die_with_parent; _die_with_parent(); print('lives')"


@pytest.mark.skipif(not is_installed(), reason="vllm is not installed here: make setup-vllm")
@pytest.mark.parametrize(("parent", "output", "code"), [(os.getpid(), "lives\n", 0), (1, "", -signal.SIGKILL)])
def test_an_engine_whose_worker_died_while_the_model_loaded_ends(parent: int, output: str, code: int) -> None:
    """Its parent is then another process than the one that started it."""
    environment = {**os.environ, PARENT: str(parent)}
    engine = subprocess.run(
        [sys.executable, "-c", END], env=environment, stdout=subprocess.PIPE, text=True, check=False
    )
    assert (engine.stdout, engine.returncode) == (output, code)

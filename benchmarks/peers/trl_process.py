"""TRL's environment, and its process that takes training steps on command.

Invariants
----------
1. Nothing replaces the torch of that environment: it is installed first and constrained afterwards.
2. An existing environment is used only if it was created from exactly the same requirements.
3. The child's tokens are counted; a step with another number of tokens is an error.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks.peers import even_words as task
from libra.errors import LibraError

TRL_ENVIRONMENT = Path.home() / ".cache" / "libra" / "trl"
TORCH = "torch==2.13.0"
TRL = "trl==1.16.*"
FORBIDDEN = ("torchvision", "torchaudio")
TOKENS_PER_STEP = task.PROMPTS_PER_STEP * task.GROUP_SIZE * task.NEW_TOKENS
Step = dict[str, float]
"""Numbers of one step by name, seconds where the name ends in ``_s``."""


class SideError(LibraError, RuntimeError):
    """One side of the comparison could not start, stopped, or did other work than requested."""


def trl_python(environment: Path) -> Path:
    """Python of TRL's environment, which is created if it does not exist (a few minutes).

    torch is installed first and constrained after, so that nothing replaces it.
    """
    wanted = [TORCH, TRL, f"transformers=={importlib.metadata.version('transformers')}"]
    python = environment / "bin" / "python"
    done = environment / "made-of.txt"
    if done.exists() and done.read_text().split() == wanted:
        return python
    say(f"making TRL's environment ({', '.join(wanted)}) ...")
    if not python.exists():
        _install([sys.executable, "-m", "venv", str(environment)])
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    _install([*pip, TORCH])
    constraints = environment / "constraints.txt"
    constraints.write_text(TORCH + "\n")
    _install([*pip, "--constraint", str(constraints), *wanted[1:]])
    listed = subprocess.run([*pip[:3], "list", "--format=json"], capture_output=True, text=True, check=True).stdout
    versions = {package["name"]: package["version"] for package in json.loads(listed)}
    unwanted = [name for name in FORBIDDEN if name in versions]
    if unwanted or not versions["torch"].startswith(TORCH.removeprefix("torch==")):
        raise SideError(
            f"TRL's environment has torch {versions['torch']} and {unwanted}; remove its directory, run again"
        )
    done.write_text("\n".join(wanted))
    return python


def _install(command: list[str]) -> None:
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    if finished.returncode:
        raise SideError(
            f"TRL's environment: {' '.join(command[1:])} failed with status {finished.returncode}:\n"
            f"{finished.stderr[-2000:]}\nIs a package index in reach? --trl-env DIR takes an environment made before"
        )


class TrlSide:
    """A child process with TRL's trainer, which takes steps on command; a context manager."""

    def __init__(self, python: Path, model_dir: Path, log: Path, *, threads: int, seed: int) -> None:
        self.log = log
        self.steps_taken: list[Step] = []
        with log.open("w") as errors:
            self._child = subprocess.Popen(
                [
                    str(python), str(Path(__file__).with_name("trl_side.py")), f"--model={model_dir}",
                    f"--threads={threads}", f"--seed={seed}",
                ],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
                env=os.environ
                | {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"},
            )  # fmt: skip

    def __enter__(self) -> Self:
        try:
            self.versions: dict[str, Any] = self._answer()["ready"]
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _answer(self) -> dict[str, Any]:
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if not line:
            status = self._child.wait()
            raise SideError(
                f"TRL's process ended with status {status}; its last words:\n{self.log.read_text()[-3000:]}"
            )
        answer: dict[str, Any] = json.loads(line)
        return answer

    def step_seconds(self, steps: int) -> float:
        assert self._child.stdin is not None
        self._child.stdin.write(json.dumps({"steps": steps}) + "\n")
        self._child.stdin.flush()
        taken: list[Step] = self._answer()["steps"]
        check_tokens("TRL", [step["completion_tokens"] for step in taken])
        self.steps_taken += taken
        return statistics.fmean(step["step_s"] for step in taken)

    def close(self) -> None:
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._child.stdin.close()
        try:
            self._child.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        self._child.stdout.close()


def check_tokens(side: str, generated: list[float]) -> None:
    wrong = [int(number) for number in generated if number != TOKENS_PER_STEP]
    if wrong:
        raise SideError(
            f"{side}: a step generated {wrong[0]} tokens instead of {TOKENS_PER_STEP}; the sides are not comparable"
        )


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)

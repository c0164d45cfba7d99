"""Seconds per GRPO step, TRL over Libra.

Both sides train the same saved model (random Qwen3, 2.4 M parameters, float32) on the same kind of
prompts: 16 prompts x 8 samples a step, 21 prompt tokens, exactly 32 new tokens, one AdamW step, one
turn, the same number of torch threads. TRL 1.16 has an environment of its own, created once, and
its fastest settings (`trl_side`, `README.md`). Libra runs its whole stack at eta 0.

1. Both sides are started once and warmed up, then take blocks of steps in turns; while one works,
   the other uses no CPU.
2. A side's seconds are wall time of its block over its steps. For Libra that counts the first
   step's submission.
3. Every step of both sides must generate 16 x 8 x 32 tokens. ``step_time_ratio``: median over pairs
   of TRL's over Libra's.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

from benchmarks.peers import even_words as task
from benchmarks.report import Figure, alternate, command_parser, emit
from libra.config import config_from_dict
from libra.driver.run_session import Session
from libra.envs import FunctionEnvironment
from libra.errors import LibraError

TRL_ENVIRONMENT = Path.home() / ".cache" / "libra" / "trl"
TORCH = "torch==2.13.0"
TRL = "trl==1.16.*"
FORBIDDEN = ("torchvision", "torchaudio")
TOKENS_PER_STEP = task.PROMPTS_PER_STEP * task.GROUP_SIZE * task.NEW_TOKENS


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

    def __exit__(self, *error: object) -> None:
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
        taken: list[dict[str, float]] = self._answer()["steps"]
        check_tokens("TRL", [step["completion_tokens"] for step in taken])
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


GOAL = 1.25
CONTEXT_TOKENS = 64
ROW_TOKENS = 160
"""Two sequences of 53 tokens to a packed row, whose masked attention grows quadratically."""
MICRO_BATCH_TOKENS = 2048
"""A smaller micro-batch than the default of 4,096 stays in the cache."""
WARM_UP_STEPS = 2


class LibraSide:
    """A started Libra run on a local cluster, stepped in blocks; a context manager."""

    def __init__(self, model_dir: Path, runs_dir: Path, *, threads: int, seed: int, steps: int, block: int) -> None:
        config = config_from_dict(
            {
                "run": {"name": "vs_trl", "dir": str(runs_dir), "seed": seed, "iterations": steps, "eta": 0},
                "model": {"path": str(model_dir), "dtype": "float32"},
                "rollout": {
                    "slots": task.PROMPTS_PER_STEP * task.GROUP_SIZE, "max_new_tokens": task.NEW_TOKENS,
                    "max_turns": 1, "max_context_tokens": CONTEXT_TOKENS, "temperature": task.TEMPERATURE,
                },
                "trainer": {
                    "prompts": task.PROMPTS_PER_STEP, "group_size": task.GROUP_SIZE, "lr": task.LEARNING_RATE,
                    "adam_args": {"betas": list(task.BETAS), "max_grad_norm": task.MAX_GRAD_NORM},
                    "loss_args": {"clip_low": task.CLIP_LOW, "clip_high": task.CLIP_HIGH}, "max_row_tokens": ROW_TOKENS,
                    "micro_batch_tokens": MICRO_BATCH_TOKENS,
                },
                "evaluation": {"prompts": 1, "every": block}, "cluster": {"threads": threads, "dashboard_port": 0},
                "observe": {"progress": False},
            }
        )  # fmt: skip
        questions = [task.question(index) for index in range(steps * task.PROMPTS_PER_STEP)]
        environment = FunctionEnvironment(
            prompts=questions, reward=even_words, eval_prompts=[task.question(-1)], seed=seed
        )
        self.block = block
        self._session = Session(config, environment=environment)
        self._iterations: Iterator[dict[str, Any]] = iter(())

    def __enter__(self) -> Self:
        self._session.__enter__()
        self._iterations = self._session.iterations()
        return self

    def __exit__(self, *error: Any) -> None:
        self._session.__exit__(*error)

    def step_seconds(self, steps: int) -> float:
        if steps % self.block:
            raise SideError(
                f"Libra: {steps} steps are no whole blocks of {self.block}; something would be left running"
            )
        began_s = time.perf_counter()
        taken = [next(self._iterations) for _ in range(steps)]
        spent_s = time.perf_counter() - began_s
        check_tokens("Libra", [step["generated_tokens"] for step in taken])
        return spent_s / steps


def even_words(completion: str) -> float:
    return task.reward(completion)


def compare(options: argparse.Namespace, python: Path, model_dir: Path, scratch: Path) -> dict[str, Figure]:
    block = options.steps
    with (
        TrlSide(python, model_dir, scratch / "trl.log", threads=options.threads, seed=options.seed) as trl,
        LibraSide(
            model_dir,
            scratch / "runs",
            threads=options.threads,
            seed=options.seed,
            steps=block * (options.pairs + 1),
            block=block,
        ) as libra,
    ):
        print(f"TRL's side: {trl.versions}")
        trl.step_seconds(max(WARM_UP_STEPS, block))
        libra.step_seconds(block)
        measured = alternate(lambda: trl.step_seconds(block), lambda: libra.step_seconds(block), pairs=options.pairs)
    print("seconds per step, TRL {:.3f}, Libra {:.3f}".format(*measured.medians))
    return {"step_time_ratio": Figure(measured.ratio, "ratio", "higher", GOAL)}


def main(arguments: list[str] | None = None) -> None:
    parser = command_parser("vs_trl", __doc__, pairs=7)
    parser.add_argument("--steps", type=int, default=3, help="steps in a block (default 3)")
    parser.add_argument(
        "--threads", type=int, default=os.cpu_count(), help="torch threads of each side (default: cores)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trl-env", type=Path, default=TRL_ENVIRONMENT, help="where TRL's environment is, or is made")
    options = parser.parse_args(arguments)
    for name, least in (("steps", 1), ("threads", 1)):
        if getattr(options, name) < least:
            parser.error(f"--{name}: got {getattr(options, name)}; it is at least {least}, type --{name} {least}")
    python = trl_python(options.trl_env.absolute())
    with tempfile.TemporaryDirectory(prefix="vs_trl-") as name:
        scratch = Path(name)
        parameters = task.save_model(scratch / "model", seed=options.seed)
        say(
            f"{parameters / 1e6:.2f} M parameters; {TOKENS_PER_STEP} new tokens a step; {options.threads} threads a side"
        )
        figures = compare(options, python, scratch / "model", scratch)
    emit("vs_trl", figures, arguments=arguments, as_json=options.json)

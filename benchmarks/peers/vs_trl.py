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
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks.peers import even_words as task
from benchmarks.peers.trl_process import (
    TOKENS_PER_STEP,
    TRL_ENVIRONMENT,
    SideError,
    Step,
    TrlSide,
    check_tokens,
    say,
    trl_python,
)  # fmt: skip
from benchmarks.report import Figure, alternate, command_parser, emit
from libra.config import config_from_dict
from libra.driver.session import Session
from libra.envs import FunctionEnvironment

GOAL = 1.25
CONTEXT_TOKENS = 64
ROW_TOKENS = 160
"""Two sequences of 53 tokens to a packed row: masked attention grows with the square of its length."""
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
                    "betas": list(task.BETAS), "weight_decay": 0.0, "max_grad_norm": task.MAX_GRAD_NORM,
                    "clip_low": task.CLIP_LOW, "clip_high": task.CLIP_HIGH, "max_row_tokens": ROW_TOKENS,
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
        self.steps_taken: list[Step] = []
        self._session = Session(config, environment=environment)
        self._iterations: Iterator[dict[str, Any]] = iter(())

    def __enter__(self) -> Self:
        self._session.__enter__()
        self._iterations = self._session.iterations()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._session.__exit__(kind, error, trace)

    def step_seconds(self, steps: int) -> float:
        if steps % self.block:
            raise SideError(
                f"Libra: {steps} steps are no whole blocks of {self.block}; something would be left running"
            )
        began_s = time.perf_counter()
        taken = [next(self._iterations) for _ in range(steps)]
        spent_s = time.perf_counter() - began_s
        check_tokens("Libra", [step["generated_tokens"] for step in taken])
        self.steps_taken += taken
        return spent_s / steps


def even_words(completion: str) -> float:
    return task.reward(completion)


def _median(steps: list[Step], name: str) -> float:
    return statistics.median(step[name] for step in steps)


def trl_split(steps: list[Step]) -> str:
    parts = {"generate": "generate_s", "reward and advantage": "score_s", "loss and optimizer": "train_s"}
    return ", ".join(f"{name} {_median(steps, column):.3f}" for name, column in parts.items())


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
        trl.steps_taken.clear()
        libra.steps_taken.clear()
        measured = alternate(
            lambda: trl.step_seconds(block), lambda: libra.step_seconds(block), pairs=options.pairs,
            after_pair=lambda i, a, b: say(f"pair {i}: TRL {a:.3f} s, Libra {b:.3f} s, ratio {a / b:.3f}"),
        )  # fmt: skip
    trl_s, libra_s = measured.medians
    print(
        f"TRL: {trl_s:.3f} s per step ({trl_split(trl.steps_taken)}); reward {_median(trl.steps_taken, 'reward'):.3f}"
    )
    parts = [name for name in ("train_s", "publish_s", "store_s") if name in libra.steps_taken[0]]
    split = ", ".join(f"{name.removesuffix('_s')} {_median(libra.steps_taken, name):.3f}" for name in parts)
    print(f"Libra: {libra_s:.3f} s per step ({split}); reward {_median(libra.steps_taken, 'reward'):.3f}")
    print(f"ratios of {len(measured.ratios)} pairs: {', '.join(f'{ratio:.3f}' for ratio in measured.ratios)}")
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

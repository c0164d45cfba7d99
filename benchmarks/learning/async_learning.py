"""Cost of asynchrony in reward: the quick start's model at several staleness bounds.

Runs in one process and in emulated time (`benchmarks.learning.async_loop`), 8 prompts x 8 samples a
step at a learning rate of 2e-4. A step takes ``--step-ticks`` passes of the engines, which is less
than a rollout: with a bound above 0 the trainer never waits, and tokens are as old as the bound
allows. Runs with a bound above 0 have ``staleness.over_age=correct``, old log-probabilities of the
trainer, and tokens weighed by the ratio to the engine's, with ``staleness.versions`` many and one.

``final_reward_gap_se``: how far the held-out reward of eta 0 is above a corrected run's at
most, over eta up to 4 and both kinds of versions, in standard errors of the difference of means
over seeds (of six that are 0 in truth the largest is about 1).

``length_bias_whole_groups`` (``--part length``, frozen weights, eta 2, groups wait for their batch):
generated tokens of what was trained on over the tokens of all that began, less 1.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.report import QUICKSTART, Figure, command_parser, emit, gap_se

QUESTIONS = 128
CORRECTED = ("staleness.over_age=correct", "trainer.old_logp=proximal", "trainer.correction=truncate")
SIZES = ("trainer.prompts=8", "trainer.group_size=8", "trainer.lr=2e-4")


class Curve(NamedTuple):
    """One run: ``versions`` is empty at eta 0."""

    eta: int
    versions: str
    seed: int
    steps: int
    step_ticks: int

    @property
    def name(self) -> str:
        return f"eta {self.eta}, {self.versions}" if self.eta else "eta 0"


def loop_of(overrides: Iterable[str], seed: int, steps: int, step_ticks: int, directory: str) -> Any:
    from benchmarks.learning.async_loop import Loop, LoopSettings
    from libra.config import load_config
    from libra.envs.tool_arithmetic import ToolArithmetic

    config = load_config(QUICKSTART, [*SIZES, f"run.seed={seed}", *overrides])
    environment = ToolArithmetic(timeout_rate=0.0, seed=seed)
    return Loop(config, environment, Path(directory), LoopSettings(steps, step_ticks=step_ticks))


def final_reward(curve: Curve) -> float:
    """Held-out reward after the last step."""
    overrides = [f"run.eta={curve.eta}"]
    if curve.eta:
        overrides += [*CORRECTED, f"staleness.versions={curve.versions}"]
    with tempfile.TemporaryDirectory() as directory:
        loop = loop_of(overrides, curve.seed, curve.steps, curve.step_ticks, directory)
        asyncio.run(loop.run())
        return float(asyncio.run(loop.evaluate(QUESTIONS)))


def curves_of(options: Any) -> list[Curve]:
    kinds = [(eta, versions) for versions in ("many", "one") for eta in sorted(options.etas) if eta]
    kinds = [(0, "")] * (0 in options.etas) + kinds
    return [Curve(*kind, seed, options.steps, options.step_ticks) for kind in kinds for seed in range(options.seeds)]


def curve_figures(found: dict[Curve, float]) -> dict[str, Figure]:
    kinds: dict[tuple[int, str], list[float]] = {}
    for curve, reward in found.items():
        kinds.setdefault((curve.eta, curve.name), []).append(reward)
    base, gaps = kinds.get((0, "eta 0"), []), list[float]()
    for (eta, name), rewards in kinds.items():
        words = f"{name}, {len(rewards)} seeds: reward {statistics.fmean(rewards):.3f}"
        if eta and min(len(base), len(rewards)) > 1:
            gap = gap_se(base, rewards)
            gaps += [gap] if eta <= 4 else []
            words += f"; {gap:+.2f} SE below eta 0"
        print(words, flush=True)
    return {"final_reward_gap_se": Figure(max(gaps), "standard errors", "lower", goal=1.0)} if gaps else {}


def length_bias(steps: int) -> Figure:
    eta = 2
    with tempfile.TemporaryDirectory() as directory:
        overrides = ["trainer.lr=0", f"run.eta={eta}", "staleness.over_age=wait"]
        result = asyncio.run(loop_of(overrides, 0, steps, 20, directory).run())
    last = steps - 2 - 2 * eta  # iterations whose groups are all in a batch
    tokens = {tid: count for count, tid in result.ended if tid.iteration <= last}
    trained = [tokens[tid] for ids in result.trained_ids for tid in ids if tid in tokens]
    bias = statistics.fmean(trained) / statistics.fmean(tokens.values()) - 1
    return Figure(abs(bias), "share", "lower", goal=1e-9)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command_parser("async_learning", __doc__)
    parser.add_argument("--part", nargs="+", choices=("curves", "length"), default=["curves", "length"])
    parser.add_argument("--etas", type=int, nargs="+", default=[0, 1, 2, 4, 8])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--step-ticks", type=int, default=60)
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args(arguments)
    figures: dict[str, Figure] = {}
    if "curves" in options.part:
        curves, found = curves_of(options), dict[Curve, float]()
        os.environ["OMP_NUM_THREADS"] = "1"  # of the processes that run the curves
        with ProcessPoolExecutor(options.processes) as pool:
            for curve, result in zip(curves, pool.map(final_reward, curves), strict=True):
                found[curve] = result
                print(f"{curve.name}, seed {curve.seed}: reward {result:.3f}", flush=True)
        figures |= curve_figures(found)
    if "length" in options.part:
        figures["length_bias_whole_groups"] = length_bias(max(8, options.steps // 2))
    emit("async_learning", figures, arguments=arguments, as_json=options.json)

"""Cost of asynchrony in reward and gain in time: the quick start's model at several staleness
bounds.

Learning curves are of whole runs in one process and in emulated time
(`benchmarks.learning.async_loop`), 8 prompts x 8 samples a step at a learning rate of 2e-4. A step
takes ``--step-ticks`` passes of the engines, which is less than a rollout: with a bound above 0 the
trainer never waits, and tokens are as old as the bound allows.

``correct``: ``staleness.over_age=correct``, old log-probabilities of the trainer, tokens weighed by
the ratio to the engine's. ``drop``: the same, and groups over age are dropped. ``none``: nothing is
weighed. ``one``, ``many``: ``staleness.versions``.

``final_reward_gap_se``: how far the held-out reward of eta 0 is above a corrected run's at
most, over eta up to 4 and both kinds of versions, in standard errors of the difference of means
over seeds (of six that are 0 in truth the largest is about 1). ``time_to_reward_ratio_eta1``,
``..._eta4``: ticks until the last 256 trajectories had a mean reward of 0.8, over eta 0
(corrected, many; a run that did not reach it counts with its last tick).

``--part length``, with frozen weights: generated tokens of what was trained on over the tokens of all
that began, less 1. ``length_bias_first_samples``, ``..._first_groups``: a step takes the samples,
or groups, that are complete first of twice as many. ``length_bias_dropped``: groups over age are
dropped at eta 1. ``length_bias_whole_groups``: groups wait for their batch, eta 2.
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

REWARD, WINDOW, QUESTIONS = 0.8, 256, 128
CORRECTED = ("trainer.old_logp=proximal", "trainer.correction=truncate")
HOW = {
    "correct": ("staleness.over_age=correct", *CORRECTED),
    "drop": ("staleness.over_age=drop", *CORRECTED),
    "none": ("trainer.old_logp=proximal",),
}
SIZES = ("trainer.prompts=8", "trainer.group_size=8", "trainer.lr=2e-4")


class Curve(NamedTuple):
    """One run: ``how`` and ``versions`` are empty at eta 0."""

    eta: int
    how: str
    versions: str
    seed: int
    steps: int
    step_ticks: int

    @property
    def name(self) -> str:
        return f"eta {self.eta}, {self.how}, {self.versions}" if self.eta else "eta 0"


class Shown(NamedTuple):
    """Final held-out reward, ticks until the reward (or the last tick), mean lag, share that
    counted."""

    final_reward: float
    ticks: float
    lag: float
    kept_frac: float


def loop_of(overrides: Iterable[str], seed: int, steps: int, step_ticks: int, directory: str) -> Any:
    from benchmarks.learning.async_loop import Loop, LoopSettings
    from libra.config import load_config
    from libra.envs.tool_arithmetic import ToolArithmetic

    config = load_config(QUICKSTART, [*SIZES, f"run.seed={seed}", *overrides])
    environment = ToolArithmetic(timeout_rate=0.0, seed=seed)
    return Loop(config, environment, Path(directory), LoopSettings(steps, step_ticks=step_ticks))


def shown(curve: Curve) -> Shown:
    overrides = [f"run.eta={curve.eta}"]
    if curve.eta:
        overrides += [*HOW[curve.how], f"staleness.versions={curve.versions}"]
    with tempfile.TemporaryDirectory() as directory:
        loop = loop_of(overrides, curve.seed, curve.steps, curve.step_ticks, directory)
        found = asyncio.run(loop.run())
        final = asyncio.run(loop.evaluate(QUESTIONS))
    of_all = curve.steps * loop.config.trainer.prompts * loop.config.trainer.group_size
    ticks = min(found.ticks_to(REWARD, WINDOW), float(found.published[-1]))
    return Shown(final, ticks, statistics.fmean(found.lags), sum(map(len, found.trained_ids)) / of_all)


def curves_of(options: Any) -> list[Curve]:
    made: list[Curve] = []
    fixed = (options.steps, options.step_ticks)
    for how in options.how:
        for seed in range(options.seeds if how == "correct" else options.other_seeds):
            made += [Curve(eta, how, v, seed, *fixed) for v in ("many", "one") for eta in sorted(options.etas) if eta]
    return [Curve(0, "", "", seed, *fixed) for seed in range(options.seeds) if 0 in options.etas] + made


def curve_figures(found: dict[Curve, Shown]) -> dict[str, Figure]:
    kinds: dict[str, list[Shown]] = {}
    for curve, result in found.items():
        kinds.setdefault(curve.name, []).append(result)
    base, figures, gaps, ratios = kinds.get("eta 0", []), dict[str, Figure](), dict[str, float](), dict[str, float]()
    for name, runs in kinds.items():
        rewards, ticks, lags, kept = map(list, zip(*runs, strict=True))
        reward, tick, lag, share = map(statistics.fmean, (rewards, ticks, lags, kept))
        words = f"{name}, {len(runs)} seeds: reward {reward:.3f}, ticks {tick:.0f}, lag {lag:.2f}, kept {share:.3f}"
        if base and name != "eta 0":
            ratios[name] = tick / statistics.fmean(run.ticks for run in base)
            if min(len(base), len(runs)) > 1:
                gaps[name] = gap_se([run.final_reward for run in base], rewards)
                words += f"; {gaps[name]:+.2f} SE below eta 0"
        print(words, flush=True)
    bounded = [gap for name, gap in gaps.items() if "correct" in name and int(name.split()[1].strip(",")) <= 4]
    if bounded:
        figures["final_reward_gap_se"] = Figure(max(bounded), "standard errors", "lower", goal=1.0)
    for eta in (1, 4):
        if f"eta {eta}, correct, many" in ratios:
            figures[f"time_to_reward_ratio_eta{eta}"] = Figure(ratios[f"eta {eta}, correct, many"], "ratio", "lower")
    return figures


def length_figures(steps: int) -> dict[str, Figure]:
    def run(overrides: Sequence[str], step_ticks: int = 40) -> Any:
        with tempfile.TemporaryDirectory() as directory:
            return asyncio.run(loop_of(["trainer.lr=0", *overrides], 0, steps, step_ticks, directory).run())

    def relative(taken: Sequence[int], all_of: Sequence[int]) -> float:
        return statistics.fmean(taken) / statistics.fmean(all_of) - 1

    iterations: dict[int, list[tuple[int, int, int]]] = {}  # tick, group, tokens
    for tick, _, tokens, tid in run(["trainer.prompts=16"]).ended:
        iterations.setdefault(tid.iteration, []).append((tick, tid.group, tokens))
    samples, groups, everything = [], [], []
    for ended in iterations.values():
        everything += [tokens for _, _, tokens in ended]
        samples += [tokens for _, _, tokens in sorted(ended)[: len(ended) // 2]]
        complete = sorted((max(tick for tick, g, _ in ended if g == group), group) for group in range(16))
        first = {group for _, group in complete[:8]}
        groups += [tokens for _, group, tokens in ended if group in first]

    def trained(over_age: str, eta: int) -> float:
        result = run([f"run.eta={eta}", f"staleness.over_age={over_age}"], step_ticks=20)
        last = steps - 2 - 2 * eta  # iterations whose groups are all in a batch
        tokens = {tid: tokens for _, _, tokens, tid in result.ended if tid.iteration <= last}
        return relative([tokens[t] for ids in result.trained_ids for t in ids if t in tokens], list(tokens.values()))

    values = {
        "length_bias_first_samples": relative(samples, everything),
        "length_bias_first_groups": relative(groups, everything),
        "length_bias_dropped": trained("drop", 1),
    }
    figures = {name: Figure(value, "share", "higher") for name, value in values.items()}
    return figures | {"length_bias_whole_groups": Figure(abs(trained("wait", 2)), "share", "lower", goal=1e-9)}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command_parser("async_learning", __doc__)
    parser.add_argument("--part", nargs="+", choices=("curves", "length"), default=["curves", "length"])
    parser.add_argument("--etas", type=int, nargs="+", default=[0, 1, 2, 4, 8])
    parser.add_argument("--how", nargs="+", choices=tuple(HOW), default=list(HOW), help="curves with a bound above 0")
    parser.add_argument("--seeds", type=int, default=5, help="of eta 0 and of corrected runs")
    parser.add_argument("--other-seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--step-ticks", type=int, default=60)
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args(arguments)
    figures: dict[str, Figure] = {}
    if "curves" in options.part:
        curves, found = curves_of(options), dict[Curve, Shown]()
        os.environ["OMP_NUM_THREADS"] = "1"  # of the processes that run the curves
        with ProcessPoolExecutor(options.processes) as pool:
            for curve, result in zip(curves, pool.map(shown, curves), strict=True):
                found[curve] = result
                print(f"{curve.name}, seed {curve.seed}: {result}", flush=True)
        figures |= curve_figures(found)
    if "length" in options.part:
        figures |= length_figures(max(8, options.steps // 2))
    emit("async_learning", figures, arguments=arguments, as_json=options.json)

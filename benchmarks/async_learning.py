"""What asynchrony costs in reward and saves in time: the quick start's model at several staleness bounds.

Learning curves are of whole runs in one process and in emulated time (`benchmarks.async_loop`: real engines, replica, admission and
staleness policy; no Dask), of 8 prompts x 8 samples a step at a learning rate of 2e-4. A step takes ``--step-ticks`` passes of the
engines, which is less than a rollout: with a bound above 0 the trainer never waits, and tokens are as old as the bound allows.

* ``correct``: ``staleness.over_age=correct``, old log-probabilities of the trainer at the start of a step, tokens weighed by the
  ratio to the engine's (``trainer.correction=truncate``). ``drop``: the same, and groups over age are dropped. ``none``:
  nothing is weighed, and batches wait for what would be over age.
* ``one``, ``many``: ``staleness.versions``.

Figures: ``final_reward_gap_se``, how far the held-out reward of eta 0 is above that of a corrected run at most, over eta up to 4
and both kinds of versions, in standard errors of the difference between the means over seeds; ``time_to_reward_ratio_eta1`` and
``..._eta4``, ticks until the last 256 trajectories had a mean reward of 0.8, over those of eta 0 (corrected, many; a run that did
not reach it counts with its last tick, and is named). ``final_reward_gap_se`` is the largest of up to six differences: of six
that are 0 in truth the largest is about 1.

``length``: with weights that do not change, the generated tokens of a trajectory that was trained on over those of all that
began, less 1. ``length_bias_first_samples`` and ``..._first_groups``: a step takes the samples, or the groups, that are complete
first of twice as many, and the rest is thrown away. ``length_bias_dropped``: groups over age are dropped at eta 1.
``length_bias_whole_groups``: groups are completed and wait for their batch (``over_age=wait``), eta 2.

``live``: wall seconds of real runs of the quick start (Dask, worker processes) until the last 256 trajectories of its batches
(the last two of them) had a mean reward of 0.8, eta 0, 1 and 4 in turn: ``live_time_ratio_eta1``, ``..._eta4``, medians over
``--live-seeds``. On two cores trainer and engine share them, so this is what is left of the gain where nothing is added; ``--set``
gives overrides to all runs.

``python -m benchmarks.async_learning [--part curves length live] [--etas 0 1 2 4 8] [--seeds 5] [--how correct drop none]
[--other-seeds 3] [--out FILE] --json``: ``--how`` leaves out kinds of runs, but not eta 0; ``--other-seeds`` are those of
``drop`` and ``none``; with ``--out`` finished curves are kept in FILE and not run again.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.report import QUICKSTART, Figure, command_parser, emit

REWARD, WINDOW, QUESTIONS = 0.8, 256, 128
CORRECTED = ("trainer.old_logp=proximal", "trainer.correction=truncate")
HOW = {
    "correct": ("staleness.over_age=correct", *CORRECTED),
    "drop": ("staleness.over_age=drop", *CORRECTED),
    "none": ("trainer.old_logp=proximal",),
}
SIZES = ("trainer.prompts=8", "trainer.group_size=8", "trainer.lr=2e-4")


@dataclass(frozen=True)
class Curve:
    """One run: ``how`` and ``versions`` are empty at eta 0."""

    eta: int
    how: str
    versions: str
    seed: int
    steps: int
    step_ticks: int

    @property
    def name(self) -> str:
        """For readers."""
        return f"eta {self.eta}, {self.how}, {self.versions}" if self.eta else "eta 0"


@dataclass(frozen=True)
class Shown:
    """What a curve showed.

    Attributes
    ----------
    ticks : int or None
        Until the reward; None: it was not reached.
    kept_frac : float
        Of the trajectories of all batches, those that counted.
    """

    final_reward: float
    ticks: int | None
    last_tick: int
    lag: float
    lag_max: float
    over_age: int
    kept_frac: float
    effective: float


def loop_of(overrides: Iterable[str], seed: int, steps: int, step_ticks: int, directory: str) -> Any:
    """A loop of the quick start; imports torch."""
    from benchmarks.async_loop import Loop, LoopSettings
    from libra.config import load_config
    from libra.envs.tool_arithmetic import ToolArithmetic

    config = load_config(QUICKSTART, [*SIZES, f"run.seed={seed}", *overrides])
    environment = ToolArithmetic(timeout_rate=0.0, seed=seed)
    return Loop(config, environment, Path(directory), LoopSettings(steps, step_ticks=step_ticks))


def shown(curve: Curve) -> Shown:
    """Run a curve."""
    overrides = [f"run.eta={curve.eta}"]
    if curve.eta:
        overrides += [*HOW[curve.how], f"staleness.versions={curve.versions}"]
    with tempfile.TemporaryDirectory() as directory:
        loop = loop_of(overrides, curve.seed, curve.steps, curve.step_ticks, directory)
        found = asyncio.run(loop.run())
        final = asyncio.run(loop.evaluate(QUESTIONS))
    ticks, of_a_batch = found.ticks_to(REWARD, WINDOW), loop.config.trainer.prompts * loop.config.trainer.group_size
    return Shown(
        final_reward=final,
        ticks=None if ticks == float("inf") else int(ticks),
        last_tick=found.published[-1],
        lag=statistics.fmean(found.lags),
        lag_max=max(found.lags),
        over_age=found.over_age,
        kept_frac=sum(map(len, found.trained_ids)) / (curve.steps * of_a_batch),
        effective=statistics.fmean(found.effective),
    )


def curves_of(options: Any) -> list[Curve]:
    """All curves that are wanted, those that figures need first."""
    made: list[Curve] = []
    fixed = (options.steps, options.step_ticks)
    for seed in range(options.seeds):
        made += [Curve(0, "", "", seed, *fixed)] if 0 in options.etas else []
        if "correct" in options.how:
            made += [
                Curve(eta, "correct", v, seed, *fixed) for v in ("many", "one") for eta in sorted(options.etas) if eta
            ]
    for seed in range(options.other_seeds):
        pairs = [(how, v) for how in ("drop", "none") if how in options.how for v in ("many", "one")]
        made += [Curve(eta, how, v, seed, *fixed) for eta in options.etas if eta for how, v in pairs]
    return made


def run_curves(options: Any) -> dict[Curve, Shown]:
    """All curves; those in ``--out`` are read."""
    found: dict[Curve, Shown] = {}
    if options.out is not None and options.out.exists():
        for line in options.out.read_text().splitlines():
            row = json.loads(line)
            found[Curve(**row["curve"])] = Shown(**row["shown"])
    wanted = curves_of(options)
    left = [curve for curve in wanted if curve not in found]
    os.environ["OMP_NUM_THREADS"] = "1"  # of the processes that run the curves
    with ProcessPoolExecutor(options.processes) as pool:
        for curve, result in zip(left, pool.map(shown, left), strict=True):
            found[curve] = result
            print(f"{curve.name}, seed {curve.seed}: {result}", flush=True)
            if options.out is not None:
                with options.out.open("a") as file:
                    file.write(json.dumps({"curve": asdict(curve), "shown": asdict(result)}) + "\n")
    return {curve: found[curve] for curve in wanted}


def gap_se(base: Sequence[float], other: Sequence[float]) -> float:
    """How far the mean of ``base`` is above that of ``other``, in standard errors of the difference."""
    variance = statistics.variance(base) / len(base) + statistics.variance(other) / len(other)
    gap = statistics.fmean(base) - statistics.fmean(other)
    return gap / variance**0.5 if variance else float(0 if gap == 0 else 1e9 if gap > 0 else -1e9)


def curve_figures(found: dict[Curve, Shown]) -> dict[str, Figure]:
    """Figures of the curves, and a line for each kind of run."""
    kinds: dict[str, list[Shown]] = {}
    for curve, result in found.items():
        kinds.setdefault(curve.name, []).append(result)
    base, figures = kinds.get("eta 0", []), dict[str, Figure]()
    gaps, ratios = {}, {}
    for name, runs in kinds.items():
        rewards = [run.final_reward for run in runs]
        missed = sum(run.ticks is None for run in runs)
        ticks = statistics.fmean(run.last_tick if run.ticks is None else run.ticks for run in runs)
        error = statistics.stdev(rewards) / len(rewards) ** 0.5 if len(rewards) > 1 else float("nan")
        words = f"{name}, {len(runs)} seeds: reward {statistics.fmean(rewards):.3f} (SE {error:.3f}), ticks to {REWARD} {ticks:.0f}"
        words += f" ({missed} never)" if missed else ""
        means = [
            statistics.fmean(getattr(run, key) for run in runs) for key in ("lag", "lag_max", "kept_frac", "effective")
        ]
        words += " lag {:.2f} (at most {:.2f}), kept {:.3f}, effective samples {:.3f}".format(*means)
        if base and len(rewards) > 1 and len(base) > 1 and name != "eta 0":
            gaps[name] = gap_se([run.final_reward for run in base], rewards)
            words += f"; {gaps[name]:+.2f} SE below eta 0"
        if base:
            ratios[name] = ticks / statistics.fmean(run.last_tick if run.ticks is None else run.ticks for run in base)
        print(words, flush=True)
    bounded = [gaps[name] for name in gaps if "correct" in name and int(name.split()[1].strip(",")) <= 4]
    if bounded:
        figures["final_reward_gap_se"] = Figure(max(bounded), "standard errors", "lower", goal=1.0)
    for eta in (1, 4):
        if f"eta {eta}, correct, many" in ratios:
            figures[f"time_to_reward_ratio_eta{eta}"] = Figure(ratios[f"eta {eta}, correct, many"], "ratio", "lower")
    return figures


def length_figures(steps: int) -> dict[str, Figure]:
    """The bias of the trained lengths, by what a step takes."""

    def run(overrides: Sequence[str], step_ticks: int = 40) -> Any:
        with tempfile.TemporaryDirectory() as directory:
            loop = loop_of(["trainer.lr=0", *overrides], 0, steps, step_ticks, directory)
            return asyncio.run(loop.run())

    def relative(taken: Sequence[int], all_of: Sequence[int]) -> float:
        return statistics.fmean(taken) / statistics.fmean(all_of) - 1

    found = run(["trainer.prompts=16"])
    iterations: dict[int, list[tuple[int, int, int]]] = {}  # tick, group, tokens
    for tick, _, tokens, tid in found.ended:
        iterations.setdefault(tid.iteration, []).append((tick, tid.group, tokens))
    samples, groups, everything = [], [], []
    for ended in iterations.values():
        everything += [tokens for _, _, tokens in ended]
        samples += [tokens for _, _, tokens in sorted(ended)[: len(ended) // 2]]
        complete = sorted((max(tick for tick, g, _ in ended if g == group), group) for group in range(16))
        first = {group for _, group in complete[:8]}
        groups += [tokens for _, group, tokens in ended if group in first]

    def trained(overrides: Sequence[str], eta: int) -> float:
        result = run([f"run.eta={eta}", *overrides], step_ticks=20)
        last = steps - 2 - 2 * eta  # iterations whose groups are all in a batch
        tokens = {tid: tokens for _, _, tokens, tid in result.ended if tid.iteration <= last}
        return relative(
            [tokens[tid] for ids in result.trained_ids for tid in ids if tid in tokens], list(tokens.values())
        )

    values = {
        "length_bias_first_samples": relative(samples, everything),
        "length_bias_first_groups": relative(groups, everything),
        "length_bias_dropped": trained(["staleness.over_age=drop"], 1),
    }
    figures = {name: Figure(value, "share", "higher") for name, value in values.items()}
    whole = trained(["staleness.over_age=wait"], 2)
    return figures | {"length_bias_whole_groups": Figure(abs(whole), "share", "lower", goal=1e-9)}


def seconds_to(rows: Sequence[dict[str, Any]], reward: float, window: int) -> float | None:
    """Seconds of iterations until the last batches that have so many trajectories had the mean reward; None if they never had."""
    batches = -(-window // int(rows[0]["trajectories"]))
    for end in range(batches, len(rows) + 1):
        if statistics.fmean(row["reward"] for row in rows[end - batches : end]) >= reward:
            return float(sum(row["iteration_s"] for row in rows[:end]))
    return None


def live_figures(seeds: int, overrides: Sequence[str]) -> dict[str, Figure]:
    """Seconds until a batch of a real run has the reward."""
    from libra.config import load_config
    from libra.driver.session import run

    found: dict[int, list[float]] = {0: [], 1: [], 4: []}
    with tempfile.TemporaryDirectory() as directory:
        for seed in range(seeds):
            for eta, seconds in found.items():
                typed = (
                    f"run.dir={directory}", f"run.name=eta_{eta}_{seed}", f"run.seed={seed}", f"run.eta={eta}", *CORRECTED,
                    "trainer.lr=2e-4", "evaluation.prompts=0", "observe.progress=false", "observe.tensorboard=false",
                    "checkpoint.every=0", "cluster.dashboard_port=0", *overrides,
                )  # fmt: skip
                summary = run(load_config(QUICKSTART, typed))
                took_s = sum(row["iteration_s"] for row in summary.iterations)
                reached_s = seconds_to(summary.iterations, REWARD, WINDOW)
                words = "never" if reached_s is None else f"{reached_s:.1f} s"
                print(
                    f"live, eta {eta}, seed {seed}: reward {REWARD} after {words} of {took_s:.1f} s; of batches",
                    end=" ",
                )
                print(*(f"{row['reward']:.2f}" for row in summary.iterations), flush=True)
                seconds.append(took_s if reached_s is None else reached_s)
    medians = {eta: statistics.median(values) for eta, values in found.items()}
    return {f"live_time_ratio_eta{eta}": Figure(medians[eta] / medians[0], "ratio", "lower") for eta in (1, 4)}


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = command_parser("async_learning", __doc__)
    parser.add_argument("--part", nargs="+", choices=("curves", "length", "live"), default=["curves", "length"])
    parser.add_argument("--etas", type=int, nargs="+", default=[0, 1, 2, 4, 8])
    parser.add_argument("--how", nargs="+", choices=tuple(HOW), default=list(HOW), help="curves with a bound above 0")
    parser.add_argument("--seeds", type=int, default=5, help="of eta 0 and of corrected runs")
    parser.add_argument("--other-seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--step-ticks", type=int, default=60)
    parser.add_argument("--live-seeds", type=int, default=1)
    parser.add_argument("--set", nargs="+", default=[], metavar="SECTION.KEY=VALUE", help="for the runs of --part live")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args(arguments)
    for name in ("seeds", "other_seeds", "steps", "step_ticks", "live_seeds", "processes"):
        least = 0 if name in ("seeds", "other_seeds", "step_ticks") else 1
        if getattr(options, name) < least:
            parser.error(f"--{name.replace('_', '-')}: got {getattr(options, name)}; at least {least}")
    if min(options.etas) < 0:
        parser.error(f"--etas: got {min(options.etas)}; at least 0")
    figures: dict[str, Figure] = {}
    if "curves" in options.part:
        figures |= curve_figures(run_curves(options))
    if "length" in options.part:
        figures |= length_figures(max(8, options.steps // 2))
    if "live" in options.part:
        figures |= live_figures(options.live_seeds, options.set)
    emit("async_learning", figures, arguments=arguments, as_json=options.json)


if __name__ == "__main__":
    main()

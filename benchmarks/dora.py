"""DORA's training systems in virtual time: fitted on one row of its table, compared with the others.

Minutes of a step of Qwen2.5-32B on H800s, DAPO-Math, 512 prompts x 16 samples of 2.4K tokens on average and 30K at most, window
of 3 versions (arXiv:2604.26256). Systems are those of `systems.disciplines`: ``colocated`` (synchronous), ``one_step_off``
(one-off), ``partial`` (partial rollout) and ``dora``, the latter with two versions of lag, which are its three at once. All GPUs
by the cost model of `libra.hardware`, from the datasheet: no H800 was measured.

**One constant is free, and it has seen one number**: seconds of gradients over those of the cost model, such that the synchronous
step on 64 GPUs takes its 22.91 minutes. The other rows are predictions. That the constant is one of training was decided knowing
the table, by a sentence of the paper: of the 20.23 minutes on 128 GPUs generation takes 14.9. Nothing else was tried but one
factor on all seconds (``--structure all``). What the paper does not say is ours: lengths are lognormal, such that their mean and
the expected longest of a batch are those named; engines have TP 4, the best of 2, 4 and 8 for the synchronous row; split systems
have the better of the two numbers of training GPUs, in whole nodes, that are nearest to training's share of the work.

Figures: ``largest_error``, of |predicted / reported - 1| over the six rows that were not fitted; ``order``, the share of pairs of
rows on the same GPUs that are in the reported order; with ``--leave-one-out`` also ``leave_one_out_error``: the constant is
fitted to all rows but one, by least squares of logarithms, and predicts that one; the mean over rows.

``python -m benchmarks.dora [--structure training|all] [--leave-one-out] [--processes 2] [--out FILE] --json``: with ``--out``
finished simulations are kept in FILE and not run again.
"""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.report import Figure, command_parser, emit
from benchmarks.systems.disciplines import DISCIPLINES, Roles
from benchmarks.systems.tuning import Cell, Setting, core_choices, play, step_s
from libra.sim.workload import Trace, TurnPlan
from libra.types import NO_TOOL

GROUPS, SAMPLES, MEAN, LONGEST, PROMPT = 512, 16, 2400.0, 30_000, 150
TP, KINSHIP, SEED, PER_GPU = 4, 0.55, 1, 4.0
TRIED = (1.0, 5.0)
"""Training factors at which the synchronous row is simulated, which is affine in it."""


class Row(NamedTuple):
    """A row of the paper's table: our system, its staleness bound, GPUs, and the minutes of a step."""

    system: str
    eta: int
    gpus: int
    minutes: float

    @property
    def name(self) -> str:
        """For readers."""
        return f"{self.system}, {self.gpus} GPUs"


FITTED = Row("colocated", 0, 64, 22.91)
PREDICTED = (
    Row("one_step_off", 1, 64, 22.94),
    Row("partial", 1, 64, 17.38),
    Row("dora", 2, 64, 14.67),
    Row("colocated", 0, 128, 20.23),
    Row("partial", 1, 128, 13.95),
    Row("dora", 2, 128, 10.46),
)


class Job(NamedTuple):
    """One simulation."""

    row: Row
    factor: float
    core_gpus: int
    scale: int


@cache
def traces() -> tuple[Trace, ...]:
    """Single turns of lognormal length: the longest of a batch is expected at the paper's limit."""
    quantile = statistics.NormalDist().inv_cdf(1 - 1 / (GROUPS * SAMPLES))
    sigma = quantile - (quantile**2 - 2 * np.log(LONGEST / MEAN)) ** 0.5
    drawn = np.random.default_rng(SEED).lognormal(np.log(MEAN) - sigma**2 / 2, sigma, 4000)
    lengths = np.clip(drawn, 16, LONGEST).astype(int).tolist()
    return tuple(Trace(f"math-{i}", PROMPT, (TurnPlan(n, "", NO_TOOL, 0, 0.0),)) for i, n in enumerate(lengths))


def cell_of(row: Row, factor: float, scale: int) -> Cell:
    """Where a row is simulated; ``scale`` divides GPUs and prompts."""
    return Cell(
        traces(), SAMPLES, KINSHIP, GROUPS // scale, row.gpus // scale, row.eta, "H800-80G", "Qwen2.5-32B", factor
    )


def minutes(job: Job) -> float:
    """Simulated minutes of a step."""
    cell = cell_of(job.row, job.factor, job.scale)
    setting = Setting(job.core_gpus, TP, PER_GPU)
    found = step_s(cell, play(cell, DISCIPLINES[job.row.system], setting, SEED, causes=False)) / 60
    print(f"{job.row.name}, training x {job.factor:.2f}, {job.core_gpus} train: {found:.2f} min", flush=True)
    return found


class Simulations:
    """Simulates each job once; what is in ``out`` is read."""

    def __init__(self, pool: ProcessPoolExecutor, out: Path | None) -> None:
        self.pool, self.out = pool, out
        lines = out.read_text().splitlines() if out is not None and out.exists() else []
        self.found = {_job(row["job"]): row["minutes"] for row in map(json.loads, lines)}

    def minutes(self, jobs: Sequence[Job]) -> list[float]:
        """Of each job."""
        left = [job for job in dict.fromkeys(jobs) if job not in self.found]
        for job, simulated in zip(left, self.pool.map(minutes, left), strict=True):
            self.found[job] = simulated
            if self.out is not None:
                with self.out.open("a") as file:
                    file.write(json.dumps({"job": job, "minutes": simulated}) + "\n")
        return [self.found[job] for job in jobs]


def _job(row: list[Any]) -> Job:
    return Job(Row(*row[0]), *row[1:])


def cores(row: Row, factor: float, scale: int) -> list[int]:
    """Training GPUs to try."""
    discipline = DISCIPLINES[row.system]
    return core_choices(cell_of(row, factor, scale), discipline)[: 2 if discipline.roles is Roles.SPLIT else 1]


def fit(runs: Simulations, scale: int, structure: str) -> tuple[float, float]:
    """Factor of gradients, and factor of all seconds, of which one is free."""
    tried = list(TRIED if structure == "training" else TRIED[:1])
    found = runs.minutes([Job(FITTED, factor, 0, scale) for factor in tried])
    if structure == "all":
        return 1.0, FITTED.minutes / found[0]
    slope = (found[1] - found[0]) / (tried[1] - tried[0])
    return tried[0] + (FITTED.minutes - found[0]) / slope, 1.0


def predict(runs: Simulations, factor: float, scale: int) -> dict[Row, tuple[float, int]]:
    """Minutes of each row that was not fitted, before the factor on all, and its training GPUs."""
    jobs = [Job(row, factor, core, scale) for row in PREDICTED for core in cores(row, factor, scale)]
    found: dict[Row, tuple[float, int]] = {}
    for job, simulated in zip(jobs, runs.minutes(jobs), strict=True):
        found[job.row] = min(found.get(job.row, (float("inf"), 0)), (simulated, job.core_gpus))
    return found


def leave_one_out(runs: Simulations, factor: float, chosen: dict[Row, int], scale: int) -> float:
    """Mean error of rows that the constant has not seen, with minutes read between three factors."""
    factors = [0.7 * factor, factor, 1.4 * factor]
    rows = [FITTED, *PREDICTED]
    jobs = [Job(row, each, chosen.get(row, 0), scale) for row in rows for each in factors]
    simulated = np.array(runs.minutes(jobs)).reshape(len(rows), -1)
    grid = np.linspace(factors[0], factors[-1], 141)
    curves = np.array([np.interp(grid, factors, each) for each in simulated])
    errors = np.log(curves / np.array([[row.minutes] for row in rows]))
    found = []
    for index, row in enumerate(rows):
        others = np.delete(errors, index, axis=0)
        at = int((others**2).sum(axis=0).argmin())
        found.append(abs(float(curves[index, at]) / row.minutes - 1))
        print(f"left out {row.name}: factor {grid[at]:.2f}, {curves[index, at]:.2f} min of {row.minutes}", flush=True)
    return statistics.fmean(found)


def order(predicted: dict[Row, float]) -> float:
    """Share of pairs of rows on as many GPUs that are in the reported order; rows within 1 % of each other have none."""
    pairs = [
        (one, other)
        for one, other in itertools.combinations(predicted, 2)
        if one.gpus == other.gpus and abs(one.minutes / other.minutes - 1) > 0.01
    ]
    right = [(predicted[one] < predicted[other]) == (one.minutes < other.minutes) for one, other in pairs]
    return statistics.fmean(right)


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = command_parser("dora", __doc__)
    parser.add_argument("--structure", choices=("training", "all"), default="training", help="what the constant scales")
    parser.add_argument("--leave-one-out", action="store_true", help="15 simulations more")
    parser.add_argument(
        "--scale", type=int, choices=(1, 2, 4), default=1, help="divides GPUs and prompts, for a quick look"
    )
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path, default=None)
    options: Any = parser.parse_args(arguments)
    if options.leave_one_out and options.structure == "all":
        parser.error("--leave-one-out: with --structure training only")
    with ProcessPoolExecutor(options.processes) as pool:
        runs = Simulations(pool, options.out)
        factor, of_all = fit(runs, options.scale, options.structure)
        print(f"fitted on {FITTED.name}, {FITTED.minutes} min: gradients x {factor:.3f}, all seconds x {of_all:.3f}")
        found = predict(runs, factor, options.scale)
        predicted = {row: of_all * simulated for row, (simulated, _) in found.items()}
        for row, value in predicted.items():
            print(f"{row.name}: predicted {value:.2f} min, reported {row.minutes} ({value / row.minutes - 1:+.1%})")
        errors = {row: abs(value / row.minutes - 1) for row, value in predicted.items()}
        figures = {
            "largest_error": Figure(max(errors.values()), "share", "lower", goal=0.15),
            "mean_error": Figure(statistics.fmean(errors.values()), "share", "lower"),
            "rows_within_15_percent": Figure(sum(e <= 0.15 for e in errors.values()), "rows of 6", "higher"),
            "order": Figure(order({FITTED: FITTED.minutes, **predicted}), "share of pairs", "higher", goal=1.0),
            "free_constants": Figure(1, "constants", "lower"),
        }
        if options.leave_one_out:
            chosen = {row: core for row, (_, core) in found.items()}
            error = leave_one_out(runs, factor, chosen, options.scale)
            figures["leave_one_out_error"] = Figure(error, "share", "lower")
    beside = {row.name: round(value, 3) for row, value in predicted.items()}
    emit("dora", figures, arguments=arguments, as_json=options.json, beside={"predicted_minutes": beside})


if __name__ == "__main__":
    main()

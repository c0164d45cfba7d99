"""Training systems against each other in virtual time: streaming steps and turning engines over the
best static systems.

Qwen3-14B on A800s by the cost model of `libra.hardware`, 12 trajectories per GPU and step, contexts
cut at 40,960 tokens, groups of 16 (4 where a set has as many of a task). Every system
(`systems.disciplines`) is tuned on its own on a seed that is not scored. Seconds of role changes,
updates and merges are the defaults of `PipelineOptions` and `TurningRule`.

* ``over_sync_geomean``: steps per hour of ours over the better of colocated and split, eta 0,
  geometric mean over cells; ``over_async_eta1_geomean``, ``over_async_eta2_geomean``: over the best
  static system of the same eta. *Ours* is the system without true lengths that is best on the
  tuning seed; the best static one is chosen likewise. ``worst_cell``: the smallest ratio.
* ``fraction_of_bound_eta0_mini_swe``, ``..._eta1_...``: `systems.tuning.lower_bound_s` over the
  seconds of ours.

`systems.against.race` leaves out of the search what could only make a ratio larger. By default 16
GPUs, nine cells. All 27, ``--gpus 16 48 96``, take
hours of CPU. ``r2e`` is made up: lognormal totals with a heavy tail (P99 over P50 about 4); nothing
of R2E was seen.
"""

from __future__ import annotations

import gc
import math
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.report import Figure, command_parser, emit
from benchmarks.systems.against import Comparison, race
from benchmarks.systems.disciplines import DISCIPLINES, disciplines
from benchmarks.systems.tuning import Cell, Setting, play, step_s
from benchmarks.virtual.draws import KINSHIP, agent_turn_files, cut
from libra.sim.workload import Trace, TurnPlan, load_traces
from libra.types import NO_TOOL, ToolStatus

LOAD, R2E_SEED = 12, 7
GPUS, ETAS = (16,), (0, 1, 2)
GOALS, BOUND_GOALS = {0: 1.12, 1: 1.20, 2: 1.10}, {0: 0.70, 1: 0.78}
BOUND_SET = "mini_swe_gemini3"
SAME_AS_PAPER = {0: "split", 1: "one_step_off", 2: "split"}
"""With engines of one degree the paper's order is the order of arrival: its system is this one."""


@cache
def traces_of(path: str) -> tuple[Trace, ...]:
    return r2e_like() if path == "r2e" else tuple(cut(trace) for trace in load_traces(Path(path)))


def r2e_like(num: int = 400) -> tuple[Trace, ...]:
    """Made-up trajectories of software repair: few long ones, a quarter of the tools slow."""
    rng, found = np.random.default_rng(R2E_SEED), []
    for index in range(num):
        left = float(np.clip(rng.lognormal(np.log(5300.0), 0.7), 200, 36_000))
        turns = []
        while left > 0:
            tokens = int(np.clip(rng.lognormal(5.3, 0.8), 16, 4000))
            left -= tokens
            tool_s = float(min(rng.gamma(2.0, 5.0), 60.0)) if rng.random() < 0.25 else 0.04
            turns.append(TurnPlan(tokens, "tool", ToolStatus.OK, int(rng.lognormal(5.0, 1.0)), tool_s))
        turns[-1] = TurnPlan(turns[-1].new_tokens, "", NO_TOOL, 0, 0.0)
        found.append(cut(Trace(f"r2e-{index}", 1500, tuple(turns))))
    return tuple(found)


class CellJob(NamedTuple):
    """One cell, and how it is compared."""

    traces: str
    gpus: int
    eta: int
    seeds: int
    systems: Sequence[str]

    def cell(self) -> Cell:
        traces = traces_of(self.traces)
        repeated = max(Counter(trace.task for trace in traces).values()) >= 4
        size = 4 if repeated else 16
        groups = max(1, self.gpus * LOAD // size)
        return Cell(traces, size, 0.0 if repeated else KINSHIP, groups, self.gpus, self.eta)


def compared(job: CellJob) -> Comparison:
    """The best static system and the best of all in a cell, on untuned seeds."""
    cell, done = job.cell(), dict[tuple[str, Setting, int], float]()

    def seconds(system: str, setting: Setting, seed: int, limit_s: float) -> float:
        name = SAME_AS_PAPER[job.eta] if system == "paper" else system
        if (name, setting, seed) in done:
            return done[name, setting, seed]
        gc.disable()  # a simulation allocates much and frees little: collected once, after it
        found = step_s(cell, play(cell, DISCIPLINES[name], setting, seed, limit_s, causes=False))
        gc.enable()
        gc.collect()
        if found < math.inf:
            done[name, setting, seed] = found
        return found

    def seconds_of(system: str, tried: Sequence[tuple[Setting, int]], limit_s: float) -> list[float]:
        return [seconds(system, setting, seed, limit_s) for setting, seed in tried]

    return race(cell, list(disciplines(job.systems, job.eta)), job.seeds, seconds_of)


def figures_of(ratios: dict[int, list[float]], fractions: dict[int, list[float]]) -> dict[str, Figure]:
    found = {}
    for eta, values in ratios.items():
        name = "over_sync_geomean" if eta == 0 else f"over_async_eta{eta}_geomean"
        found[name] = Figure(math.exp(float(np.mean(np.log(values)))), "ratio", "higher", GOALS[eta])
    found["worst_cell"] = Figure(min(min(values) for values in ratios.values()), "ratio", "higher", 0.98)
    for eta, shares in fractions.items():
        name = f"fraction_of_bound_eta{eta}_mini_swe"
        found[name] = Figure(float(np.mean(shares)), "ratio", "higher", BOUND_GOALS.get(eta))
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command_parser("pipeline", __doc__, data=True)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--sets", nargs="*", help="files of DIR/agent_turns without .csv, or r2e; default: all")
    parser.add_argument("--gpus", nargs="*", type=int, default=list(GPUS), help="the whole table: 16 48 96")
    parser.add_argument("--etas", nargs="*", type=int, default=list(ETAS), choices=ETAS)
    parser.add_argument("--systems", nargs="*", default=[], choices=list(DISCIPLINES), help="default: all")
    parser.add_argument("--processes", type=int, default=1, help="cells at once")
    options = parser.parse_args(arguments)
    sets = [str(path) for path in agent_turn_files(options.data)] + ["r2e"]
    cells = [
        CellJob(traces, gpus, eta, options.seeds, tuple(options.systems))
        for gpus in options.gpus
        for traces in sets
        if not options.sets or Path(traces).stem in options.sets
        for eta in options.etas
    ]
    ratios: dict[int, list[float]] = {eta: [] for eta in options.etas}
    fractions: dict[int, list[float]] = {}
    with ProcessPoolExecutor(options.processes) as pool:
        for cell, found in zip(cells, pool.map(compared, cells), strict=True):
            ratios[cell.eta].append(found.ratio)
            name = Path(cell.traces).stem
            if name == BOUND_SET and cell.eta in BOUND_GOALS:
                fractions.setdefault(cell.eta, []).append(found.bound_s / float(np.mean(found.ours.step_s)))
            print(f"{name}: " + "\n".join(found.lines()), flush=True)
    emit("pipeline", figures_of(ratios, fractions), arguments=arguments, as_json=options.json)

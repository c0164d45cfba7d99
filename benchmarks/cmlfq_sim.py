"""C-MLFQ against its competitors in virtual time, on recorded agent trajectories.

Every policy is the object that the live plugin would call, every engine takes the seconds that `libra.hardware` says of
Qwen3-14B on A800 GPUs, and the dispatcher is the same for all: what differs is order and placement. One iteration, objective
makespan. The yardstick of each cell (trace set x GPUs x load) is FIFO on the homogeneous layout that is best for FIFO there.

* *Best homogeneous*: of TP 1, 2, 4, 8, by the mean makespan of FIFO on planning seeds, which are not scored.
* *Planned*: of the homogeneous layouts and some mixed ones, by the mean makespan of C-MLFQ on the planning seeds: a layout is
  planned without knowing the scored trajectories' lengths, and "none mixed" is an answer.
* Loads are trajectories per GPU. GPUs are counted so that engines of two GPUs are 8 to 48.
* Where a set has one sample per task, groups are drawn so that the ranks of their lengths correlate as those of real samples of
  one prompt do (0.55, measured on tau's trials); ``--strangers`` draws them independently, so that siblings tell nothing.

``python -m benchmarks.cmlfq_sim [--data DIR] [--quick] --json``. Figures:

* ``makespan_over_fifo_<policy>``: policy on the planned layout over the yardstick, geometric mean over cells;
  ``homogeneous_over_fifo_<policy>``: the same on the best homogeneous layout; ``group_over_fifo_<policy>``: mean completion of
  groups on the planned layout.
* ``share_of_oracle_gain``: C-MLFQ's gain over the oracle's, summed over cells where the oracle gains 5 % or more.
* ``worst_vs_homogeneous_fifo``: the largest lower end, over cells, of the 95 % bootstrap interval of C-MLFQ's mean ratio to
  the yardstick: above 1, it is worse somewhere beyond the interval.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.report import Figure, emit
from libra.config.agent_turns import agent_turn_files
from libra.hardware import engine_seconds
from libra.hardware.virtual_engine import EngineTables
from libra.policy import CMLFQ, ORDERINGS, Oracle, Ordering, Predictor
from libra.sim.fleet import fleet, slots_of
from libra.sim.outcome import Outcome
from libra.sim.simulator import Simulator
from libra.sim.traces import load_traces
from libra.sim.workload import Trace, Workload, draw

GPU, MODEL, DEGREES = "a800", "qwen3-14b", (1, 2, 4, 8)
CROSS = ((16, 4), (16, 12), (16, 32), (48, 4), (96, 4))
KINSHIP = 0.55
"""Intra-class correlation of lengths within a group, where the traces have one sample per task: as measured on tau's trials."""
FULL = tuple((gpus, load) for gpus in (16, 48, 96) for load in (4, 12, 32))
QUICK = ((16, 4), (16, 12))
PLANNING_SEEDS = (1001, 1002)
WORTH_IT = 0.05
"""Gain of the oracle from which on a share of it is scored."""
BOOTSTRAPS = 2000

Layout = Mapping[int, int]
POLICIES: dict[str, Callable[[Workload, int], Ordering]] = {
    "fifo": lambda workload, seed: ORDERINGS["fifo"](),
    "cmlfq": lambda workload, seed: CMLFQ(),
    "paper": lambda workload, seed: ORDERINGS["paper"](),
    "mlfq": lambda workload, seed: ORDERINGS["mlfq"](),
    "completed_calls": lambda workload, seed: ORDERINGS["completed_calls"](),
    "predictor": lambda workload, seed: Predictor(workload.totals(), accuracy=0.6, seed=seed),
    "oracle": lambda workload, seed: Oracle(workload.totals()),
}


class Cell(NamedTuple):
    """One trace set at one size and load, with its results by (policy, "homogeneous" or "planned"), one per seed."""

    name: str
    homogeneous: Layout
    planned: Layout
    makespan: dict[tuple[str, str], list[float]]
    group: dict[tuple[str, str], list[float]]

    def ratios(self, policy: str, layout: str) -> np.ndarray:
        """(seeds,) makespan over the yardstick's on the same seed."""
        return np.array(self.makespan[policy, layout]) / np.array(self.makespan["fifo", "homogeneous"])

    def group_ratios(self, policy: str, layout: str) -> np.ndarray:
        """(seeds,) mean group completion over the yardstick's on the same seed."""
        return np.array(self.group[policy, layout]) / np.array(self.group["fifo", "homogeneous"])


class Bench:
    """What all cells share: tables of seconds, and the traces of a set."""

    def __init__(self, traces: Sequence[Trace], group_size: int, kinship: float) -> None:
        self._traces, self._group_size, self._kinship = traces, group_size, kinship
        self._tables = {tp: EngineTables(engine_seconds(GPU, MODEL, tp)) for tp in DEGREES}

    def simulate(self, policy: str, layout: Layout, num: int, seed: int) -> Outcome:
        """One iteration of ``num`` trajectories, drawn by ``seed``."""
        groups = max(1, num // self._group_size)
        workload = draw(self._traces, num_groups=groups, group_size=self._group_size, seed=seed, kinship=self._kinship)
        plans = workload.trajectories
        mean = sum(plan.final_tokens for plan in plans) // len(plans)
        slots = {tp: slots_of(self._tables[tp], mean) for tp in layout}
        engines = fleet(layout, self._tables, slots)
        return Simulator(workload, engines, POLICIES[policy](workload, seed), seed=seed).run()

    def best(self, policy: str, layouts: Sequence[Layout], num: int) -> Layout:
        """The layout with the least mean makespan on the planning seeds."""
        return min(
            layouts,
            key=lambda layout: sum(self.simulate(policy, layout, num, seed).makespan_s for seed in PLANNING_SEEDS),
        )


def homogeneous_layouts(gpus: int) -> list[Layout]:
    """All engines alike."""
    return [{tp: gpus // tp} for tp in DEGREES if gpus % tp == 0]


def mixed_layouts(gpus: int) -> list[Layout]:
    """Half of the GPUs in engines of one degree, the rest in larger ones."""
    found = []
    for small, large in ((2, 4), (2, 8), (4, 8)):
        rest = gpus // 2 // large
        if rest and (gpus - rest * large) % small == 0:
            found.append({small: (gpus - rest * large) // small, large: rest})
    return found


def score(bench: Bench, name: str, gpus: int, load: int, seeds: int) -> Cell:
    """All policies on both layouts of a cell."""
    num = gpus * load
    homogeneous = bench.best("fifo", homogeneous_layouts(gpus), num)
    planned = bench.best("cmlfq", [homogeneous, *mixed_layouts(gpus)], num)
    makespan: dict[tuple[str, str], list[float]] = {}
    group: dict[tuple[str, str], list[float]] = {}
    for policy in POLICIES:
        for kind, layout in (("homogeneous", homogeneous), ("planned", planned)):
            if kind == "planned" and layout == homogeneous:
                outcomes = None
            else:
                outcomes = [bench.simulate(policy, layout, num, seed) for seed in range(seeds)]
            of = "homogeneous" if outcomes is None else kind
            if outcomes is not None:
                makespan[policy, kind] = [outcome.makespan_s for outcome in outcomes]
                group[policy, kind] = [outcome.group_completion_s for outcome in outcomes]
            makespan[policy, kind], group[policy, kind] = makespan[policy, of], group[policy, of]
    return Cell(name, homogeneous, planned, makespan, group)


def interval(values: np.ndarray) -> tuple[float, float]:
    """95 % bootstrap interval of the mean."""
    rng = np.random.default_rng(0)
    means = values[rng.integers(0, len(values), (BOOTSTRAPS, len(values)))].mean(1)
    return float(np.quantile(means, 0.025)), float(np.quantile(means, 0.975))


def shown(cell: Cell, seconds: float) -> str:
    """A cell as lines of text."""
    lines = [
        f"{cell.name}: best homogeneous {layout_text(cell.homogeneous)}, planned {layout_text(cell.planned)}; "
        f"FIFO {np.mean(cell.makespan['fifo', 'homogeneous']):.0f} s, groups "
        f"{np.mean(cell.group['fifo', 'homogeneous']):.0f} s ({seconds:.0f} s to simulate)"
    ]
    for policy in POLICIES:
        parts = []
        for kind in ("homogeneous", "planned"):
            values = cell.ratios(policy, kind)
            low, high = interval(values)
            parts.append(
                f"{kind} {values.mean():.3f} [{low:.3f}, {high:.3f}], groups {cell.group_ratios(policy, kind).mean():.3f}"
            )
        lines.append(f"  {policy:16s} {'   '.join(parts)}")
    return "\n".join(lines)


def layout_text(layout: Layout) -> str:
    """A layout in words, e.g. 8 x TP2 + 1 x TP8."""
    return " + ".join(f"{count} x TP{tp}" for tp, count in sorted(layout.items()))


def figures_of(cells: Sequence[Cell]) -> dict[str, Figure]:
    """The figures over all cells."""
    found = {}
    gains = [
        (1 - cell.ratios("oracle", "planned").mean(), 1 - cell.ratios("cmlfq", "planned").mean()) for cell in cells
    ]
    scored = [(oracle, ours) for oracle, ours in gains if oracle >= WORTH_IT]
    if scored:
        share = sum(ours for _, ours in scored) / sum(oracle for oracle, _ in scored)
        found["share_of_oracle_gain"] = Figure(float(share), "ratio", "higher", 0.5)
    worst = max(interval(cell.ratios("cmlfq", "planned"))[0] for cell in cells)
    found["worst_vs_homogeneous_fifo"] = Figure(worst, "ratio", "lower", 1.0)
    for policy in POLICIES:
        for prefix, kind in (("makespan_over_fifo", "planned"), ("homogeneous_over_fifo", "homogeneous")):
            mean = math.exp(float(np.mean([math.log(cell.ratios(policy, kind).mean()) for cell in cells])))
            found[f"{prefix}_{policy}"] = Figure(mean, "ratio", "lower")
        groups = math.exp(float(np.mean([math.log(cell.group_ratios(policy, "planned").mean()) for cell in cells])))
        found[f"group_over_fifo_{policy}"] = Figure(groups, "ratio", "lower")
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Run it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cmlfq_sim", description="C-MLFQ in virtual time.")
    parser.add_argument("--data", type=Path, default=Path(__file__).parent / "data")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--sets", nargs="*", help="file names without .csv; default: all in DIR/agent_turns")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="two cells of each set, three seeds")
    size.add_argument("--full", action="store_true", help="all sizes at all loads")
    parser.add_argument("--strangers", action="store_true", help="groups of unrelated trajectories")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    grid = QUICK if options.quick else FULL if options.full else CROSS
    seeds = min(3, options.seeds) if options.quick else options.seeds
    cells = []
    for path in agent_turn_files(options.data):
        if options.sets and path.stem not in options.sets:
            continue
        traces = load_traces(path)
        samples = max(sum(trace.task == task for trace in traces) for task in {trace.task for trace in traces})
        bench = Bench(traces, 4 if samples >= 4 else 8, 0.0 if options.strangers else KINSHIP)
        for gpus, load in grid:
            began = time.perf_counter()
            cells.append(score(bench, f"{path.stem}, {gpus} GPUs, {load} per GPU", gpus, load, seeds))
            print(shown(cells[-1], time.perf_counter() - began), flush=True)
    emit("cmlfq_sim", figures_of(cells), arguments=arguments, as_json=options.json)


if __name__ == "__main__":
    main()

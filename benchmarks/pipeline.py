"""Training systems against each other in virtual time: streaming steps and turning engines over the best static systems.

Qwen3-14B on A800s by the cost model of `libra.hardware`, 12 trajectories per GPU and step, contexts cut at 40,960 tokens, groups of
16 (4 where a set has as many of a task). Every system (`systems.disciplines`) is tuned on its own on a seed that is not scored:
training GPUs in whole nodes, TP degree, rule of turning. All run in the simulator of `libra simulate`, first come, first served
unless a system has its own order. Seconds of changes of roles, updates and merges are the defaults of
`systems.pipeline.PipelineOptions` and `libra.policy.turning.TurningRule`.

* ``over_sync_geomean``: steps per hour of ours over the better of colocated and split, eta 0, geometric mean over cells;
  ``over_async_eta1_geomean``, ``over_async_eta2_geomean``: over the best static system of the same eta. *Ours* is the one of all
  systems without true lengths that is best on the tuning seed; the best static one is chosen likewise.
* ``worst_cell``: the smallest of these ratios.
* ``fraction_of_bound_eta0_mini_swe``, ``..._eta1_...``: `systems.tuning.lower_bound_s` over the seconds of ours.

What is left out of the search (`systems.against.race`): static systems are tuned in full; of the others only those that are
within 2 % of the best so far where their search begins; a setting is given up once its step must take longer than the best one's;
on seeds that are not used for tuning only the best static system and the best of all are scored. A system that is left out could
only have made a ratio larger. ``--whole`` tunes and scores every system, true lengths included, as `python -m benchmarks.systems`
does.

``python -m benchmarks.pipeline [--data DIR] [--sets ...] [--gpus 16 48 96] [--etas 0 1 2] [--out FILE] [--processes N] --json``.
By default 16 GPUs, nine cells. All 27 cells, ``--gpus 16 48 96``, take hours of CPU: compiled (`benchmarks.compiled`) a cell of
48 GPUs takes from 40 s to several minutes. A cell is printed when it is finished. With ``--out`` every simulation is kept in FILE,
and a later call goes on from there; it runs a simulation again only if the code has changed. Sets: the files of
``agent_turns``, and ``r2e``, made up: lognormal totals with a heavy tail (P99 over P50 about 4); nothing of R2E was seen.
"""

from __future__ import annotations

import gc
import hashlib
import json
import math
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

import libra
from benchmarks.elastic_drift import cut
from benchmarks.report import Figure, command_parser, emit
from benchmarks.systems.against import Comparison, compare, race
from benchmarks.systems.disciplines import DISCIPLINES, disciplines
from benchmarks.systems.tuning import Cell, Setting, play, step_s
from libra.planner.agent_turns import agent_turn_files
from libra.sim.workload import Trace, TurnPlan, load_traces
from libra.types import NO_TOOL, ToolStatus

KINSHIP, LOAD = 0.55, 12
R2E_SEED = 7
GPUS, ETAS = (16,), (0, 1, 2)
GOALS = {0: 1.12, 1: 1.20, 2: 1.10}
BOUND_GOALS = {0: 0.70, 1: 0.78}
BOUND_SET = "mini_swe_gemini3"
SAME_AS_PAPER = {0: "split", 1: "one_step_off", 2: "split"}
"""Engines of one degree: there the paper's order is that of arrival, and its system this one."""


class Job(NamedTuple):
    """One simulation."""

    traces: str
    gpus: int
    eta: int
    system: str
    setting: Setting
    seed: int
    limit_s: float = math.inf  # given up once its step must take longer


@cache
def traces_of(path: str) -> tuple[Trace, ...]:
    """The traces of a set, cut."""
    if path == "r2e":
        return r2e_like()
    return tuple(cut(trace) for trace in load_traces(Path(path)))


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


def cell_of(job: Job) -> Cell:
    """Where a job is simulated."""
    traces = traces_of(job.traces)
    repeated = max(Counter(trace.task for trace in traces).values()) >= 4
    size = 4 if repeated else 16
    return Cell(traces, size, 0.0 if repeated else KINSHIP, max(1, job.gpus * LOAD // size), job.gpus, job.eta)


def seconds(job: Job) -> float:
    """Seconds of a step."""
    gc.disable()  # a simulation allocates much and frees little: collected once, after it
    cell = cell_of(job)
    found = step_s(cell, play(cell, DISCIPLINES[job.system], job.setting, job.seed, job.limit_s, causes=False))
    gc.enable()
    gc.collect()
    return found


@cache
def fingerprint() -> str:
    """Digest of the code that a simulation runs."""
    digest, root = hashlib.sha256(), Path(libra.__file__).parent
    folders = [root / name for name in ("policy", "sim", "hardware", "planner/cost")]
    paths = [path for folder in (*folders, Path(__file__).parent / "systems") for path in sorted(folder.rglob("*.py"))]
    paths += [Path(__file__).with_name(f"{name}.py") for name in ("draws", "orderings", "prefix_tree")]
    for path in paths:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


class Simulations:
    """Finished simulations, in memory and, with ``path``, in a file of one JSON line each."""

    def __init__(self, path: Path | None) -> None:
        self._path, self._done = path, dict[str, float]()
        self._over = dict[str, float]()  # of those that were given up: seconds that their step exceeds
        if path is not None and path.exists():
            rows = [json.loads(line) for line in path.read_text().splitlines()]
            rows = [row for row in rows if row["code"] == fingerprint()]
            self._done = {row["job"]: row["step_s"] for row in rows if row["step_s"] is not None}
            self._over = {row["job"]: row["over_s"] for row in rows if row["step_s"] is None}

    def of(self, job: Job) -> float:
        """Seconds of a step; infinite if given up."""
        if job.system == "paper":
            job = job._replace(system=SAME_AS_PAPER[job.eta])
        name = json.dumps([Path(job.traces).stem, *job[1:-1]])
        if name in self._done:
            return self._done[name]
        if self._over.get(name, -1.0) >= job.limit_s:
            return math.inf
        found = seconds(job)
        given_up = found == math.inf
        (self._over if given_up else self._done)[name] = job.limit_s if given_up else found
        if self._path is not None:
            row = {"code": fingerprint(), "job": name, "step_s": None if given_up else found}
            with self._path.open("a") as file:
                file.write(json.dumps(row | ({"over_s": job.limit_s} if given_up else {})) + "\n")
        return found


class CellJob(NamedTuple):
    """One cell, and how it is compared."""

    traces: str
    gpus: int
    eta: int
    seeds: int
    systems: Sequence[str]
    whole: bool
    out: Path | None


def compared(cell: CellJob) -> Comparison:
    """The systems of a cell, each tuned on one seed; the best static one and the best of all, with ``whole`` all, scored on
    others."""
    runs, around = Simulations(cell.out), compare if cell.whole else race
    any_job = Job(cell.traces, cell.gpus, cell.eta, "", Setting(0, 0, 0.0), 0)

    def seconds_of(system: str, tried: Sequence[tuple[Setting, int]], limit_s: float) -> list[float]:
        return [
            runs.of(any_job._replace(system=system, setting=each, seed=seed, limit_s=limit_s)) for each, seed in tried
        ]

    return around(cell_of(any_job), list(disciplines(cell.systems, cell.eta)), cell.seeds, seconds_of)


def figures_of(ratios: dict[int, list[float]], fractions: dict[int, list[float]]) -> dict[str, Figure]:
    """The figures over all cells."""
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
    """Run it."""
    parser = command_parser("pipeline", __doc__, data=True)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument(
        "--sets", nargs="*", help="file names without .csv, or r2e; default: all in DIR/agent_turns, and r2e"
    )
    parser.add_argument(
        "--gpus", nargs="*", type=int, default=list(GPUS), help="default: 16; the whole table: 16 48 96"
    )
    parser.add_argument("--etas", nargs="*", type=int, default=list(ETAS), choices=ETAS)
    parser.add_argument("--systems", nargs="*", default=[], choices=list(DISCIPLINES), help="default: all")
    parser.add_argument("--whole", action="store_true", help="tune and score every system")
    parser.add_argument("--out", type=Path, help="file of results, which are not computed again")
    parser.add_argument("--processes", type=int, default=1, help="cells at once")
    options = parser.parse_args(arguments)
    sets = [str(path) for path in agent_turn_files(options.data)] + ["r2e"]
    cells = [
        CellJob(traces, gpus, eta, options.seeds, tuple(options.systems), options.whole, options.out)
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


if __name__ == "__main__":
    main()

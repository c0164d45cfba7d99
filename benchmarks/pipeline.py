"""Training systems against each other in virtual time: streaming steps and turning engines over the best static systems.

Qwen3-14B on A800s by the cost model of `libra.hardware`, 12 trajectories per GPU and step, contexts cut at 40,960 tokens, groups of
16 (4 where a set has as many of a task). Every system (`libra.sim.disciplines`) is tuned on its own on a seed that is not scored:
training GPUs in whole nodes, TP degree, rule of turning. All run in the simulator of `libra simulate`, first come, first served
unless a system has its own order. Seconds of changes of roles, updates and merges are the defaults of
`libra.sim.pipeline.PipelineOptions` and `libra.policy.turning.TurningRule`.

* ``over_sync_geomean``: steps per hour of ours over the better of colocated and split, eta 0, geometric mean over cells;
  ``over_async_eta1_geomean``, ``over_async_eta2_geomean``: over the best static system of the same eta. *Ours* is the one of all
  systems without true lengths that is best on the tuning seed; the best static one is chosen likewise.
* ``worst_cell``: the smallest of these ratios.
* ``fraction_of_bound_eta0_mini_swe``, ``..._eta1_...``: `libra.sim.tuning.lower_bound_s` over the seconds of ours.

``python -m benchmarks.pipeline [--data DIR] [--sets ...] [--gpus 16 48 96] [--etas 0 1 2] [--out FILE] [--processes N] --json``.
With ``--out`` every simulation is kept in FILE, and a later call runs it again only if the code has changed. Sets: the files of
``agent_turns``, and ``r2e``, made up: lognormal totals with a heavy tail (P99 over P50 about 4); nothing of R2E was seen.
"""

from __future__ import annotations

import gc
import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

import libra
from benchmarks.elastic_drift import cut
from benchmarks.report import Figure, command_parser, emit
from libra.sim.against import Comparison, compare
from libra.sim.disciplines import DISCIPLINES, disciplines
from libra.sim.recorded_agents import load_traces
from libra.sim.tuning import Cell, Setting, play, step_s
from libra.sim.workload import Trace, TurnPlan
from libra.traces.agent_turns import agent_turn_files
from libra.types import NO_TOOL, ToolStatus

KINSHIP, LOAD = 0.55, 12
TUNING_SEED, R2E_SEED = 101, 7
GPUS, ETAS = (16, 48, 96), (0, 1, 2)
GOALS = {0: 1.12, 1: 1.20, 2: 1.10}
BOUND_GOALS = {0: 0.70, 1: 0.78}
BOUND_SET = "mini_swe_gemini3"


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
    found = step_s(cell, play(cell, DISCIPLINES[job.system], job.setting, job.seed, job.limit_s))
    gc.enable()
    gc.collect()
    return found


@cache
def fingerprint() -> str:
    """Digest of the code that a simulation runs."""
    digest, root = hashlib.sha256(), Path(libra.__file__).parent
    for folder in ("policy", "sim", "hardware", "planner/cost"):
        for path in sorted((root / folder).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


class Simulations:
    """Finished simulations, in memory and, with ``path``, in a file of one JSON line each."""

    def __init__(self, path: Path | None, processes: int) -> None:
        self._path, self._done = path, dict[str, float]()
        self._over = dict[str, float]()  # of those that were given up: seconds that their step exceeds
        self._pool = ProcessPoolExecutor(processes) if processes > 1 else None
        if path is not None and path.exists():
            rows = [json.loads(line) for line in path.read_text().splitlines()]
            rows = [row for row in rows if row["code"] == fingerprint()]
            self._done = {row["job"]: row["step_s"] for row in rows if row["step_s"] is not None}
            self._over = {row["job"]: row["over_s"] for row in rows if row["step_s"] is None}

    def of(self, jobs: Iterable[Job]) -> list[float]:
        """Seconds of a step in each; infinite if given up."""
        jobs = [
            job._replace(system="split") if job.system == "paper" else job for job in jobs
        ]  # the same on one degree
        names = [json.dumps([Path(job.traces).stem, *job[1:-1]]) for job in jobs]
        missing = {
            name: job
            for name, job in zip(names, jobs, strict=True)
            if name not in self._done and self._over.get(name, -1.0) < job.limit_s
        }
        results = map(seconds, missing.values()) if self._pool is None else self._pool.map(seconds, missing.values())
        for (name, job), found in zip(missing.items(), results, strict=True):
            given_up = found == math.inf
            (self._over if given_up else self._done)[name] = job.limit_s if given_up else found
            if self._path is not None:
                row = {"code": fingerprint(), "job": name, "step_s": None if given_up else found}
                with self._path.open("a") as file:
                    file.write(json.dumps(row | ({"over_s": job.limit_s} if given_up else {})) + "\n")
        return [self._done.get(name, math.inf) for name in names]


def compared(runs: Simulations, traces: str, gpus: int, eta: int, seeds: int, names: Sequence[str]) -> Comparison:
    """All systems of a cell."""
    any_job = Job(traces, gpus, eta, "", Setting(0, 0, 0.0), 0)

    def seconds_of(system: str, tried: Sequence[tuple[Setting, int]], limit_s: float) -> list[float]:
        return runs.of(
            any_job._replace(system=system, setting=each, seed=seed, limit_s=limit_s) for each, seed in tried
        )

    return compare(cell_of(any_job), list(disciplines(names, eta)), seeds, seconds_of)


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
    parser.add_argument("--gpus", nargs="*", type=int, default=list(GPUS))
    parser.add_argument("--etas", nargs="*", type=int, default=list(ETAS), choices=ETAS)
    parser.add_argument("--systems", nargs="*", default=[], choices=list(DISCIPLINES), help="default: all")
    parser.add_argument("--out", type=Path, help="file of results, which are not computed again")
    parser.add_argument("--processes", type=int, default=1)
    options = parser.parse_args(arguments)
    runs = Simulations(options.out, options.processes)
    sets = [str(path) for path in agent_turn_files(options.data)] + ["r2e"]
    sets = [name for name in sets if not options.sets or Path(name).stem in options.sets]
    ratios: dict[int, list[float]] = {eta: [] for eta in options.etas}
    fractions: dict[int, list[float]] = {}
    for gpus in options.gpus:
        for traces in sets:
            for eta in options.etas:
                found = compared(runs, traces, gpus, eta, options.seeds, options.systems)
                ratios[eta].append(found.ratio)
                if Path(traces).stem == BOUND_SET and eta in BOUND_GOALS:
                    fractions.setdefault(eta, []).append(found.bound_s / float(np.mean(found.ours.step_s)))
                print(f"{Path(traces).stem}: " + "\n".join(found.lines()), flush=True)
    emit("pipeline", figures_of(ratios, fractions), arguments=arguments, as_json=options.json)


if __name__ == "__main__":
    main()

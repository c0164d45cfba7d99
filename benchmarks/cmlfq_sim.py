"""C-MLFQ against its competitors in virtual time, on recorded agent trajectories.

Policies are the objects that the live plugin calls, engines take the seconds of `libra.hardware` for Qwen3-14B on A800 GPUs, and
the dispatcher is the same for all: order and placement differ. One iteration, objective makespan. The yardstick of each cell (trace
set x GPUs x load) is FIFO on the homogeneous layout that is best for FIFO there.

* *Best homogeneous*: of TP 1, 2, 4, 8, by the mean makespan of FIFO on planning seeds, which are not scored.
* *Planned*: of that one and some mixed ones, by the mean makespan of C-MLFQ on the planning seeds, so without the scored
  trajectories' lengths. A mixed layout is chosen only if it is 2 % faster. A layout that is 10 % behind on the first planning seed
  is not simulated on the others.
* Loads are trajectories per GPU. GPUs are counted so that engines of two GPUs are 8 to 48. The grid is 3 sizes x 3 loads, the
  cells with fewest trajectories first.
* ``cmlfq_again`` is C-MLFQ on the second pass over the same prompts, after a pass of other samples on the same engines. The common
  part of a prompt's samples correlates with that of the pass before by 0.8 (``--survives``): assumed, not measured. Sets with
  several samples per task have none left for a pass before; there it is `cmlfq` itself.
* Where a set has one sample per task, groups are drawn so that the ranks of their lengths correlate as those of real samples of
  one prompt (0.55, measured on tau's trials); ``--strangers`` draws them independently.

``python -m benchmarks.cmlfq_sim [--data DIR] [--quick] [--out FILE] [--processes N] --json``. With ``--out`` every simulation is
kept in FILE as it ends, and a later call runs it again only if its code has changed. Figures:

* ``makespan_over_fifo_<policy>``: policy on the planned layout over the yardstick, geometric mean over cells;
  ``homogeneous_over_fifo_<policy>``: the same on the best homogeneous layout; ``group_over_fifo_<policy>``: mean completion of
  groups on the planned layout.
* ``share_of_oracle_gain``: C-MLFQ's gain over the oracle's, summed over cells where the oracle gains 5 % or more.
* ``worst_vs_homogeneous_fifo``: the largest lower end, over cells, of the 95 % bootstrap interval of C-MLFQ's mean ratio to
  the yardstick: above 1, it is worse somewhere beyond the interval. ``share_of_oracle_gain_again`` is the share of `cmlfq_again`.
"""

from __future__ import annotations

import gc
import hashlib
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

import libra
from benchmarks.draws import draw_alike
from benchmarks.orderings import CompletedCalls, Oracle, Paper, Predictor
from benchmarks.report import Figure, command_parser, emit
from libra.errors import ConfigError
from libra.facts import VersionPublished
from libra.hardware import engine_seconds
from libra.hardware.engine_tables import EngineTables
from libra.planner.agent_turns import agent_turn_files
from libra.policy import CMLFQ, Fifo, Mlfq, Ordering
from libra.sim.simulation_options import fleet, slots_of
from libra.sim.simulator import Simulator
from libra.sim.workload import Workload, load_traces

GPU, MODEL, DEGREES = "a800", "qwen3-14b", (1, 2, 4, 8)
KINSHIP = 0.55
"""Intra-class correlation of lengths within a group, where the traces have one sample per task: as measured on tau's trials."""
FULL = tuple(
    sorted(((gpus, load) for gpus in (16, 48, 96) for load in (4, 12, 32)), key=lambda cell: cell[0] * cell[1])
)
QUICK = ((16, 4), (16, 12))
PLANNING_SEEDS = (1001, 1002)
SURVIVES = 0.8
"""Correlation of the common part of a prompt's samples between two passes."""
USED_BY = {
    "posterior": {"cmlfq", "cmlfq_again"},
    "cmlfq": {"cmlfq", "cmlfq_again", "predictor", "oracle"},
    "prefix_tree": {"paper"},
}
"""Folders and modules that only these policies run: changes there invalidate no result of others."""
BEHIND = 1.10
"""Largest makespan over the best on the first planning seed of a layout that stays a candidate."""
WORTH_MIXING = 0.02
"""Least gain for a mixed layout; two planning seeds do not resolve less."""
WORTH_IT = 0.05
"""Least gain of the oracle of which a share is scored."""
BOOTSTRAPS = 2000

Layout = Mapping[int, int]
POLICIES: dict[str, Callable[[Workload, int], Ordering]] = {
    "fifo": lambda workload, seed: Fifo(),
    "cmlfq": lambda workload, seed: CMLFQ(),
    "cmlfq_again": lambda workload, seed: CMLFQ(),
    "paper": lambda workload, seed: Paper(),
    "mlfq": lambda workload, seed: Mlfq(),
    "completed_calls": lambda workload, seed: CompletedCalls(),
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


class Job(NamedTuple):
    """One simulation: one iteration of gpus x load trajectories, drawn by ``seed`` from the file ``traces``."""

    traces: str
    kinship: float
    gpus: int
    load: int
    policy: str
    layout: tuple[tuple[int, int], ...]
    seed: int
    survives: float = SURVIVES

    @property
    def name(self) -> str:
        """Key of its result; files of one name count as one file."""
        cell = f"{Path(self.traces).stem}, kinship {self.kinship}, {self.gpus} GPUs x {self.load}"
        policy = f"{self.policy} {self.survives}" if self.policy == "cmlfq_again" else self.policy
        return f"{cell}, {layout_text(dict(self.layout))}, {policy}, {self.seed}"


@cache
def tables(tp: int) -> EngineTables:
    """Seconds of engines of ``tp`` GPUs."""
    return EngineTables(engine_seconds(GPU, MODEL, tp))


@cache
def group_size(traces: str) -> int:
    """Samples of one prompt: 4 where the set has as many of a task, else 8."""
    tasks = Counter(trace.task for trace in load_traces(Path(traces)))
    return 4 if max(tasks.values()) >= 4 else 8


@cache
def workload_of(traces: str, kinship: float, num: int, seed: int, earlier: float | None = None) -> Workload:
    """``num`` trajectories in groups of the set's own size; with ``earlier`` (see `draw`) groups have other numbers."""
    found, size = load_traces(Path(traces)), group_size(traces)
    drawn = draw_alike(
        found, num_groups=max(1, num // size), group_size=size, seed=seed, kinship=kinship, earlier=earlier,
        name="sim" if earlier is None else "before",
    )  # fmt: skip
    offset = 0 if earlier is None else max(1, num // size)
    plans = (plan._replace(prompt=f"p{plan.group}", group=plan.group + offset) for plan in drawn.trajectories)
    return drawn._replace(trajectories=tuple(plans))


def simulate(job: Job) -> tuple[float, float]:
    """Makespan and mean group completion in seconds."""
    gc.disable()  # a simulation allocates much and frees little: collected once, after it
    workload = workload_of(job.traces, job.kinship, job.gpus * job.load, job.seed)
    ordering = POLICIES[job.policy](workload, job.seed)
    if job.policy == "cmlfq_again":
        live(workload_of(job.traces, job.kinship, job.gpus * job.load, job.seed, job.survives), job, ordering)
        ordering.handle(VersionPublished(1))
    found = live(workload, job, ordering)
    gc.collect()
    return found


def live(workload: Workload, job: Job, ordering: Ordering) -> tuple[float, float]:
    """Makespan and mean group completion of one iteration under ``ordering``."""
    plans, layout = workload.trajectories, dict(job.layout)
    mean = sum(plan.final_tokens for plan in plans) // len(plans)
    engines = fleet(layout, {tp: tables(tp) for tp in layout}, {tp: slots_of(tables(tp), mean) for tp in layout})
    outcome = Simulator(workload, engines, ordering, seed=job.seed).run()
    return outcome.makespan_s, outcome.group_completion_s


@cache
def fingerprint(policy: str) -> str:
    """Digest of the code that a simulation of ``policy`` runs."""
    skipped = {name for name, users in USED_BY.items() if policy not in users}
    digest = hashlib.sha256()
    root = Path(libra.__file__).parent
    paths = [path for folder in ("policy", "sim", "hardware") for path in sorted((root / folder).rglob("*.py"))]
    paths += [Path(__file__).with_name(f"{name}.py") for name in ("draws", "orderings", "prefix_tree")]
    for path in paths:
        if not skipped.intersection((path.stem, path.parent.name)):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def alike(job: Job) -> Job:
    """The simulation with the same outcome as ``job``: with one bucket, `paper` is FIFO."""
    if job.policy == "paper" and len(job.layout) == 1:
        return job._replace(policy="fifo")
    if job.policy == "cmlfq_again" and (not job.kinship or group_size(job.traces) == 4):
        return job._replace(policy="cmlfq")
    return job


class Runs:
    """Finished simulations, in memory and, with ``path``, in a file of one JSON line each."""

    def __init__(self, path: Path | None, processes: int) -> None:
        self._path = path
        self._done: dict[str, tuple[float, float]] = {}
        self._pool = ProcessPoolExecutor(processes) if processes > 1 else None
        if path is not None and path.exists():
            for line in path.read_text().splitlines():
                row = json.loads(line)
                if row["code"] == fingerprint(row["policy"]):
                    self._done[row["name"]] = (row["makespan_s"], row["group_s"])

    def of(self, jobs: Sequence[Job]) -> list[tuple[float, float]]:
        """Makespan and mean group completion of each."""
        jobs = [alike(job) for job in jobs]
        missing = list(dict.fromkeys(job for job in jobs if job.name not in self._done))
        for job, (makespan_s, group_s) in zip(missing, self._results(missing), strict=True):
            self._done[job.name] = (makespan_s, group_s)
            if self._path is not None:
                row = {
                    "policy": job.policy,
                    "code": fingerprint(job.policy),
                    "name": job.name,
                    "makespan_s": makespan_s,
                    "group_s": group_s,
                }
                with self._path.open("a") as file:
                    file.write(json.dumps(row) + "\n")
        return [self._done[job.name] for job in jobs]

    def _results(self, jobs: Sequence[Job]) -> Iterator[tuple[float, float]]:
        return map(simulate, jobs) if self._pool is None else self._pool.map(simulate, jobs)


def best(runs: Runs, job: Job, layouts: Iterable[Layout], unless: float = 0.0) -> Layout:
    """The layout with the least mean makespan on the planning seeds; the first one, unless another is faster by ``unless``."""
    left = {tuple(sorted(layout.items())): 0.0 for layout in layouts}
    first = next(iter(left))
    for seed in PLANNING_SEEDS:
        if len(left) == 1:
            break
        took = runs.of([job._replace(layout=layout, seed=seed) for layout in left])
        left = {layout: left[layout] + makespan_s for layout, (makespan_s, _) in zip(left, took, strict=True)}
        left = {layout: total for layout, total in left.items() if total <= BEHIND * min(left.values())}
    fastest = min(left, key=left.__getitem__)
    return dict(first if first in left and left[fastest] > (1.0 - unless) * left[first] else fastest)


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


def score(runs: Runs, job: Job, seeds: int) -> Cell:
    """All policies on both layouts of the cell of ``job``."""
    homogeneous = best(runs, job._replace(policy="fifo"), homogeneous_layouts(job.gpus))
    mixed = mixed_layouts(job.gpus)
    planned = best(runs, job._replace(policy="cmlfq"), [homogeneous, *mixed], WORTH_MIXING)
    makespan: dict[tuple[str, str], list[float]] = {}
    group: dict[tuple[str, str], list[float]] = {}
    places = [
        (policy, kind, tuple(sorted(layout.items())))
        for policy in POLICIES
        for kind, layout in (("homogeneous", homogeneous), ("planned", planned))
    ]
    found = iter(
        runs.of(
            [job._replace(policy=policy, layout=at, seed=seed) for policy, _, at in places for seed in range(seeds)]
        )
    )
    for policy, kind, _ in places:
        results = [next(found) for _ in range(seeds)]
        makespan[policy, kind] = [makespan_s for makespan_s, _ in results]
        group[policy, kind] = [group_s for _, group_s in results]
    name = f"{Path(job.traces).stem}, {job.gpus} GPUs, {job.load} per GPU"
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
    for policy, name in (("cmlfq", "share_of_oracle_gain"), ("cmlfq_again", "share_of_oracle_gain_again")):
        gains = [
            (1 - cell.ratios("oracle", "planned").mean(), 1 - cell.ratios(policy, "planned").mean()) for cell in cells
        ]
        scored = [(oracle, ours) for oracle, ours in gains if oracle >= WORTH_IT]
        if scored:
            share = sum(ours for _, ours in scored) / sum(oracle for oracle, _ in scored)
            found[name] = Figure(float(share), "ratio", "higher", 0.5)
    worst = max(interval(cell.ratios("cmlfq", "planned"))[0] for cell in cells)
    found["worst_vs_homogeneous_fifo"] = Figure(worst, "ratio", "lower", 1.0)
    for policy in POLICIES:
        for prefix, kind in (("makespan_over_fifo", "planned"), ("homogeneous_over_fifo", "homogeneous")):
            mean = math.exp(float(np.mean([math.log(cell.ratios(policy, kind).mean()) for cell in cells])))
            found[f"{prefix}_{policy}"] = Figure(mean, "ratio", "lower")
        groups = math.exp(float(np.mean([math.log(cell.group_ratios(policy, "planned").mean()) for cell in cells])))
        found[f"group_over_fifo_{policy}"] = Figure(groups, "ratio", "lower")
    return found


def chosen(cells: Sequence[str]) -> list[tuple[int, int]]:
    """Cells of the grid by name; ConfigError for one that is not in it."""
    names = {f"{gpus}x{load}": (gpus, load) for gpus, load in FULL}
    unknown = sorted(set(cells) - set(names))
    if unknown:
        raise ConfigError(f"--cells {' '.join(unknown)}: not in the grid; it has {' '.join(names)}")
    return [names[cell] for cell in cells]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run it."""
    parser = command_parser("cmlfq_sim", __doc__, data=True)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--sets", nargs="*", help="file names without .csv; default: all in DIR/agent_turns")
    parser.add_argument("--cells", nargs="*", help="GPUSxLOAD, e.g. 16x4 96x32; default: the whole grid")
    parser.add_argument("--quick", action="store_true", help="two cells of each set, three seeds")
    parser.add_argument("--out", type=Path, help="file of results, which are not computed again")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--survives", type=float, default=SURVIVES, help="see cmlfq_again above; 0 to 1")
    parser.add_argument("--strangers", action="store_true", help="groups of unrelated trajectories")
    options = parser.parse_args(arguments)
    seeds = min(3, options.seeds) if options.quick else options.seeds
    runs = Runs(options.out, options.processes)
    cells = []
    for gpus, load in chosen(options.cells) if options.cells else QUICK if options.quick else FULL:
        for path in agent_turn_files(options.data):
            if options.sets and path.stem not in options.sets:
                continue
            began = time.perf_counter()
            job = Job(str(path), 0.0 if options.strangers else KINSHIP, gpus, load, "fifo", (), 0, options.survives)
            cells.append(score(runs, job, seeds))
            print(shown(cells[-1], time.perf_counter() - began), flush=True)
    emit("cmlfq_sim", figures_of(cells), arguments=arguments, as_json=options.json)


if __name__ == "__main__":
    main()

"""Replanning against the best static split, in virtual time, while trajectories drift as they were recorded.

32 A800 GPUs (four nodes), Qwen3-14B, batches of groups of 16 drawn from consecutive windows of 14 tasks of the mini-SWE-agent
trace in its recorded order, cut at 40,960 tokens: 18 iterations, one pass. Within a window groups are drawn so that lengths of
one group correlate as those of one prompt do (0.55). **Speeds are emulated**: the simulator under C-MLFQ uses the seconds of
`libra.hardware` for engines, and those of the cost model for training, with gradient checkpointing and sharded over its GPUs.

* Static: every number of training nodes that training fits on, times every choice of one TP degree per rollout node. The one
  with most tokens per second **in hindsight** is the yardstick. One that is 10 % behind after three iterations is simulated no
  further, except with ``--full``.
* Replanning: starts with a plan for guessed lengths (`GUESS`), sees each iteration when it has ended, replans by
  `benchmarks.plan_loop` with its hysteresis, and pays for each change: all GPUs wait 18.8 s, which Libra reports for both
  directions together (10.8 s and 8.0 s, Qwen3-14B on A800, arXiv:2606.03077 v2).
* Sharing (staleness bound 0): all GPUs but a node of core trainers roll out until the batch is complete; then all train. Every
  such step pays the same 18.8 s. `libra run` changes no role within an iteration. Always sharing, with the engines that are best
  in hindsight, is evaluated too.

A step is rollout + training + update at bound 0, max(rollout, training of the batch before) + update at bound 1, alike for
all (the simulator's gates would let tails of two iterations overlap at bound 1; no side gets that here).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks.cmlfq_sim import KINSHIP, layout_text
from benchmarks.draws import draw_alike
from benchmarks.plan_loop import PlanLoop, Sharing, proposal
from benchmarks.report import Figure
from libra.hardware import engine_seconds, load_gpu, load_shape
from libra.hardware.engine_tables import EngineTables
from libra.planner import Planner, PlanningSnapshot
from libra.planner.cost import Layout as TrainingLayout
from libra.planner.cost import TrajectoryTotals as Lengths
from libra.planner.cost import training_table
from libra.planner.replan import Replanner
from libra.policy import CMLFQ
from libra.sim.simulation_options import fleet, slots_of
from libra.sim.simulator import Simulator
from libra.sim.workload import Trace, TurnPlan, Workload, load_traces

GPU, MODEL, DEGREES = "A800-80G", "Qwen3-14B", (1, 2, 4, 8)
NODE, NODES = 8, 4
WINDOW, GROUP_SIZE = 14, 16
MAX_CONTEXT_TOKENS = 40_960
"""Longest context, as in the Libra paper."""
CHANGE_S = 10.8 + 8.0
"""Libra's reported seconds from training to rollout, and back."""
UPDATE_S = 10.0
GROUPS, GOAL = 16, 1.25
TRIED, BEHIND_FRAC = 3, 0.1
TRACE = "agent_turns/mini_swe_gemini3.csv"
GUESS = {"prompt": 2000.0, "p50": 8192.0, "p99": 32768.0, "observed": 12000.0, "turns": 30.0, "tool_s": 60.0}
"""A user's guess of the trajectories before the first; round numbers, not fitted."""

Layout = Mapping[int, int]


@dataclass(slots=True)
class Course:
    """Batches in recorded order, and cached seconds of their phases on any layout."""

    workloads: list[Workload]
    tables: Mapping[int, EngineTables]
    slots: Mapping[int, int]
    rollouts: dict[tuple[int, tuple[tuple[int, int], ...]], float] = field(default_factory=dict)
    trainings: dict[int, Mapping[int, float]] = field(default_factory=dict)

    @classmethod
    def of(cls, data: Path, groups: int, iterations: int | None) -> Course:
        """The trace under ``data``, in its order, with so many groups in a batch; at most so many iterations."""
        traces = [cut(trace) for trace in load_traces(data / TRACE)]
        windows = [traces[at : at + WINDOW] for at in range(0, len(traces) - WINDOW + 1, WINDOW)][:iterations]
        workloads = [
            draw_alike(window, num_groups=groups, group_size=GROUP_SIZE, seed=number, kinship=KINSHIP)
            for number, window in enumerate(windows)
        ]
        tables = {tp: EngineTables(engine_seconds(GPU, MODEL, tp)) for tp in DEGREES}
        usual = int(GUESS["prompt"] + GUESS["p50"] + GUESS["observed"])
        return cls(workloads, tables, {tp: slots_of(tables[tp], usual) for tp in DEGREES})

    def lengths(self, k: int) -> Lengths:
        """Trajectories of an iteration, as the planner takes them."""
        plans = self.workloads[k].trajectories
        rows = [
            (p.prompt_tokens, p.new_tokens, sum(t.payload_tokens for t in p.turns), len(p.turns), sum(t.tool_s for t in p.turns))
            for p in plans
        ]  # fmt: skip
        return Lengths(*np.array(rows, dtype=np.float64).T.copy())

    def tokens(self) -> int:
        """Generated in all iterations."""
        return sum(plan.new_tokens for workload in self.workloads for plan in workload.trajectories)

    def rollout_s(self, k: int, layout: Layout) -> float:
        """Seconds of an iteration's rollout on these engines, simulated."""
        name = (k, tuple(sorted((tp, number) for tp, number in layout.items() if number)))
        if name not in self.rollouts:
            engines = fleet(dict(name[1]), self.tables, self.slots)
            self.rollouts[name] = Simulator(self.workloads[k], engines, CMLFQ(), seed=k).run().makespan_s
        return self.rollouts[name]

    def train_s(self, k: int, gpus: int) -> float:
        """Seconds of an iteration's training on so many GPUs; infinite if it does not fit."""
        if k not in self.trainings:
            tokens = self.lengths(k).final_context_tokens
            counts = [NODE * nodes for nodes in range(1, NODES + 1)]
            costs = training_table(load_gpu(GPU), load_shape(MODEL), tokens, counts, TRAINING)
            self.trainings[k] = {gpus: cost.step_s if cost.fits else float("inf") for gpus, cost in costs.items()}
        return self.trainings[k][gpus]

    def total_s(self, layouts: list[tuple[int, Layout, float]], eta: int) -> float:
        """Seconds of a run whose iterations had these training GPUs, engines and extra seconds."""
        phases = [(self.rollout_s(k, engines), self.train_s(k, gpus)) for k, (gpus, engines, _) in enumerate(layouts)]
        extra_s = sum(extra for *_, extra in layouts) + UPDATE_S * len(layouts)
        if eta == 0:
            return extra_s + sum(rollout + training for rollout, training in phases)
        rollouts, trainings = [r for r, _ in phases], [t for _, t in phases]
        overlapped = [max(r, t) for r, t in zip(rollouts[1:], trainings[:-1], strict=True)]
        return extra_s + rollouts[0] + sum(overlapped) + trainings[-1]


TRAINING = TrainingLayout()


def cut(trace: Trace) -> Trace:
    """The trace up to the turn whose end would pass `MAX_CONTEXT_TOKENS`; its last turn calls no tool."""
    context, turns = trace.prompt_tokens, list[TurnPlan]()
    for turn in trace.turns:
        if turns and context + turn.new_tokens > MAX_CONTEXT_TOKENS:
            break
        turns.append(turn)
        context += turn.new_tokens + turn.payload_tokens
    turns[-1] = turns[-1]._replace(tool="", status="", payload_tokens=0, tool_s=0.0)
    return trace._replace(turns=tuple(turns))


def node_layouts(nodes: int) -> list[Layout]:
    """Every choice of one TP degree for each of so many nodes, as engines by degree."""
    found = []
    for degrees in itertools.combinations_with_replacement(DEGREES, nodes):
        found.append({tp: degrees.count(tp) * NODE // tp for tp in sorted(set(degrees))})
    return found


@dataclass(frozen=True, slots=True)
class Played:
    """A run of the whole course: name, seconds, changes, and training GPUs and engines of a static one."""

    name: str
    total_s: float
    changes: int = 0
    way: tuple[int, Layout] | None = None


def best_static(course: Course, eta: int, share: bool = False, full: bool = False) -> Played:
    """The best of all static splits in hindsight; with ``share``, of all layouts whose engines train too.

    Unless ``full``, one that after the first `TRIED` iterations is `BEHIND_FRAC` behind is played no further.
    """
    num, extra_s = len(course.workloads), CHANGE_S if share else 0.0
    ways = [
        (NODES * NODE if share else train * NODE, engines)
        for train in range(1, 2 if share else NODES)
        for engines in node_layouts(NODES - train)
    ]
    ways = [way for way in ways if all(np.isfinite(course.train_s(k, way[0])) for k in range(num))]

    def total_s(way: tuple[int, Layout], iterations: int) -> float:
        return course.total_s([(*way, extra_s)] * iterations, eta)

    tried = min(TRIED, num)
    least_s = min(total_s(way, tried) for way in ways)
    kept = [way for way in ways if full or total_s(way, tried) <= least_s * (1 + BEHIND_FRAC)]
    kind = "layouts that always share" if share else "static splits"
    print(f"  eta {eta}: {len(kept)} of {len(ways)} {kind} are played to their end", flush=True)
    gpus, engines = best = min(kept, key=lambda way: total_s(way, num))
    return Played(f"{gpus} train, {layout_text(engines)} (of {len(ways)})", total_s(best, num), way=best)


def followed_s(course: Course, static: Played) -> float:
    """Seconds at bound 1 if the split were right for every single batch: known before it, of GPUs that divide, changed for nothing.

    No way of following the drift by the split alone is quicker, where phases take GPU-seconds as those of ``static`` do.
    """
    assert static.way is not None
    gpus, engines = static.way
    num, all_gpus = len(course.workloads), NODES * NODE
    rollout_gpu_s = [(all_gpus - gpus) * course.rollout_s(k, engines) for k in range(num)]
    train_gpu_s = [gpus * course.train_s(k, gpus) for k in range(num)]
    both = sum(r + t for r, t in zip(rollout_gpu_s[1:], train_gpu_s[:-1], strict=True)) / all_gpus
    return course.rollout_s(0, engines) + both + course.train_s(num - 1, gpus) + UPDATE_S * num


def guess(num: int) -> Lengths:
    """Log-normal trajectories by `GUESS`."""
    from statistics import NormalDist

    normal = NormalDist()
    spread = np.log(GUESS["p99"] / GUESS["p50"]) / normal.inv_cdf(0.99)
    tokens = GUESS["p50"] * np.exp(spread * np.array([normal.inv_cdf((i + 0.5) / num) for i in range(num)]))
    return Lengths.of(
        np.full(num, GUESS["prompt"]), tokens, observation_tokens=GUESS["observed"], num_turns=GUESS["turns"],
        tool_wait_s=GUESS["tool_s"],
    )  # fmt: skip


def replanned(course: Course, eta: int, share: bool, say: bool = True) -> Played:
    """The course with replanning after each iteration."""
    snapshot = PlanningSnapshot(
        load_gpu(GPU), load_shape(MODEL), NODES * NODE, guess(len(course.workloads[0].trajectories)), DEGREES, NODE, TRAINING, eta,
        UPDATE_S, min_train_gpus=NODE, min_rollout_gpus=NODE,
    )  # fmt: skip
    sharing = Sharing(NODE, 0, CHANGE_S) if share else None
    deployed = proposal(snapshot, Planner(), sharing).deployed
    loop = PlanLoop(snapshot, deployed, Replanner(first_cost_s=CHANGE_S), sharing)
    num, changes, change_s = len(course.workloads), 0, 0.0
    history: list[tuple[int, Layout, float]] = []
    for k in range(num):
        extra_s = change_s + (CHANGE_S if deployed.shared_gpus else 0.0)
        history.append((deployed.train_gpus, deployed.engines, extra_s))
        rollout_s, train_s = course.rollout_s(k, deployed.engines), course.train_s(k, deployed.train_gpus)
        change_s = 0.0
        outcome = loop.after(k, rollout_s, train_s, course.lengths(k), num - k - 1)
        considered = outcome.considered
        if considered.accepted:
            loop.replanner.changed(CHANGE_S)
            change_s, changes = CHANGE_S, changes + 1
            deployed = outcome.proposed.deployed
        if say:
            print(
                f"  eta {eta}, iteration {k:2d}: rollout {rollout_s:5.0f} s, training {train_s:4.0f} s on {history[-1][0]} "
                f"({layout_text(history[-1][1])}); proposed {considered.train_gpus} train, "
                f"{layout_text(dict(considered.engines))}, "
                f"{100 * considered.gain_frac:+.1f} %: {'ACCEPTED, ' if considered.accepted else ''}{considered.reason}",
                flush=True,
            )
    return Played(f"{changes} changes", course.total_s(history, eta), changes)


def compare(data: Path, groups: int, iterations: int | None, full: bool) -> dict[str, Figure]:
    """The figures of one size of batch."""
    course = Course.of(data, groups, iterations)
    print(
        f"{len(course.workloads)} iterations of {groups * GROUP_SIZE} trajectories, {course.tokens():,} tokens",
        flush=True,
    )
    shared, split, ahead = (replanned(course, *way) for way in ((0, True), (0, False), (1, False)))
    static, static_ahead = best_static(course, 0, full=full), best_static(course, 1, full=full)
    always = best_static(course, 0, share=True, full=full)
    for name, way in (
        ("eta 0: replanned, GPUs may do both", shared), ("eta 0: replanned, each GPU in one pool", split),
        ("eta 0: best static split", static), ("eta 0: always sharing, best engines", always),
        ("eta 1: replanned", ahead), ("eta 1: best static split", static_ahead),
    ):  # fmt: skip
        print(f"{name}: {course.tokens() / way.total_s:.0f} tokens/s, {way.total_s:.0f} s, {way.name}", flush=True)
    suffix = "" if groups == GROUPS else f"_{groups * GROUP_SIZE}"
    return {
        f"over_static{suffix}": Figure(static.total_s / shared.total_s, "ratio", "higher", GOAL),
        f"over_static_split_only{suffix}": Figure(static.total_s / split.total_s, "ratio", "higher"),
        f"over_static_eta1{suffix}": Figure(static_ahead.total_s / ahead.total_s, "ratio", "higher"),
        f"over_static_eta1_bound{suffix}": Figure(
            static_ahead.total_s / followed_s(course, static_ahead), "ratio", "higher"
        ),
        f"over_always_sharing{suffix}": Figure(always.total_s / shared.total_s, "ratio", "higher"),
        f"over_static_of_eta1{suffix}": Figure(static_ahead.total_s / shared.total_s, "ratio", "higher"),
    }

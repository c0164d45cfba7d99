"""Long single generations in virtual time: parts that may change engine with their KV, over whole groups dealt to engines.

Two jobs as Seer reports them (arXiv:2511.14617 v3), a quarter of each: 800 requests in groups of 8 on 8 H800, mean 22,386 and at
most 65,536 tokens (Moonlight), and 2,400 in groups of 16 on four engines of 8, 7,615 and 40,960 (Qwen2-VL-72B). The cost model has
dense models only: Qwen2.5-7B stands in for Moonlight (its KV memory holds 0.96 million tokens on a GPU, about three quarters of
Moonlight's), Qwen2.5-72B for the language model of Qwen2-VL-72B, whose sizes it has. Policies are the objects that the live plugin
calls.

* ``static``: whole groups dealt to engines in turn, every turn in one piece; engines start what fits and preempt the newest when
  memory is full, as vLLM does. Its ratio of seconds to those of the next ones is scored, geometric mean over seeds.
* ``arrival``, ``seer``, ``cmlfq``, ``oracle``: turns in parts of ``--chunk`` tokens (`rollout.chunk_tokens`), KV of parked ones in
  host memory (1 TB per 8 GPUs), from where it takes 0.3 s and 1/20 GB/s; fifo, Seer's order, C-MLFQ, and C-MLFQ's rule with the
  true lengths. All engines, static's too, have a slot for every request: memory decides how many run. There is one iteration, so
  C-MLFQ begins without data; no speculation.
* With ``--speculate ACCEPTED DRAFTED`` a last system: ``cmlfq`` on engines that draft ``DRAFTED`` tokens of each sequence, of which
  ``ACCEPTED`` are accepted, wherever a step that verifies them is sooner per token. Drafts cost nothing. Not in the figures above;
  acceptance of our own engine: `benchmarks.speculation`.
* Lengths are lognormal, cut at the maximum, with the reported mean. *Fitted*: their spread (``sigma``) and their correlation within
  a group (``kinship``), such that static's tail share is near the one that Seer reports for veRL. Prompts have 512 tokens: assumed.
* Tail share: share of the seconds in which the last tenth of the requests end. Seer's includes speculation.

Figures: ``over_static_moonlight``, ``over_static_qwen2vl``: of ``cmlfq``. ``share_of_oracle_gain``: seconds that C-MLFQ saves of
static's over those that the oracle saves, summed over both jobs; ``share_of_oracle_gain_by_order``: of those that it saves over
``arrival``.

``python -m benchmarks.divided [--seeds N] [--chunk TOKENS] [--speculate ACCEPTED DRAFTED] [--jobs ...] --json``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

from benchmarks.orderings import DealtGroups, Oracle, SeerOrder, apart
from benchmarks.report import Figure, command_parser, emit
from libra.hardware import EngineSeconds, engine_seconds, load_gpu, load_shape
from libra.hardware.engine_tables import EngineTables, HostPool
from libra.policy import CMLFQ, Fifo, Ordering
from libra.sim.simulation_options import SimulationOptions, SimulationResult, fleet
from libra.sim.simulator import Simulator
from libra.sim.workload import TrajectoryPlan, TurnPlan, Workload
from libra.types import NO_TOOL

GPU = "H800-80G"
PROMPT = 512
CHUNK = 2048
SLOWEST = 0.1
"""Share of the requests that end in the tail."""
HOST_BYTES_PER_GPU = 125e9
FETCH_S, FETCH_BYTES_PER_S = 0.3, 20e9
SPECULATING = "cmlfq, speculating"
OVER_STATIC = {"cmlfq": "over_static_{}", SPECULATING: "over_static_{}_speculating"}
"""Figures of systems."""
SYSTEMS = ("static", "arrival", "seer", "cmlfq", "oracle")


class Job(NamedTuple):
    """A job; ``tail_verl`` and ``tail_seer``: tail shares that Seer reports."""

    model: str
    tp: int
    engines: int
    requests: int
    group_size: int
    mean_tokens: int
    max_tokens: int
    sigma: float
    kinship: float
    tail_verl: float
    tail_seer: float
    goal: float


JOBS: Mapping[str, Job] = {
    "moonlight": Job("Qwen2.5-7B", 1, 8, 800, 8, 22_386, 65_536, 0.9, 0.8, 1817 / 3910, 278 / 2181, 1.5),
    "qwen2vl": Job("Qwen2.5-72B-Instruct", 8, 4, 2400, 16, 7_615, 40_960, 1.2, 0.8, 2301 / 3957, 123 / 1922, 1.75),
}


class Run(NamedTuple):
    """Of one simulation: seconds, tail share, and its figures."""

    seconds: float
    tail: float
    result: SimulationResult


def lengths(job: Job, seed: int) -> np.ndarray:
    """Generated tokens of every request, group by group; (requests,) integers."""
    rng = np.random.default_rng([seed, 0xD1])
    groups = np.repeat(rng.standard_normal(job.requests // job.group_size), job.group_size)
    own = rng.standard_normal(job.requests)
    normal = math.sqrt(job.kinship) * groups + math.sqrt(1.0 - job.kinship) * own
    low, high = 0.0, math.log(job.max_tokens)
    for _ in range(50):  # the median with which lengths that are cut have the reported mean
        middle = 0.5 * (low + high)
        tokens = np.clip(np.exp(middle + job.sigma * normal), 1, job.max_tokens)
        low, high = (middle, high) if tokens.mean() < job.mean_tokens else (low, middle)
    return tokens.astype(int)


def workload_of(job: Job, seed: int) -> Workload:
    """One iteration of single turns."""
    plans = []
    for index, tokens in enumerate(lengths(job, seed).tolist()):
        turn = TurnPlan(tokens, "", NO_TOOL, 0, 0.0)
        plans.append(TrajectoryPlan(0, *divmod(index, job.group_size), PROMPT, (turn,)))
    return Workload("divided", tuple(plans))


@cache
def _tables(job: Job, speculation: Speculation | None = None) -> EngineTables:
    plain = engine_seconds(load_gpu(GPU), load_shape(job.model), job.tp)
    return EngineTables(plain if speculation is None else Speculating(plain, speculation))


class Speculation(NamedTuple):
    """Tokens that a step accepts and drafts for each sequence, beside the one that every step gives."""

    accepted: float
    drafted: float


class Speculating:
    """`EngineSeconds` per token of an engine that verifies drafts where that is sooner."""

    def __init__(self, plain: EngineSeconds, speculation: Speculation) -> None:
        self._plain, self._speculation = plain, speculation
        self.tp, self.kv_capacity_tokens = plain.tp, plain.kv_capacity_tokens

    def decode_step_s(self, num_sequences: int, context_tokens: int) -> float:
        """Seconds in which each sequence gets a token, of a step that gives more than one to some."""
        accepted, drafted = self._speculation
        verified = self._plain.decode_step_s(round(num_sequences * (1.0 + drafted)), context_tokens) / (1.0 + accepted)
        return min(self._plain.decode_step_s(num_sequences, context_tokens), verified)

    def prefill_s(self, new_tokens: int, past_tokens: int) -> float:
        """Seconds of a prefill."""
        return self._plain.prefill_s(new_tokens, past_tokens)


def simulate(job: Job, system: str, seed: int, chunk: int, speculation: Speculation | None = None) -> Run:
    """One job under one system."""
    workload, tables = workload_of(job, seed), _tables(job, speculation)
    engines = fleet({job.tp: job.engines}, {job.tp: tables}, {job.tp: job.requests})
    ordering: Ordering
    if system == "static":
        ordering = DealtGroups([spec.name for spec in engines])
        engines, options = apart(engines, job.requests), SimulationOptions(preempts=True)
    else:
        token_bytes = load_shape(job.model).kv_bytes_per_token(job.tp)
        capacity = int(HOST_BYTES_PER_GPU * job.engines / token_bytes)
        host = HostPool(capacity, FETCH_S, token_bytes / FETCH_BYTES_PER_S)
        options = SimulationOptions(chunk_tokens=chunk, host=host)
        ordering = {"arrival": Fifo, "seer": SeerOrder, "cmlfq": CMLFQ, "oracle": lambda: Oracle(workload.totals())}[
            system
        ]()
    simulator = Simulator(workload, engines, ordering, seed=seed, options=options)
    result = simulator.run()
    ends = sorted(simulator.record.ended_s.values())
    return Run(ends[-1], 1.0 - ends[math.ceil(len(ends) * (1.0 - SLOWEST)) - 1] / ends[-1], result)


def figures_of(runs: Mapping[str, Mapping[str, Sequence[Run]]]) -> dict[str, Figure]:
    """The figures; ``runs`` by job and system, one per seed."""
    found: dict[str, Figure] = {}
    saved = dict.fromkeys(("cmlfq", "oracle"), 0.0)
    by_order = dict(saved)
    for name, systems in runs.items():
        seconds = {system: np.array([run.seconds for run in each]) for system, each in systems.items()}
        for system, figure in OVER_STATIC.items():
            if system in seconds:
                ratio = math.exp(float(np.log(seconds["static"] / seconds[system]).mean()))
                goal = JOBS[name].goal if system == "cmlfq" else None
                found[figure.format(name)] = Figure(ratio, "ratio", "higher", goal)
        for system in saved:
            saved[system] += float((1.0 - seconds[system] / seconds["static"]).mean())
            by_order[system] += float((1.0 - seconds[system] / seconds["arrival"]).mean())
    found["share_of_oracle_gain"] = Figure(saved["cmlfq"] / saved["oracle"], "ratio", "higher", 0.5)
    found["share_of_oracle_gain_by_order"] = Figure(by_order["cmlfq"] / by_order["oracle"], "ratio", "higher")
    return found


def lines(name: str, systems: Mapping[str, Sequence[Run]]) -> list[str]:
    """A job as text: seconds, ratio to static, tail share, and what the engines did."""
    job, found = JOBS[name], []
    for system, each in systems.items():
        ratios = [a.seconds / b.seconds for a, b in zip(systems["static"], each, strict=True)]
        half = 1.96 * float(np.std(ratios, ddof=1)) / math.sqrt(len(ratios)) if len(ratios) > 1 else 0.0
        rows = [run.result for run in each]
        found.append(
            f"  {system:18s}{np.mean([run.seconds for run in each]):7.0f} s  {np.mean(ratios):.3f} +- {half:.3f} times static  "
            f"tail {np.mean([run.tail for run in each]):.2f}  busy {np.mean([row.busy_frac for row in rows]):.2f}  "
            f"{np.mean([row.moves for row in rows]):.0f} moves, {np.mean([row.preempted for row in rows]):.0f} preempted, "
            f"{np.mean([row.fetched_tokens for row in rows]) / 1e6:.1f} M tokens fetched, "
            f"{np.mean([row.recomputed_tokens for row in rows]) / 1e6:.1f} M computed again"
        )
    reported = f"Seer reports a tail of {job.tail_verl:.2f} for veRL and {job.tail_seer:.2f} for itself"
    return [
        f"{name}: {job.requests} requests of {job.mean_tokens} tokens, {job.engines} x TP{job.tp}; {reported}",
        *found,
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run it."""
    parser = command_parser("divided", __doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--chunk", type=int, default=CHUNK, help=f"rollout.chunk_tokens (default {CHUNK})")
    parser.add_argument("--speculate", nargs=2, type=float, metavar=("ACCEPTED", "DRAFTED"))
    parser.add_argument("--jobs", nargs="*", default=list(JOBS), choices=list(JOBS))
    options = parser.parse_args(arguments)
    runs = {}
    for name in options.jobs:
        runs[name] = {
            system: [simulate(JOBS[name], system, seed, options.chunk) for seed in range(options.seeds)]
            for system in SYSTEMS
        }
        if options.speculate:
            speculation = Speculation(*options.speculate)
            runs[name][SPECULATING] = [
                simulate(JOBS[name], "cmlfq", seed, options.chunk, speculation) for seed in range(options.seeds)
            ]
        print("\n".join(lines(name, runs[name])), flush=True)
    print(
        "fitted: spread and correlation of lengths, to the tail share that is reported for veRL; seconds are the cost model's"
    )
    emit("divided", figures_of(runs), arguments=arguments, as_json=options.json)


if __name__ == "__main__":
    main()

"""When slots are released on engines of different speed that exchange KV: ``python -m benchmarks.uneven_engines --json``.

Virtual time, three iterations of eight trajectories per engine, C-MLFQ without data at first, quanta of 256 tokens. Engines have
the seconds of Qwen3-8B on an A800, times their slowness, few slots, and memory for two or six mean contexts, at least for the
longest; KV of parked ones is in host memory (20 ms and 2 us a token). Paired by seed, seconds until the last trajectory ends:

* ``kept``: whoever ends a quantum keeps its slot while no other trajectory waits for one;
* ``memory``: it also releases the slot while contexts fill 0.9 of one engine's memory, or shares of two that differ by 0.1;
* ``seconds``: the second condition is that one engine ends before 0.8 of the seconds until the last one does
  (`libra.policy.strain`);
* ``counted``: as ``seconds``, but contexts count in full while their tools run, so that fewer are under way.

Tools run within the slots of generations; with ``--apart`` in slots of their own, of which there are enough.

Figures: ``seconds_over_RULE_FLEET``, geometric mean over traces, slots, memory and seeds; below 1 the live rule is quicker.
``most_over_kept_FLEET``: the largest mean over seeds of one case of traces, slots and memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import cache
from itertools import product
from pathlib import Path
from unittest.mock import patch

import numpy as np

from benchmarks.draws import draw_alike, synthetic
from benchmarks.report import Figure, command_parser, emit
from libra.hardware import engine_seconds, load_gpu, load_shape
from libra.hardware.engine_tables import EngineTables, HostPool
from libra.policy import CMLFQ, strain
from libra.policy.engine_loads import Loads
from libra.policy.fleet import Fleet, Host
from libra.sim import EngineSpec, Workload
from libra.sim.simulation_options import SimulationOptions
from libra.sim.simulator import Simulator
from libra.sim.workload import load_traces

TRACES = Path(__file__).parent / "data" / "agent_turns" / "tau_airline_gpt4o.csv"
FLEETS = {"alike": (1, 1), "1_2": (1, 2), "1_4": (1, 4), "1_1_2_2": (1, 1, 2, 2), "1_2_4_8": (1, 2, 4, 8)}
GROUP, ITERATIONS, PER_ENGINE = 4, 3, 8
SLOTS, MEAN_CONTEXTS = (2, 4, 8), (2, 6)
HOST = HostPool(10**9, 0.02, 2e-6)


class Slow:
    """The seconds of an engine that is so many times as slow, with memory for ``kv_tokens``."""

    tp = 1

    def __init__(self, slowness: float, kv_tokens: int) -> None:
        self._plain = engine_seconds(load_gpu("A800-80G"), load_shape("Qwen3-8B"), 1)
        self._slowness, self.kv_capacity_tokens = slowness, kv_tokens

    def decode_step_s(self, num_sequences: int, context_tokens: int) -> float:
        """Seconds of a step."""
        return self._slowness * self._plain.decode_step_s(num_sequences, context_tokens)

    def prefill_s(self, new_tokens: int, past_tokens: int) -> float:
        """Seconds of a prefill."""
        return self._slowness * self._plain.prefill_s(new_tokens, past_tokens)


@cache
def tables(slowness: float, kv_tokens: int) -> EngineTables:
    """Of `Slow`."""
    return EngineTables(Slow(slowness, kv_tokens))


def kept(fleet: Fleet, loads: Loads) -> bool:
    """A slot is kept."""
    return False


def by_memory(fleet: Fleet, loads: Loads) -> bool:
    """Engines are full, or unevenly filled."""
    shares = [host.context_tokens / host.open_tokens for host in fleet.exchanging]
    return max(shares) > strain.FULL or max(shares) - min(shares) > strain.UNEVEN


RULES: dict[str, Callable[[Fleet, Loads], bool]] = {
    "kept": kept,
    "memory": by_memory,
    "counted": strain.strained,
    "seconds": strain.strained,
}
OTHERS = ("kept", "memory", "counted")
MOST = 1.02
"""Goal of a case of traces, slots and memory, over keeping slots."""


def workload_of(traces: str, num: int, seed: int) -> Workload:
    """``num`` trajectories in each iteration: recorded ones of one kind of task, or made up with heavy tails."""
    if traces == "synthetic":
        return synthetic(num, turns=6, seed=seed, iterations=ITERATIONS, group_size=GROUP)
    return draw_alike(
        load_traces(TRACES), num_groups=num // GROUP, group_size=GROUP, seed=seed, iterations=ITERATIONS, kinship=0.55
    )


def seconds(
    rule: str,
    workload: Workload,
    slowness: Sequence[float],
    slots: int,
    contexts: int,
    seed: int,
    *,
    apart: bool = False,
) -> float:
    """Until the last trajectory ends, under one of `RULES`; ``apart``: tools hold no slots of generations."""
    finals = [plan.final_tokens for plan in workload.trajectories]
    kv_tokens = int(max(1.05 * max(finals), contexts * sum(finals) / len(finals)))
    engines = [
        EngineSpec(f"e{k}", 1, slots, tables(each, kv_tokens), f"tp1-x{each}") for k, each in enumerate(slowness)
    ]
    tools = frozenset() if apart else frozenset(turn.tool for plan in workload.trajectories for turn in plan.turns)
    options = SimulationOptions(chunk_tokens=256, host=HOST, inline_tools=tools)
    with patch("libra.policy.dispatcher.strained", RULES[rule]), ExitStack() as stack:
        if rule == "counted":
            stack.enter_context(patch.object(Host, "open_tokens", property(lambda host: host.spec.kv_tokens)))
        return Simulator(workload, engines, CMLFQ(), seed=seed, options=options).run().makespan_s


def ratios(fleet: str, seeds: int, *, apart: bool = False) -> np.ndarray:
    """Logarithms of the seconds of the live rule over those of `OTHERS`; (cases, seeds, 3)."""
    slowness, found = FLEETS[fleet], []
    for traces, slots, contexts in product(("recorded", "synthetic"), SLOTS, MEAN_CONTEXTS):
        for seed in range(seeds):
            workload = workload_of(traces, PER_ENGINE * len(slowness), seed)
            took = {rule: seconds(rule, workload, slowness, slots, contexts, seed, apart=apart) for rule in RULES}
            found.append([math.log(took["seconds"] / took[other]) for other in OTHERS])
    return np.array(found).reshape(-1, seeds, len(OTHERS))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run it."""
    parser = command_parser("uneven_engines", __doc__)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--fleets", nargs="*", default=list(FLEETS), choices=list(FLEETS))
    parser.add_argument("--apart", action="store_true", help="tools run outside of the slots of generations")
    options = parser.parse_args(arguments)
    figures = {}
    for fleet in options.fleets:
        by_case = ratios(fleet, options.seeds, apart=options.apart)
        found, most = by_case.reshape(-1, len(OTHERS)), np.exp(by_case.mean(axis=1).max(axis=0))
        half = 1.96 * found.std(axis=0, ddof=1) / math.sqrt(len(found))
        for column, other in enumerate(OTHERS):
            mean, worst = math.exp(found[:, column].mean()), math.exp(found[:, column].max())
            figures[f"seconds_over_{other}_{fleet}"] = Figure(mean, "ratio", "lower")
            print(
                f"{fleet:8s} over {other:7s} {mean:.3f} +- {half[column]:.3f}, case {most[column]:.3f}, run {worst:.3f} at most, "
                f"{len(found)} runs",
                flush=True,
            )
        figures[f"most_over_kept_{fleet}"] = Figure(float(most[0]), "ratio", "lower", MOST)
    emit("uneven_engines", figures, arguments=arguments, as_json=options.json)


if __name__ == "__main__":
    main()

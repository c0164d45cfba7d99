"""Engines and workloads small enough to check by hand."""

import pytest

from libra.hardware.engine_tables import EngineTables
from libra.sim.simulation_options import EngineSpec
from libra.sim.workload import TrajectoryPlan, TurnPlan, Workload


class Roofline:
    """Seconds by formulas: a step takes 10 ms and 1 us for each token of context; a token of prefill takes 1 ms."""

    def __init__(self, tp=1, kv_capacity_tokens=10_000):
        self.tp, self.kv_capacity_tokens = tp, kv_capacity_tokens

    def decode_step_s(self, num_sequences, context_tokens):
        return (0.010 + 1e-6 * context_tokens) / self.tp

    def prefill_s(self, new_tokens, past_tokens):
        return 0.001 * new_tokens / self.tp


@pytest.fixture(name="tables")
def _tables():
    return lambda tp=1, kv=10_000: EngineTables(Roofline(tp, kv))


@pytest.fixture(name="engines")
def _engines():
    def make(count=2, slots=2, kv=10_000, tp=1):
        shared = EngineTables(Roofline(tp, kv))
        return tuple(EngineSpec(f"tp{tp}-{i}", tp, slots, shared) for i in range(count))

    return make


@pytest.fixture(name="workload")
def _workload():
    """From lists of turns, (tokens, tool seconds) each: one group of all of them."""

    def make(*trajectories, group_size=1, iterations=1):
        plans = []
        for iteration in range(iterations):
            for index, turns in enumerate(trajectories):
                last = len(turns) - 1
                steps = tuple(
                    TurnPlan(tokens, "" if i == last else "bash", "ok", 0 if i == last else 10, tool_s)
                    for i, (tokens, tool_s) in enumerate(turns)
                )
                plans.append(TrajectoryPlan(iteration, index // group_size, index % group_size, 100, steps))
        return Workload("sim", tuple(plans))

    return make

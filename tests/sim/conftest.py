"""Engines and workloads small enough to check by hand."""

from collections.abc import Callable

import pytest

from libra.sim import EngineSpec, EngineTables, TrajectoryPlan, TurnPlan, Workload


class Roofline:
    """Seconds by formulas: a step takes 10 ms and 1 us for each token of context; a token of prefill takes 1 ms."""

    def __init__(self, tp: int = 1, kv_capacity_tokens: int = 10_000) -> None:
        self.tp, self.kv_capacity_tokens = tp, kv_capacity_tokens

    def decode_step_s(self, num_sequences: int, context_tokens: float) -> float:
        return (0.010 + 1e-6 * context_tokens) / self.tp

    def prefill_s(self, new_tokens: int, past_tokens: int) -> float:
        return 0.001 * new_tokens / self.tp


@pytest.fixture(name="tables")
def _tables() -> Callable[..., EngineTables]:
    return lambda tp=1, kv=10_000: EngineTables(Roofline(tp, kv))


@pytest.fixture(name="engines")
def _engines() -> Callable[..., tuple[EngineSpec, ...]]:
    def make(count: int = 2, slots: int = 2, kv: int = 10_000, tp: int = 1) -> tuple[EngineSpec, ...]:
        shared = EngineTables(Roofline(tp, kv))
        return tuple(EngineSpec(f"tp{tp}-{i}", tp, slots, shared) for i in range(count))

    return make


@pytest.fixture(name="workload")
def _workload() -> Callable[..., Workload]:
    """From lists of turns, (tokens, tool seconds) each: one group of all of them."""

    def make(*trajectories: list[tuple[int, float]], group_size: int = 1, iterations: int = 1) -> Workload:
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

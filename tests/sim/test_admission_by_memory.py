"""Whoever begins fits with those under way: lengths that are known never make a rollout longer, whatever order uses them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from libra.hardware.host_kv import HostPool
from libra.policy import Fifo, Oracle, Ordering, Predictor
from libra.sim import EngineSpec, EngineTables, TrajectoryPlan, TurnPlan, Workload
from libra.sim.simulation_options import SimulationOptions
from libra.sim.simulator import Simulator
from libra.types import NO_TOOL, ToolStatus

GROUP, DRAWS = 4, 2
EXCHANGING = SimulationOptions(chunk_tokens=64, host=HostPool(10**9, 0.02, 2e-6))
"""Engines that take turns in parts, and KV of each other from host memory."""


class Seconds:
    """A step takes 10 ms and 1 us for each token of context; a token of prefill 0.1 ms."""

    tp = 1

    def __init__(self, kv_tokens: int) -> None:
        self.kv_capacity_tokens = kv_tokens

    def decode_step_s(self, num_sequences: int, context_tokens: float) -> float:
        return 0.010 + 1e-6 * context_tokens

    def prefill_s(self, new_tokens: int, past_tokens: int) -> float:
        return 1e-4 * new_tokens


def case(seed: int, number: int) -> tuple[Workload, tuple[EngineSpec, ...]]:
    """A fleet, a load and a kind of trajectories by ``seed``; trajectories of this kind by ``number``."""
    kind, rng = np.random.default_rng(seed), np.random.default_rng([seed, number])
    engines, slots = int(kind.integers(1, 4)), int(kind.integers(12, 25))
    turns, tokens, spread = kind.uniform(1.5, 6), kind.uniform(10, 60), kind.uniform(0.3, 1.2)
    payload, tool_s = kind.uniform(0, 120), float(kind.choice([0.0, 0.1, 1.0]))
    plans = []
    for index in range(int(engines * slots * kind.uniform(3, 8))):
        scale = tokens * rng.lognormal(0, spread)
        rows = [
            TurnPlan(max(1, int(scale * rng.lognormal(0, 0.4))), "bash", ToolStatus.OK,
                     int(payload * rng.lognormal(0, 0.5)), float(tool_s * rng.exponential()))
            for _ in range(int(np.clip(rng.geometric(1 / turns), 1, 30)))
        ]  # fmt: skip
        rows[-1] = TurnPlan(rows[-1].new_tokens, "", NO_TOOL, 0, 0.0)
        plans.append(TrajectoryPlan(0, index // GROUP, index % GROUP, 50, tuple(rows)))
    final = [plan.final_tokens for plan in plans]
    kv = int(max(np.mean(final) * slots * kind.uniform(0.5, 1.3), 6 * max(final)))
    tables = EngineTables(Seconds(kv))
    return Workload("sim", tuple(plans)), tuple(EngineSpec(f"e{k}", 1, slots, tables) for k in range(engines))


def over_arrival_order(
    seed: int, make: Callable[[Workload], Ordering], options: SimulationOptions | None = None
) -> float:
    """Seconds of all draws of a case over those in arrival order."""
    ours = theirs = 0.0
    for number in range(DRAWS):
        workload, engines = case(seed, number)
        ours += Simulator(workload, engines, make(workload), options=options).run().makespan_s
        theirs += Simulator(workload, engines, Fifo(), options=options).run().makespan_s
    return ours / theirs


def predictor(accuracy: float) -> Callable[[Workload], Ordering]:
    """Forecasts whose logarithms correlate so with the truth."""
    return lambda workload: Predictor(workload.totals(), accuracy=accuracy)


@pytest.mark.parametrize(("options", "seed"), [(None, 3), (EXCHANGING, 5)], ids=["computed again", "exchanged"])
def test_true_lengths_are_never_worse_than_arrival_order_nor_than_poorer_forecasts(
    options: SimulationOptions | None, seed: int
) -> None:
    poor, true = (over_arrival_order(seed, predictor(accuracy), options) for accuracy in (0.4, 1.0))
    assert true <= poor + 0.02 and true <= 1.02
    assert options is not None or true < 0.98


def test_contexts_that_outgrow_every_forecast_do_not_push_each_other_out() -> None:
    """Tools add nine times what is generated, and every trajectory holds a slot's share of memory twice: forecasts know neither."""
    rows = [TurnPlan(10, "bash", ToolStatus.OK, 90, 0.05)] * 20
    plans = [
        TrajectoryPlan(0, k, 0, 50, (*rows[: 4 + (7 * k) % 16], TurnPlan(10, "", NO_TOOL, 0, 0.0))) for k in range(120)
    ]
    workload, tables = Workload("sim", tuple(plans)), EngineTables(Seconds(15_000))
    engines = tuple(EngineSpec(f"e{k}", 1, 24, tables) for k in range(2))
    outcome = Simulator(workload, engines, Oracle(workload.totals())).run()
    assert outcome.makespan_s <= 1.1 * Simulator(workload, engines, Fifo()).run().makespan_s
    assert outcome.recomputed_tokens <= 2 * sum(plan.final_tokens for plan in plans)

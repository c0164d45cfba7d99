"""A workload with heavy tails, drawn from a seed."""

import numpy as np

from libra.sim.workload import TrajectoryPlan, TurnPlan, Workload
from libra.types import NO_TOOL, ToolStatus


def synthetic(
    num: int, *, turns: int, seed: int, iterations: int = 1, group_size: int = 8, name: str = "sim"
) -> Workload:
    """A workload made up from distributions: lognormal turn lengths, geometric numbers of turns, bimodal tool times.

    Parameters
    ----------
    num : int
        Trajectories in each iteration.
    turns : int
        Mean number of turns of one.
    """
    rng = np.random.default_rng([seed, 0xA11])
    plans = []
    for index in range(num * iterations):
        iteration, place = divmod(index, num)
        length = int(min(20 * turns, max(1, rng.geometric(1.0 / turns))))
        lengths = np.maximum(1, rng.lognormal(4.8, 1.1, length)).astype(int)
        payloads = rng.lognormal(5.0, 1.2, length).astype(int)
        seconds = np.where(rng.random(length) < 0.75, 0.04, rng.gamma(2.0, 5.0, length))
        acted = zip(lengths[: length - 1].tolist(), payloads.tolist(), seconds.tolist(), strict=False)
        rows = [TurnPlan(new, "tool", ToolStatus.OK, text, took) for new, text, took in acted]
        rows.append(TurnPlan(int(lengths[-1]), "", NO_TOOL, 0, float(seconds[-1])))
        plans.append(TrajectoryPlan(iteration, place // group_size, place % group_size, 1500, tuple(rows), "synthetic"))
    return Workload(name, tuple(plans))

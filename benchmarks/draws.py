"""Workloads drawn from traces whose samples are alike within a group, as samples of one prompt are, or with samples to spare."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from math import sqrt
from statistics import NormalDist

import numpy as np

from libra.errors import ConfigError
from libra.sim.workload import Trace, TrajectoryPlan, TurnPlan, Workload, groups_of, workload_of_groups
from libra.types import NO_TOOL, ToolStatus


def draw_alike(
    traces: Sequence[Trace],
    *,
    num_groups: int,
    group_size: int,
    seed: int,
    iterations: int = 1,
    kinship: float = 0.0,
    earlier: float | None = None,
    spare: int = 0,
    name: str = "sim",
) -> Workload:
    """As `libra.sim.workload.draw`; where no task was recorded ``group_size`` times, with ``kinship``.

    ``kinship`` draws samples so that the ranks of their lengths have about that intra-class correlation, as samples of one
    prompt have (0.55 measured on tau-bench's airline trials): a stated construction, not a recording.

    ``earlier`` (with ``kinship``) draws an earlier pass over the same prompts: other samples, whose common part per prompt has this
    correlation, in [0, 1], with that of the workload drawn without it.

    ``spare`` samples more are in each group, drawn likewise after the others, which are the same without them; of a task that was
    not recorded so often, recordings repeat.
    """
    if earlier is not None and not (kinship and 0.0 <= earlier <= 1.0):
        raise ConfigError(
            f"earlier: got {earlier} with kinship {kinship}; it is a correlation of the two passes, from 0 to 1"
        )
    by_task: dict[str, list[Trace]] = {}
    for trace in traces:
        by_task.setdefault(trace.task, []).append(trace)
    of_one_task = group_size > 1 and max(map(len, by_task.values()), default=0) >= group_size
    extra = np.random.default_rng([seed, 0x5BA6])
    if kinship and not of_one_task:
        rng = np.random.default_rng([seed, 0x5EED])
        groups = _of_like_lengths(traces, group_size, seed, kinship, earlier, rng, spare, extra)
    else:
        groups = (
            [*group, *(pool[int(i)] for i in extra.integers(len(pool), size=spare))]
            for group in groups_of(traces, group_size, seed)
            for pool in (by_task[group[0].task] if of_one_task else traces,)
        )
    return workload_of_groups(groups, num_groups=num_groups, iterations=iterations, name=name)


def _of_like_lengths(
    traces: Sequence[Trace],
    group_size: int,
    seed: int,
    kinship: float,
    earlier: float | None,
    rng: np.random.Generator,
    spare: int,
    extra: np.random.Generator,
) -> Iterator[list[Trace]]:
    """Groups whose ranks of lengths correlate by ``kinship``."""
    ranked = sorted(traces, key=lambda trace: sum(turn.new_tokens for turn in trace.turns))
    for index in count():
        shared, own = rng.standard_normal(), rng.standard_normal(group_size)
        if earlier is not None:
            before = np.random.default_rng([seed, 0xEA71, index])
            shared = earlier * shared + sqrt(1.0 - earlier * earlier) * before.standard_normal()
            own = before.standard_normal(group_size)
        own = np.concatenate([own, extra.standard_normal(spare)])
        ranks = [NormalDist().cdf(x) for x in sqrt(kinship) * shared + sqrt(1.0 - kinship) * own]
        yield [ranked[int(rank * len(ranked))] for rank in ranks]


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
        rows = [
            TurnPlan(int(lengths[i]), "tool", ToolStatus.OK, int(payloads[i]), float(seconds[i]))
            for i in range(length - 1)
        ]
        rows.append(TurnPlan(int(lengths[-1]), "", NO_TOOL, 0, float(seconds[-1])))
        plans.append(TrajectoryPlan(iteration, place // group_size, place % group_size, 1500, tuple(rows), "synthetic"))
    return Workload(name, tuple(plans))

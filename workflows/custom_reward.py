"""Add a node of your own to every group of the graph: here, a judge that docks a little for each wasted tool call.

The node is plain Python turned into a Dask task. It gets the finished trajectories of one group as a list of
`libra.types.Episode` and returns one number for each, which is added to the environment's reward. It runs on a worker with
a free GRADE slot, shows up in the dashboard under its own name, and may call whatever you like: another model, a test
suite, a database.

Run it with ``python workflows/custom_reward.py [section.key=value ...]``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from dask import delayed
from dask.delayed import Delayed

import libra
from libra.config import typed_settings
from libra.types import Episode, ToolStatus

COST_PER_WASTED_CALL = 0.1


def judge(episodes: Sequence[Episode]) -> list[float]:
    """Minus `COST_PER_WASTED_CALL` for each call that did not come back ``ok``."""
    return [
        -COST_PER_WASTED_CALL * sum(r.status is not ToolStatus.OK for turn in episode.turns for r in turn.returns)
        for episode in episodes
    ]


def score(episodes: Delayed) -> Delayed:
    """The node: called once per group, when the graph of an iteration is built."""
    return delayed(judge)(episodes)


def main(**settings: Any) -> Any:
    """A short run on the shipped model and environment, with the judge in its graph."""
    return libra.train(
        score=score, **({"run__iterations": 5, "trainer__lr": 5e-4, "cluster__dashboard_port": 0} | settings)
    )


if __name__ == "__main__":
    summary = main(**typed_settings(sys.argv[1:]))
    print(f"{len(summary.iterations)} iterations; reward of the last: {summary.iterations[-1]['reward']:.3f}")

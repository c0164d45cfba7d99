"""A tool that runs tests on as many cores as are to spare.

The model says how many checks it wants to run; ``run_checks`` runs them in parallel on the cores that its call has
(``LIBRA_CORES``). How much faster more cores make it is measured as the run goes.

    python workflows/parallel_tests.py [section.key=value ...]
"""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import libra
from libra.config import typed_settings

CHECK = "sum(i * i for i in range(100_000))"


def run_checks(count: int) -> str:
    """Run checks of the project, side by side.

    Args:
        count: How many checks to run, 1 to 16.
    """
    cores = int(os.environ.get("LIBRA_CORES", "1"))
    with ThreadPoolExecutor(cores) as pool:  # each check is a process of its own; a thread waits for it
        done = list(
            pool.map(lambda _: subprocess.run([sys.executable, "-c", CHECK], check=False), range(min(count, 16)))
        )
    return f"{sum(each.returncode == 0 for each in done)} of {len(done)} passed"


def reward(completion: str) -> float:
    """1 if the answer is that all checks passed."""
    return float("passed" in completion)


def main(**settings: Any) -> Any:
    """A short run on the shipped model, which has not learned this tool's format: what it shows is the tool, not the reward."""
    return libra.train(
        prompts=[f"Run {count} checks and say how many passed." for count in range(1, 41)],
        reward=reward,
        tools=[libra.tool(run_checks, cores=(1, 4), elastic="measure", memory_gib=0.5, timeout_s=60)],
        **(
            {
                "run__iterations": 3,
                "evaluation__prompts": 0,
                "cluster__dashboard_port": 0,
                "cluster__tool_supply": {"cores": 4},
            }
            | settings
        ),
    )


if __name__ == "__main__":
    summary = main(**typed_settings(sys.argv[1:]))
    print(f"{len(summary.iterations)} iterations; reward of the last: {summary.iterations[-1]['reward']:.3f}")

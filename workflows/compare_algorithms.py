"""Train the quick start's model with several algorithms and print the held-out reward before and after each.

Every run has the same questions, seeds and sizes; only ``trainer.algorithm`` differs, with each paper's values, and the
learning rate where a loss of another scale needs it. What comes out is whether an algorithm learns, not which one is best:
one seed and one task do not say that.

Run it with ``make algorithms``, or ``python workflows/compare_algorithms.py [--algorithms NAME ...] [section.key=value ...]``.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import libra
from libra.config import typed_settings
from libra.config.algorithms import ALGORITHMS

COMPARED = ("grpo", "dr_grpo", "gspo", "cispo", "rloo")
SETTINGS: dict[str, Any] = {"cluster__dashboard_port": 0, "observe__progress": False, "observe__trackers": []}


def compare(algorithms: list[str], settings: dict[str, Any]) -> list[tuple[str, float, float, float]]:
    """(algorithm, reward before, reward after, seconds) of each."""
    rows = []
    for name in algorithms:
        started = time.perf_counter()
        summary = libra.train(config="libra/quickstart", **{**SETTINGS, **settings, "trainer__algorithm": name})
        before, after = summary.reward_before, summary.reward_after
        rows.append((name, before, after, time.perf_counter() - started))
        print(_line(*rows[-1]), flush=True)
    return rows


def _line(name: str, before: float, after: float, seconds: float) -> str:
    return f"{name:<24}{before:>8.3f}{after:>8.3f}{after - before:>+8.3f}{seconds:>8.0f} s"


def main(arguments: list[str]) -> int:
    """Exit code 1 where an algorithm did not raise the reward."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithms", nargs="+", choices=list(ALGORITHMS), default=list(COMPARED))
    parser.add_argument("override", nargs="*", help="section.key=value")
    options = parser.parse_args(arguments)
    settings = typed_settings(options.override)
    print(f"{'algorithm':<24}{'before':>8}{'after':>8}{'gain':>8}{'took':>10}")
    rows = compare(options.algorithms, settings)
    worse = [name for name, before, after, _ in rows if not after > before]
    if worse:
        print(f"no higher reward: {', '.join(worse)}")
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

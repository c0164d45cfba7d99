"""What changing roles costs, and what following a drift gains.

``python -m benchmarks.elastic [--data DIR] --json``. Figures, in parts that ``--part`` chooses:

drift (virtual time, emulated engine speeds; see `benchmarks.elastic_drift`)
    ``over_static``: tokens per second with replanning over the best static split in hindsight, at staleness bound 0, where GPUs
    may roll out and train in one step. ``over_static_split_only``: the same where each GPU is in one pool, so that only the drift
    is followed. ``over_static_eta1``: the same at bound 1. ``over_always_sharing``: over GPUs that do both at all times, with the
    engines that are best in hindsight. ``over_static_of_eta1``: synchronous replanning over the best static split at bound 1.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks import elastic_drift
from benchmarks.report import Figure, emit

PARTS = ("drift",)


def main(arguments: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.elastic", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print the figures as one JSON object on the last line")
    parser.add_argument("--data", type=Path, default=Path(__file__).parent / "data", help="folder with agent_turns/")
    parser.add_argument("--part", choices=PARTS, nargs="+", default=list(PARTS), help="default: all")
    parser.add_argument(
        "--groups", type=int, nargs="+", default=[elastic_drift.GROUPS], help="groups of 16 in a batch (default 16)"
    )
    parser.add_argument("--iterations", type=int, help="of the drift, at most (default: the whole trace)")
    parser.add_argument("--full", action="store_true", help="play every static split to its end")
    options = parser.parse_args(arguments)
    figures: dict[str, Figure] = {}
    if "drift" in options.part:
        for groups in options.groups:
            figures |= elastic_drift.compare(options.data, groups, options.iterations, options.full)
    emit("elastic", figures, arguments=arguments, as_json=options.json)


if __name__ == "__main__":
    main()

"""C-MLFQ against FIFO on repair-like turns of very different lengths (workflows/repair_lengths.py), on
real workers: one engine, and two of which one is three times slower.

Both policies run the same tasks, A B A B. The first iterations, in which nothing is learned yet, do
not count. Figures:

* ``cmlfq_over_fifo_one``, ``cmlfq_over_fifo_unlike``: median ratio of summed makespans.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from benchmarks.report import MIN_PAIRS, Figure, alternate, command_parser, emit

sys.path.insert(0, str(Path(__file__).parents[2] / "workflows"))
from repair_lengths import makespans_s, run, settings

CELLS = {"one": [0.01], "unlike": [0.01, 0.03]}


def main(arguments: list[str] | None = None) -> None:
    parser = command_parser("repair_lengths", __doc__, pairs=MIN_PAIRS)
    parser.add_argument("--iterations", type=int, default=8)
    parser.add_argument("--learning", type=int, default=3, help="first iterations that do not count")
    parser.add_argument("--cells", nargs="+", choices=list(CELLS), default=list(CELLS))
    options = parser.parse_args(arguments)
    figures, count = {}, 0
    with tempfile.TemporaryDirectory(prefix="repair_lengths-") as directory:

        def side(policy: str, pass_s: list[float]) -> float:
            nonlocal count
            count += 1
            config = settings(Path(directory) / str(count), policy, pass_s, options.iterations)
            return sum(makespans_s(run(config, seed=(count - 1) // 2))[options.learning :])

        for name in options.cells:
            sides = (lambda policy=policy, pass_s=CELLS[name]: side(policy, pass_s) for policy in ("cmlfq", "fifo"))
            ratio = alternate(*sides, pairs=options.pairs).ratio
            figures[f"cmlfq_over_fifo_{name}"] = Figure(ratio, "ratio", "lower", 0.95)
    emit("repair_lengths", figures, arguments=arguments, as_json=options.json)

"""Error of the planner's predicted step in a real run with two engines of different speed and one
trainer.

The quick start's run (a model that learns to chain calls of a calculator; 32 questions of 1 to 8
operations, 8 samples each) on worker processes of this machine: one engine that generates for 64
trajectories at once and one for 8, a trainer, a tool worker. Batches differ by the drawn questions,
by what the model has learned, and by the number of groups with different rewards. Before each
iteration the run predicts its seconds (metric ``plan/predicted_s``) from its earlier iterations and
the coming questions; after it, it records the seconds taken (``plan/realised_s``). Nothing is
calibrated before.

Figures: ``error_after_first``, |predicted / realised - 1| of the second iteration, predicted from
the first alone; ``error_after_ten``, the mean of the same over all iterations after the tenth. Both
are means over ``--runs`` runs of different seeds.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from pathlib import Path

from benchmarks.report import QUICKSTART, QUIET, Figure, command_parser, emit
from libra.config import load_config
from libra.driver.run_session import Session

ENGINES = "[{threads: 1, slots: 64}, {threads: 1, slots: 8}]"
LEARNED = 10
"""Iterations before those that count as after ten."""


def run(directory: Path, iterations: int, seed: int) -> dict[int, float]:
    """Errors of a run's predicted iterations, as fractions of the realised seconds."""
    changes = (
        f"run.name=accuracy_{seed}", f"run.dir={directory}", f"run.iterations={iterations}", f"run.seed={seed}",
        "planner.replan=advise", f"cluster.engines={ENGINES}", "trainer.prompts=32", *QUIET,
    )  # fmt: skip
    with Session(load_config(str(QUICKSTART), changes)) as session:
        for values in session.iterations():
            print(f"iteration {values['iteration']}: {values['iteration_s']:.2f} s", flush=True)
    rows: dict[int, dict[str, float]] = {}
    for line in (session.directory / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        rows.setdefault(row["step"], {}).update(row)
    return {
        k: row["plan/predicted_s"] / row["plan/realised_s"] - 1.0
        for k, row in sorted(rows.items())
        if "plan/predicted_s" in row
    }


def main(arguments: list[str] | None = None) -> None:
    parser = command_parser("plan_accuracy", __doc__)
    parser.add_argument("--iterations", type=int, default=14, help="iterations of a run, at least 12 (default 14)")
    parser.add_argument("--runs", type=int, default=2, help="runs, each with a seed of its own (default 2)")
    options = parser.parse_args(arguments)
    if options.iterations < LEARNED + 2 or options.runs < 1:
        parser.error(f"--iterations {LEARNED + 2} --runs 1 are the fewest")
    first, later = [], []
    with tempfile.TemporaryDirectory(prefix="plan_accuracy-") as name:
        for seed in range(options.runs):
            errors = run(Path(name), options.iterations, seed)
            print(f"seed {seed}:", ", ".join(f"{k}: {100 * error:+.1f} %" for k, error in errors.items()), flush=True)
            first.append(abs(next(iter(errors.values()))))
            later += [abs(error) for k, error in errors.items() if k >= LEARNED]
    figures = {
        "error_after_first": Figure(statistics.fmean(first), "frac", "lower", 0.25),
        "error_after_ten": Figure(statistics.fmean(later), "frac", "lower", 0.15),
    }
    emit("plan_accuracy", figures, arguments=arguments, as_json=options.json)

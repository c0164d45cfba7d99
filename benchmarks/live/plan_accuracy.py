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
are means over ``--runs`` runs of different seeds. ``error_after_ten_worst`` is the worst single
iteration after the tenth, ``speed_ratio`` tokens per second of the faster engine over the
slower. With ``--same`` the figure ``same_after_ten`` is the error of the prediction "as long as the
iteration before".
"""

from __future__ import annotations

import json
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks.report import QUICKSTART, QUIET, Figure, command_parser, emit
from libra.config import load_config
from libra.driver.run_session import Session

ENGINES = "[{threads: 1, slots: 64}, {threads: 1, slots: 8}]"
LEARNED = 10
"""Iterations before those that count as after ten."""


@dataclass(frozen=True, slots=True)
class Step:
    """One iteration: seconds predicted before it and realised, and tokens likewise."""

    iteration: int
    predicted_s: float
    realised_s: float
    predicted_tokens: float
    tokens: float

    @property
    def error_frac(self) -> float:
        return self.predicted_s / self.realised_s - 1.0


def run(directory: Path, iterations: int, eta: int, seed: int) -> tuple[list[Step], float, list[float]]:
    """Predicted steps of a run, the ratio of its engines' speeds, and the seconds of its
    iterations."""
    changes = (
        f"run.name=accuracy_{seed}", f"run.dir={directory}", f"run.iterations={iterations}", f"run.eta={eta}",
        f"run.seed={seed}", "planner.replan=advise", f"cluster.engines={ENGINES}", "trainer.prompts=32", *QUIET,
    )  # fmt: skip
    with Session(load_config(str(QUICKSTART), changes)) as session:
        for values in session.iterations():
            print(f"iteration {values['iteration']}: {values['iteration_s']:.2f} s", flush=True)
    rows: dict[int, dict[str, float]] = {}
    for line in (session.directory / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        rows.setdefault(row["step"], {}).update(row)
    steps = [
        Step(k, r["plan/predicted_s"], r["plan/realised_s"], r["plan/predicted_tokens"], r["generated_tokens"])
        for k, r in sorted(rows.items())
        if "plan/predicted_s" in r
    ]
    speeds = [value for name, value in rows[max(rows)].items() if name.startswith("plan/tokens_per_s/")]
    return steps, max(speeds) / min(speeds), [rows[k]["plan/realised_s"] for k in sorted(rows)]


def main(arguments: list[str] | None = None) -> None:
    parser = command_parser("plan_accuracy", __doc__)
    parser.add_argument("--iterations", type=int, default=14, help="iterations of a run, at least 12 (default 14)")
    parser.add_argument("--runs", type=int, default=2, help="runs, each with a seed of its own (default 2)")
    parser.add_argument("--eta", type=int, default=0, help="staleness bound; from 1 on steps overlap (default 0)")
    parser.add_argument("--same", action="store_true", help="also what the iteration before would have predicted")
    options = parser.parse_args(arguments)
    if options.iterations < LEARNED + 2 or options.runs < 1:
        parser.error(f"--iterations {LEARNED + 2} --runs 1 are the fewest")
    first, later, same, ratios = [], [], [], []
    with tempfile.TemporaryDirectory(prefix="plan_accuracy-") as name:
        for seed in range(options.runs):
            steps, ratio, seconds = run(Path(name), options.iterations, options.eta, seed)
            for step in steps:
                print(
                    f"seed {seed}, iteration {step.iteration:2d}: {step.predicted_s:5.2f} s predicted, {step.realised_s:5.2f} s "
                    f"realised ({100 * step.error_frac:+6.1f} %); {step.predicted_tokens:6.0f} tokens, {step.tokens:6.0f} came",
                    flush=True,
                )
            first.append(abs(steps[0].error_frac))
            later += [abs(step.error_frac) for step in steps if step.iteration >= LEARNED]
            same += [abs(seconds[k - 1] / seconds[k] - 1.0) for k in range(LEARNED, len(seconds))]
            ratios.append(ratio)
    figures = {
        "error_after_first": Figure(statistics.fmean(first), "frac", "lower", 0.25),
        "error_after_ten": Figure(statistics.fmean(later), "frac", "lower", 0.15),
        "error_after_ten_worst": Figure(max(later), "frac", "lower"),
        "speed_ratio": Figure(statistics.fmean(ratios), "ratio", "higher"),
    }
    if options.same:
        figures["same_after_ten"] = Figure(statistics.fmean(same), "frac", "lower")
    emit("plan_accuracy", figures, arguments=arguments, as_json=options.json)

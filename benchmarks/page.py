"""docs/benchmarks.md from ``benchmarks/results/*.json``: figures with a claim, missed goals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.report import RESULTS, Figure

CLAIMS = json.loads((Path(__file__).parent / "data" / "claims.json").read_text(encoding="utf-8"))
"""``NAME.figure`` and the claim that it supports, in the order of the page."""

_HEAD = """\
# Benchmarks

<!-- Made by `make docs` from benchmarks/results/*.json and benchmarks/data/claims.json. -->

Figures of Libra with the command that makes each one. `python -m benchmarks` in a checkout lists all benchmarks.

## Method

- `python -m benchmarks NAME --save` writes `benchmarks/results/NAME.json`: figures, command, date, commit, machine, load.
- Comparisons are paired within one run (A B A B ...), at least five pairs; a figure is the median of the pairs' ratios.
- A figure taken beside other programs has no row. Figures in virtual or emulated time do not depend on the load.
- A row names the commit that recorded the figure; later commits may differ. A command that no longer exists is to be run there.
- Goals were set before the measurement. A missed goal is in the table, and again in the list below it.
- The CPU of the machines changed over time; seconds of different rows compare only where the machine is the same.
- Virtual time uses the cost model, whose errors are the rows of `cost_model`. No run on several GPUs has been measured.

"""


def rows(results: Path = RESULTS) -> list[dict[str, Any]]:
    """One row per claim whose figure was taken on a quiet machine."""
    reports = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(results.glob("*.json"))}
    found = []
    for name, claim in CLAIMS.items():
        benchmark, _, figure = name.partition(".")
        report = reports.get(benchmark, {})
        measured = report.get("figures", {}).get(figure)
        if measured is None or not report["quiet"]:
            continue
        own = {key: measured[key] for key in ("command", "machine", "date", "commit") if key in measured}
        kept = Figure(measured["value"], measured["unit"], measured["better"], measured["goal"])
        found.append({**report, **own, "name": name, "claim": claim, "figure": kept})
    return found


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _verdict(figure: Figure) -> str:
    return "" if figure.reached is None else "reached" if figure.reached else "**missed**"


def page() -> str:
    """The whole of docs/benchmarks.md."""
    found = rows()
    machines = list(dict.fromkeys(row["machine"] for row in found))
    lines = [
        "| claim | figure | value | goal | | command | machine | date, commit |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in found:
        figure: Figure = row["figure"]
        sign = ">=" if figure.better == "higher" else "<="
        goal = "" if figure.goal is None else f"{sign} {_number(figure.goal)}"
        lines.append(
            f"| {row['claim']} | `{row['name']}` | **{_number(figure.value)}** {figure.unit} | {goal} | {_verdict(figure)} "
            f"| `{row['command']}` | {chr(65 + machines.index(row['machine']))} | {row['date']}, `{row['commit']}` |"
        )
    missed = [row for row in found if row["figure"].reached is False]
    listed = [
        f"- `{row['name']}`: {_number(row['figure'].value)} {row['figure'].unit}, goal {_number(row['figure'].goal)}"
        for row in missed
    ]
    return "\n".join([
        _HEAD + "## Figures\n", *lines, "", *(f"- {chr(65 + i)}: {machine}" for i, machine in enumerate(machines)), "",
        f"## Misses\n\n{len(missed)} of {sum(row['figure'].goal is not None for row in found)} goals are missed:\n",
        *listed, "",
    ])  # fmt: skip

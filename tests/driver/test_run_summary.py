"""The result of a run as a program shows it."""

from __future__ import annotations

from pathlib import Path

from libra.driver.run_summary import RunSummary


def summary(**changes: object) -> RunSummary:
    values = {
        "iterations": [
            {"reward": 0.125, "generated_tokens": 1000, "left_out": 0},
            {"reward": 0.5, "generated_tokens": 2500, "left_out": 2},
        ],
        "evaluations": [{"reward": 0.25, "num": 64}, {"reward": 0.75, "num": 64}],
        "checkpoint": Path("runs/demo/checkpoints/2"),
        "wall_s": 12.4,
    }
    return RunSummary("demo", Path("runs/demo"), **{**values, **changes})  # type: ignore[arg-type]


def test_printing_a_summary_shows_a_short_table() -> None:
    assert str(summary()).splitlines() == [
        "run               demo",
        "iterations        2 in 12 s",
        "held-out reward   0.250 before, 0.750 after, 64 questions",
        "training reward   0.125 in the first iteration, 0.500 in the last",
        "tokens generated  3,500",
        "left out          2 trajectories that failed; libra inspect RUN --failed",
        "directory         runs/demo",
        "model             runs/demo/checkpoints/2",
    ]


def test_a_run_without_iterations_or_evaluations_has_a_table_too() -> None:
    text = str(summary(iterations=[], evaluations=[], checkpoint=None))
    assert text.splitlines() == ["run               demo", "iterations        0 in 12 s", "directory         runs/demo"]


def test_a_notebook_shows_the_same_rows_and_no_markup_of_a_name() -> None:
    page = summary(checkpoint=Path("<b>x</b>"))._repr_html_()
    assert page.count("<tr>") == len(summary().rows())
    assert "<b>" not in page
    assert "0.250 before, 0.750 after" in page

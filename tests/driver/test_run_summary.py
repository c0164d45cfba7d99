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


def test_a_summary_is_a_short_table_of_what_there_is() -> None:
    text = str(summary())
    assert len(text.splitlines()) == len(summary().rows()) == 8
    for words in (
        "0.250 before, 0.750 after, 64",
        "0.125 in the first iteration, 0.500",
        "3,500",
        "runs/demo/checkpoints/2",
    ):
        assert words in text
    assert len(summary(iterations=[], evaluations=[], checkpoint=None).rows()) == 3


def test_a_notebook_shows_the_same_rows_and_no_markup_of_a_name() -> None:
    page = summary(checkpoint=Path("<b>x</b>"))._repr_html_()
    assert page.count("<tr>") == len(summary().rows())
    assert "<b>" not in page and "0.250 before, 0.750 after" in page

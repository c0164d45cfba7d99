"""What people are shown of forecasts that are over."""

from __future__ import annotations

from libra.policy import CMLFQ, QuantumFinished, TrajectoryEnded, TrajectoryParked, make_ordering
from libra.policy.calibration_log import FOLLOWED, KEPT, CalibrationLog
from libra.policy.ordering import Inspectable
from libra.types import Phase


def test_half_way_is_the_last_belief_before_half_of_the_tokens() -> None:
    seen = CalibrationLog()
    for generated, total in ((0, 700.0), (100, 650.0), (250, 600.0), (300, 520.0), (450, 505.0)):
        seen.forecast("a", generated, total)
    seen.ended("a", 500, completed=True)
    assert [tuple(row) for row in seen.outcomes] == [(700.0, 600.0, 500)]


def test_what_failed_or_was_met_in_the_middle_says_nothing() -> None:
    seen = CalibrationLog()
    seen.forecast("failed", 0, 100.0)
    seen.ended("failed", 50, completed=False)
    seen.forecast("late", 10, 100.0)
    seen.ended("late", 50, completed=True)
    seen.ended("unknown", 50, completed=True)
    assert not seen.outcomes


def test_it_stays_bounded() -> None:
    seen = CalibrationLog()
    for number in range(3 * FOLLOWED):
        seen.forecast(str(number), 0, 10.0)
    for number in range(3 * FOLLOWED):
        seen.ended(str(number), 10, completed=True)
    assert len(seen.outcomes) == KEPT
    assert seen.outcomes[-1].tokens == 10
    seen.forecast("again", 0, 10.0)
    seen.ended("again", 7, completed=True)
    assert seen.outcomes[-1].tokens == 7  # there is room again


def test_the_ordering_shows_what_it_believed_and_what_came() -> None:
    ordering = CMLFQ()
    for number in range(3):
        key = f"t{number}"
        ordering.handle(TrajectoryParked(key, 0, Phase.ROLLOUT, 0, "g", "f"))
        ordering.handle(QuantumFinished(key, Phase.ROLLOUT, 100, "", "", 1.0))
        ordering.handle(TrajectoryEnded(key))
    shown = ordering.dashboard_row()
    assert [row[2] for row in shown["outcomes"]] == [100, 100, 100]
    assert set(shown) == {"objective", "skill", "weights", "outcomes"}
    ordering.restore(ordering.snapshot())
    assert ordering.dashboard_row()["outcomes"] == []
    assert isinstance(make_ordering("oracle"), Inspectable)
    assert not isinstance(make_ordering("fifo"), Inspectable)

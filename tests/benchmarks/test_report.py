"""What a benchmark prints can be read by a program, and a comparison is fair by construction."""

from __future__ import annotations

import io
import json
import math
import platform
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.report import MIN_PAIRS, Figure, Pairs, alternate, command_line, emit, machine
from libra.errors import ConfigError

positive = st.floats(min_value=1e-6, max_value=1e6)


def printed(figures: dict[str, Figure], *, as_json: bool, arguments: tuple[str, ...] = ("--json",)) -> list[str]:
    stream = io.StringIO()
    emit("vs_trl", figures, arguments=arguments, as_json=as_json, stream=stream)
    return stream.getvalue().splitlines()


def test_last_line_is_the_contract() -> None:
    lines = printed(
        {"step_time_ratio": Figure(1.5, "ratio", "higher", 2.0)}, as_json=True, arguments=("--json", "--pairs", "7")
    )
    report = json.loads(lines[-1])
    assert report.pop("machine") == machine()
    assert report == {
        "benchmark": "vs_trl",
        "figures": {"step_time_ratio": {"value": 1.5, "unit": "ratio", "better": "higher", "goal": 2.0}},
        "command": "python -m benchmarks.vs_trl --json --pairs 7",
    }


def test_without_json_the_figures_are_only_told() -> None:
    lines = printed({"a": Figure(3.0, "us", "lower", 2.0), "b": Figure(1.0, "tokens", "higher")}, as_json=False)
    assert lines == [
        "vs_trl.a = 3 us, lower is better (goal 2, missed)",
        "vs_trl.b = 1 tokens, higher is better",
    ]


@given(st.floats(allow_nan=False, allow_infinity=False), st.none() | st.floats(allow_nan=False, allow_infinity=False))
def test_numbers_survive_the_line_exactly(value: float, goal: float | None) -> None:
    figure = json.loads(printed({"f": Figure(value, "u", "lower", goal)}, as_json=True)[-1])["figures"]["f"]
    assert (figure["value"], figure["goal"]) == (value, goal)


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_figure_that_was_not_measured_is_refused(number: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        Figure(number, "ratio", "higher", 1.0)
    with pytest.raises(ValueError, match="finite"):
        Figure(1.0, "ratio", "higher", number)


def test_a_direction_is_higher_or_lower() -> None:
    with pytest.raises(ValueError, match="'bigger'"):
        Figure(1.0, "ratio", "bigger")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("better", "value", "reached"),
    [("higher", 2.0, True), ("higher", 1.9, False), ("lower", 2.0, True), ("lower", 2.1, False)],
)
def test_a_goal_is_reached_in_its_direction(better: str, value: float, reached: bool) -> None:
    assert Figure(value, "x", better, 2.0).reached is reached  # type: ignore[arg-type]


def test_sides_take_turns() -> None:
    order: list[str] = []

    def side(name: str, value: float) -> float:
        order.append(name)
        return value

    seen: list[tuple[int, float, float]] = []
    pairs = alternate(
        lambda: side("A", 4.0), lambda: side("B", 2.0), pairs=6, after_pair=lambda *pair: seen.append(pair)
    )
    assert "".join(order) == "AB" * 6
    assert pairs.ratio == 2.0
    assert seen == [(i, 4.0, 2.0) for i in range(6)]


def test_too_few_pairs_are_refused_before_anything_runs() -> None:
    def never() -> float:
        raise AssertionError("a side ran")

    with pytest.raises(ConfigError, match=f"type --pairs {MIN_PAIRS}"):
        alternate(never, never, pairs=MIN_PAIRS - 1)
    with pytest.raises(ConfigError, match="at least"):
        Pairs((1.0,) * (MIN_PAIRS - 1), (1.0,) * (MIN_PAIRS - 1))


@given(
    st.lists(st.tuples(positive, positive), min_size=MIN_PAIRS, max_size=12),
    st.lists(positive, min_size=12, max_size=12),
)
def test_a_drift_common_to_both_sides_of_a_pair_does_not_move_the_ratio(
    pairs: list[tuple[float, float]], drift: list[float]
) -> None:
    calm = Pairs(tuple(a for a, _ in pairs), tuple(b for _, b in pairs))
    slowed = Pairs(
        tuple(a * d for (a, _), d in zip(pairs, drift, strict=False)),
        tuple(b * d for (_, b), d in zip(pairs, drift, strict=False)),
    )
    assert slowed.ratio == pytest.approx(calm.ratio, rel=1e-9)
    assert calm.ratio == statistics.median(a / b for a, b in pairs)


def test_medians_are_of_each_side() -> None:
    assert Pairs((1.0, 9.0, 2.0, 3.0, 4.0), (5.0, 6.0, 7.0, 8.0, 1.0)).medians == (3.0, 6.0)


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_a_side_that_took_no_time_is_no_measurement(bad: float) -> None:
    with pytest.raises(ValueError, match="positive finite"):
        Pairs((1.0,) * 5, (1.0, 1.0, 1.0, 1.0, bad))


def test_the_machine_is_described_without_names_or_paths() -> None:
    text = machine()
    assert "cores" in text
    assert "torch" in text
    assert platform.node() not in text
    assert "/" not in text


def test_a_command_can_be_pasted() -> None:
    assert command_line("vs_trl", ["--trl-env", "a dir"]) == "python -m benchmarks.vs_trl --trl-env 'a dir'"

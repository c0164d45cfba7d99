"""The calculator against Python's own arithmetic, and against everything that is not arithmetic."""

import re
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.math.reasoning_gym import MAX_DIGITS, calculate

NUMBERS = st.integers(0, 9999).map(str)


def _extended(inner):
    pairs = st.tuples(inner, st.sampled_from(["+", "-", "*", "/"]), inner)
    return pairs.map(lambda parts: f"({parts[0]} {parts[1]} {parts[2]})")


EXPRESSIONS = st.recursive(NUMBERS, _extended, max_leaves=5)


@given(EXPRESSIONS)
def test_agrees_with_exact_fractions(expression):
    exact = re.sub(r"\d+", lambda match: f"Fraction({match[0]})", expression)
    try:
        expected = eval(exact, {"Fraction": Fraction})
    except ZeroDivisionError:
        with pytest.raises(ValueError, match="division by zero"):
            calculate(expression)
        return
    shown = calculate(expression)
    if expected.denominator == 1:
        assert shown == str(expected.numerator)
    else:
        assert abs(Fraction(shown) - expected) <= abs(expected) * Fraction(1, 10**11)


@pytest.mark.parametrize(("expression", "value"), [
    ("0.1 + 0.2", "0.3"),
    ("1,200 * (3 + 4.5) =", "9000"),
    ("2^10", "1024"),
    ("-7 // 2", "-4"),
    ("6 × 7 ÷ 4", "10.5"),
    ("1 / 3", "0.333333333333"),
    ("10 ** 20 / 3", "33333333333300000000"),
])  # fmt: skip
def test_values(expression, value):
    assert calculate(expression) == value


@pytest.mark.parametrize("expression", [
    "", "x + 1", "__import__('os')", "[1, 2]", "1 if 1 else 2", "'a' * 9", "True + 1", "1 < 2", "(1).real", "lambda: 1", "1j",
    "12 apples", "1,2", "\x00", "~1",
])  # fmt: skip
def test_nothing_else_is_read(expression):
    with pytest.raises(ValueError):
        calculate(expression)


@pytest.mark.parametrize("expression", [
    "9 ** 9 ** 9 ** 9", "10 ** 99", "1e999", "9" * (MAX_DIGITS + 1), "(10 ** 50) * (10 ** 50)", "1" * 300, "(" * 150,
])  # fmt: skip
def test_work_is_bounded(expression):
    with pytest.raises(ValueError, match=r"digits|exponent|characters|arithmetic"):
        calculate(expression)

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra.envs.rewards import gsm8k
from libra.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "method", "answer", "value"),
    [
        ("#### 1,000,000.", "strict", "1000000", 1.0),
        ("The total is 1,234", "flexible", "1234", 1.0),
        ("It costs 3.50.", "flexible", "3.5", 1.0),
        ("#### 42", "strict", "42.0", 1.0),
        ("#### -0", "strict", "0", 1.0),
        ("#### 42 " + "x" * 1000, "strict", "42", 1.0),
        ("42", "strict", "42", 0.0),
        ("#### ,", "strict", "42", 0.0),
        ("in 2024, 41", "flexible", "42", 0.1),
        ("1.2.3", "flexible", "3", 0.0),
    ],
)
def test_numbers_are_compared_as_numbers(text, method, answer, value):
    assert gsm8k.score(text, answer, method, format_score=0.1) == value


@given(st.decimals(-(10**12), 10**12, allow_nan=False, places=3))
def test_one_spelling_for_each_number(number):
    spellings = {f"{number:f}", f"{number:,f}", f"{number:f}00", f"{number:f}."}
    (spelling,) = {gsm8k.canonical(each) for each in spellings}
    assert Decimal(spelling) == number


@pytest.mark.parametrize(
    "text", ["0" * 10**6 + ".1.1", "0." + "0" * 10**6 + ".", "9," * 500_000, "#### " * 200_000, "-" * 10**6]
)
@pytest.mark.parametrize("method", ["strict", "flexible"])
def test_a_million_characters_are_read_at_once(text, method):
    assert gsm8k.score(text, "1", method) == 0.0


def test_options_are_checked():
    with pytest.raises(ConfigError, match="method: got 'lax'; allowed are 'strict', 'flexible'"):
        gsm8k.extract("1", "lax")
    with pytest.raises(ConfigError, match="like: got 'trl'"):
        gsm8k.extract("1", like="trl")

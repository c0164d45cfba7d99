from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra.envs.rewards import boxed
from libra.envs.rewards.completion_format import overlong, tag_count, tag_format
from libra.errors import ConfigError

GOOD = "<think>a\nb</think>\n<answer>7</answer>"


@pytest.mark.parametrize(
    ("text", "whole", "share"),
    [
        (GOOD, 1.0, 1.0),
        (f"\n {GOOD} \n", 1.0, 1.0),
        ("so: " + GOOD, 0.0, 1.0),
        (GOOD + " done", 0.0, 1.0),
        (GOOD + GOOD, 0.0, 0.0),
        ("<answer>7</answer><think></think>", 0.0, 1.0),
        ("<think>a</think> well <answer>7</answer>", 0.0, 1.0),
        ("<think>a<answer>7</answer>", 0.0, 0.75),
        ("", 0.0, 0.0),
    ],
)
def test_the_shape_asked_for_and_a_share_of_it(text, whole, share):
    assert (tag_format(text), tag_count(text)) == (whole, share)


def test_other_tags_and_text_after_them():
    assert tag_format("<think>a</think> The answer is 7.", tags=["think"], trailing=True) == 1.0
    assert tag_format("<think>a</think> The answer is 7.", tags=["think"]) == 0.0
    assert tag_format("<think><think>a</think> 7", tags=["think"], trailing=True) == 0.0
    for wrong in ("think", [], [3]):
        with pytest.raises(ConfigError, match="give a list of names"):
            tag_format("", tags=wrong)


@pytest.mark.parametrize(
    "piece", ["<think>", "<answer></think>", "<", " ", "<think>a</think>", "\\boxed{", "{", "}", "\\frac"]
)
def test_a_million_characters_are_read_at_once(piece):
    text = piece * (10**6 // len(piece))
    assert tag_format(text) == 0.0
    assert tag_count(text) < 1.0
    assert boxed.score(text + "\\boxed{" + text + "}", "7") == 0.0


@given(st.integers(0, 400))
def test_overlong_is_the_equation_of_the_paper(num_tokens):
    if num_tokens <= 200:
        expected = 0.0
    elif num_tokens <= 300:
        expected = (200 - num_tokens) / 100
    else:
        expected = -1.0
    assert overlong(num_tokens, max_tokens=300, buffer_tokens=100) == pytest.approx(expected, abs=1e-15)
    assert overlong(num_tokens, max_tokens=300, buffer_tokens=100, penalty=0.5) == pytest.approx(
        expected / 2, abs=1e-15
    )


def test_a_buffer_that_cannot_be_is_refused():
    for buffer_tokens in (0, 301):
        with pytest.raises(ConfigError, match="allowed are 1 to max_tokens=300"):
            overlong(1, max_tokens=300, buffer_tokens=buffer_tokens)

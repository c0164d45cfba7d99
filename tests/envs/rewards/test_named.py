import pickle
from decimal import Decimal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra.envs import FunctionEnvironment
from libra.envs.rewards import boxed, gsm8k, overlong, tag_count, tag_format
from libra.errors import ConfigError
from libra.types import Turn

ROW = {"prompt": "6 * 7?", "answer": 42, "method": "lax", "format_score": 9.0}


PUBLISHED = (42, 42.0, "6 * 7.\n#### 42\nThe answer is: 4", "So $\\boxed{42}$.", "$42$", "<answer>42</answer>")


def graded(reward, make_episode, text="", num_tokens=0, answer=42):
    rows = [{**ROW, "answer": answer}]
    environment = pickle.loads(pickle.dumps(FunctionEnvironment(prompts=rows, reward=reward)))
    episode = make_episode(environment.prompt("train", 0), turns=(Turn(text, num_tokens=num_tokens),))
    return environment.grade(episode)


OVERLONG = {"name": "overlong", "max_tokens": 100, "buffer_tokens": 20}


@pytest.mark.parametrize(("reward", "text", "num_tokens", "value"), [
    ("gsm8k", "#### 42", 0, 1.0),
    ({"name": "gsm8k", "method": "flexible"}, "it is 42", 0, 1.0),
    ({"name": "gsm8k", "format_score": 0.1, "weight": 2}, "#### 41", 0, 0.2),
    ("math", "\\boxed{42}", 0, 1.0),
    ("dapo_math", "Answer: 41", 0, -1.0),
    (["dapo_math", OVERLONG], "Answer: 42", 90, 0.5),
    (["gsm8k", {"name": "tag_count", "tags": ["a"], "weight": 0.5}], "<a>#### 42", 0, 1.25),
    ({"name": "tag_format", "tags": ["a"]}, "<a>1</a>", 0, 1.0),
])  # fmt: skip
def test_a_reward_by_name_grades_and_no_column_becomes_an_option(reward, text, num_tokens, value, make_episode):
    for answer in PUBLISHED:
        assert graded(reward, make_episode, text, num_tokens, answer) == pytest.approx(value), answer


@pytest.mark.parametrize(("reward", "named"), [
    ("gsm8", "gsm8k"),
    ({"name": "gsm8k", "metod": "flexible"}, "method"),
    ({"name": "gsm8k", "weight": "2"}, "weight"),
    ("overlong", "max_tokens"),
    ([], "empty"),
])  # fmt: skip
def test_what_cannot_be_is_told_at_construction(reward, named):
    with pytest.raises(ConfigError, match=named):
        FunctionEnvironment(prompts=[ROW], reward=reward)


@pytest.mark.parametrize(("text", "method", "answer", "value"), [
    ("#### 1,000,000.", "strict", "1000000", 1.0),
    ("The total is 1,234", "flexible", "1234", 1.0),
    ("It costs 3.50.", "flexible", "3.5", 1.0),
    ("#### -0", "strict", "0", 1.0),
    ("#### 42 " + "x" * 1000, "strict", "42", 1.0),
    ("42", "strict", "42", 0.0),
    ("in 2024, 41", "flexible", "42", 0.1),
    ("1.2.3", "flexible", "3", 0.0),
])  # fmt: skip
def test_numbers_are_compared_as_numbers(text, method, answer, value):
    assert gsm8k.score(text, answer, method, format_score=0.1) == value


def test_a_truth_that_cannot_be_read_is_no_reward():
    with pytest.raises(ValueError, match="see above"):
        gsm8k.score("#### 42", "see above")


@given(st.decimals(-(10**12), 10**12, allow_nan=False, places=3))
def test_one_spelling_for_each_number(number):
    spellings = {f"{number:f}", f"{number:,f}", f"{number:f}00", f"{number:f}."}
    (spelling,) = {gsm8k.canonical(each) for each in spellings}
    assert Decimal(spelling) == number


@pytest.mark.parametrize(
    "text", ["0" * 10**5 + ".1.1", "0." + "0" * 10**5 + ".", "9," * 50_000, "#### " * 20_000, "-" * 10**5]
)
@pytest.mark.parametrize("method", ["strict", "flexible"])
def test_many_characters_are_read_at_once(text, method):
    assert gsm8k.score(text, "1", method) == 0.0


GOOD = "<think>a\nb</think>\n<answer>7</answer>"


@pytest.mark.parametrize(("text", "whole", "share"), [
    (GOOD, 1.0, 1.0),
    (f"\n {GOOD} \n", 1.0, 1.0),
    ("so: " + GOOD, 0.0, 1.0),
    (GOOD + GOOD, 0.0, 0.0),
    ("<answer>7</answer><think></think>", 0.0, 1.0),
    ("<think>a</think> well <answer>7</answer>", 0.0, 1.0),
    ("<think>a<answer>7</answer>", 0.0, 0.75),
    ("", 0.0, 0.0),
])  # fmt: skip
def test_the_shape_asked_for_and_a_share_of_it(text, whole, share):
    assert (tag_format(text), tag_count(text)) == (whole, share)


def test_other_tags_and_text_after_them():
    assert tag_format("<think>a</think> The answer is 7.", tags=["think"], trailing=True) == 1.0
    assert tag_format("<think>a</think> The answer is 7.", tags=["think"]) == 0.0
    assert tag_format("<think><think>a</think> 7", tags=["think"], trailing=True) == 0.0
    for wrong in ("think", [], [3]):
        with pytest.raises(ConfigError):
            tag_format("", tags=wrong)


@pytest.mark.parametrize(
    "piece", ["<think>", "<answer></think>", "<", " ", "<think>a</think>", "\\boxed{", "{", "\\frac"]
)
def test_long_text_is_read_at_once(piece):
    text = piece * (200_000 // len(piece))
    assert tag_format(text) == 0.0
    assert tag_count(text) < 1.0
    assert boxed.score(text + "\\boxed{" + text + "}", "7") == 0.0


@given(st.integers(0, 400))
def test_overlong_is_the_equation_of_the_paper(num_tokens):
    expected = np.interp(num_tokens, [200, 300], [0, -1])
    assert overlong(num_tokens, max_tokens=300, buffer_tokens=100) == pytest.approx(expected, abs=1e-15)
    halved = overlong(num_tokens, max_tokens=300, buffer_tokens=100, penalty=0.5)
    assert halved == pytest.approx(expected / 2, abs=1e-15)


@pytest.mark.parametrize("buffer_tokens", [0, 301])
def test_a_buffer_that_cannot_be_is_refused(buffer_tokens):
    with pytest.raises(ConfigError):
        overlong(1, max_tokens=300, buffer_tokens=buffer_tokens)

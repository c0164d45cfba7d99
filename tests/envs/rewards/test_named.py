from __future__ import annotations

import importlib.util
import pickle

import pytest

from libra.envs import FunctionEnvironment
from libra.envs.rewards import REWARDS, make_reward
from libra.errors import ConfigError
from libra.types import Turn

ROW = {"prompt": "6 * 7?", "answer": 42, "method": "lax", "format_score": 9.0}


def graded(reward, make_episode, text="", num_tokens=0):
    environment = pickle.loads(pickle.dumps(FunctionEnvironment(prompts=[ROW], reward=reward)))
    episode = make_episode(environment.prompt("train", 0), turns=(Turn(text, num_tokens=num_tokens),))
    return environment.grade(episode)


OVERLONG = {"name": "overlong", "max_tokens": 100, "buffer_tokens": 20}


@pytest.mark.parametrize(
    ("reward", "text", "num_tokens", "value"),
    [
        ("gsm8k", "#### 42", 0, 1.0),
        ("gsm8k", "it is 42", 0, 0.0),
        ({"name": "gsm8k", "method": "flexible"}, "it is 42", 0, 1.0),
        ({"name": "gsm8k", "format_score": 0.1, "weight": 2}, "#### 41", 0, 0.2),
        ("math", "\\boxed{42}", 0, 1.0),
        ("dapo_math", "Answer: 41", 0, -1.0),
        (["dapo_math", OVERLONG], "Answer: 42", 90, 0.5),
        (["gsm8k", {"name": "tag_count", "tags": ["a"], "weight": 0.5}], "<a>#### 42", 0, 1.25),
        ({"name": "tag_format", "tags": ["a"]}, "<a>1</a>", 0, 1.0),
    ],
)
def test_a_reward_by_name_grades_and_no_column_becomes_an_option(reward, text, num_tokens, value, make_episode):
    assert graded(reward, make_episode, text, num_tokens) == pytest.approx(value)


@pytest.mark.parametrize(
    ("reward", "says"),
    [
        ("gsm8", "no reward is called 'gsm8' .did you mean 'gsm8k'"),
        ({"method": "flexible"}, "no reward is called None"),
        ({"name": "gsm8k", "metod": "flexible"}, "no option 'metod' .did you mean 'method'"),
        ({"name": "gsm8k", "method": "lax"}, "method: got 'lax'"),
        ({"name": "gsm8k", "weight": "2"}, "weight is '2'"),
        ("overlong", "option 'max_tokens' is missing"),
        ({"name": "math", "x": 1}, "it takes none"),
        ([], "empty list"),
    ],
)
def test_what_cannot_be_is_told_at_construction(reward, says):
    with pytest.raises(ConfigError, match=says):
        FunctionEnvironment(prompts=[ROW], reward=reward)


def test_prompts_without_answers_are_told():
    with pytest.raises(ConfigError, match="'answer' is not one of prompt, completion, episode"):
        FunctionEnvironment(prompts=["6 * 7?"], reward="gsm8k")


def test_every_name_is_documented(repository):
    page = (repository / "docs" / "rewards.md").read_text()
    assert [name for name in REWARDS if f"`{name}`" not in page] == []


def test_a_package_that_is_missing_is_told_at_construction(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install"):
        make_reward("math_verify")

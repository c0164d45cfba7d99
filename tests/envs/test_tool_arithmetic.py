import asyncio
import re
from collections import Counter

import pytest

from libra.envs import run_action
from libra.envs.tool_arithmetic import ANSWER, LIMIT, TRAIN_SHARES, ToolArithmetic, calculate
from libra.types import ToolCall, ToolStatus

LINE = re.compile(r"([a-z]) -> ([a-z]|ans): ([-+*]) (\d)")


def text_of(environment, split, index):
    return environment.prompt(split, index).messages[-1]["content"]


def worked_out(prompt):
    """The value of ans, found by following the lines, and how many lines were not needed."""
    start, *lines = prompt.messages[-1]["content"].splitlines()
    name, number = start.split(" = ")
    value, line_of = int(number), {LINE.fullmatch(line)[1]: line for line in lines}
    assert len(line_of) == len(lines)
    while name != ANSWER:
        name, number = calculate(line_of.pop(name), value).split(" = ")
        value = int(number)
        assert 0 <= value <= LIMIT
    return value, len(line_of)


def test_questions_are_a_chain_in_which_each_line_uses_another():
    environment = ToolArithmetic()
    for index in range(100):
        prompt = environment.prompt("train", index)
        assert len(prompt.messages[-1]["content"].splitlines()) == prompt.facts["num_operations"] + 1
        assert worked_out(prompt) == (prompt.facts["answer"], 0)


def test_training_lengths_have_a_long_tail_and_evaluation_has_equal_shares():
    environment = ToolArithmetic()
    train = Counter(environment.prompt("train", index).facts["num_operations"] for index in range(3000))
    assert [train[n] / 3000 for n in range(1, 9)] == pytest.approx(TRAIN_SHARES, abs=0.03)
    held_out = Counter(environment.prompt("eval", index).facts["num_operations"] for index in range(256))
    assert set(held_out.values()) == {32}
    assert len(held_out) == 8


def test_no_question_is_in_both_splits_whatever_the_seeds():
    def texts(split, seeds, count):
        made = [ToolArithmetic(seed=seed, max_operations=1) for seed in seeds]
        return {text_of(environment, split, index) for environment in made for index in range(count)}

    train, held_out = texts("train", (0, 1), 1000), texts("eval", (0, 2), 200)
    assert len(train) > 1000
    assert len(held_out) > 200
    assert not train & held_out


@pytest.mark.parametrize(
    ("line", "value", "result"),
    [("k -> d: * 3", 22, "d = 66"), ("k->ans:-9", 7, "ans = -2"), (" k -> d : + -4 ", -3, "d = -7")],
)
def test_the_calculator_does_one_line(line, value, result):
    assert calculate(line, value) == result


@pytest.mark.parametrize(
    "line", ["", "d = 22 * 3", "k -> d: + 5\nd -> ans: * 3", "k -> d: / 2", "k -> d: + " + "1" * 10**5]
)
def test_the_calculator_does_nothing_else(line):
    with pytest.raises(ValueError):
        calculate(line, 1)
    with pytest.raises(OverflowError):
        calculate("k -> d: * 2", 500)


def test_the_stated_share_of_calls_hangs_and_which_ones_depends_on_the_action_id():
    environment = ToolArithmetic(timeout_rate=0.25, timeout_s=0.001)
    prompt, call = environment.prompt("train", 0), ToolCall("calculator", {"line": "k -> d: * 2", "value": 3})

    async def run():
        actions = (run_action(environment, prompt, call, action_id=f"train-0-0-{i}/0/0") for i in range(400))
        return [given.status for given in await asyncio.gather(*actions)]

    first, again = asyncio.run(run()), asyncio.run(run())
    assert first == again
    assert set(first) == {ToolStatus.OK, ToolStatus.TIMEOUT}
    assert first.count(ToolStatus.TIMEOUT) / 400 == pytest.approx(0.25, abs=0.08)


@pytest.mark.parametrize(
    ("answer", "reward"),
    [("{}", 1.0), ("1 then {}<|im_end|>", 1.0), ("{}0", 0.0), ("{} or 1", 0.0), ("9" * 10**5, 0.0)],
)
def test_the_reward_is_one_for_the_exact_last_number(answer, reward, make_episode):
    prompt = ToolArithmetic().prompt("eval", 7)
    assert ToolArithmetic().grade(make_episode(prompt, answer.format(prompt.facts["answer"]))) == reward

"""Questions, splits, examples and grades of reasoning-gym's datasets."""

import asyncio
import json

import pytest

from libra.envs import make_environment, run_grader
from libra.errors import ConfigError, RewardFault
from libra.types import Prompt, ToolCall, Turn

pytest.importorskip("reasoning_gym", reason="pip install -e '.[reasoning-gym]'")

SMALL = {"chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}}


def made(seed=0, **args):
    return make_environment("examples.math.reasoning_gym:ReasoningGym", {"dataset": "gsm_symbolic", **args}, seed)


def question(prompt):
    return prompt.messages[-1]["content"]


def test_no_question_is_in_both_splits_whatever_the_seed():
    train, held_out, examples = set(), set(), set()
    for seed in range(3):
        environment = made(seed, dataset=SMALL, examples=3)  # some hundred questions: they meet again and again
        train |= {question(environment.prompt("train", index)) for index in range(40)}
        held_out |= {question(environment.prompt("eval", index)) for index in range(40)}
        examples |= {m["content"] for m in environment.prompt("train", 0).messages[1:-1] if m["role"] == "user"}
    assert len(train) > 30
    assert len(held_out) > 5
    assert len(examples) > 2
    assert not train & held_out
    assert not examples & (train | held_out)


@pytest.mark.parametrize(("answer", "text", "reward"), [
    ("number", "{} is it", 1.0),
    ("number", "It is 17, no: {}.", 1.0),
    ("number", "no idea", 0.0),
    ("tags", "<answer>1</answer> or <answer> {} </answer>", 1.0),
    ("tags", "{}", 0.0),
    ("text", " {}\n", 1.0),
])  # fmt: skip
def test_the_dataset_grades_what_is_read_from_the_last_turn(answer, text, reward, make_episode):
    environment = made(answer=answer)
    prompt = environment.prompt("train", 3)
    episode = make_episode(prompt, text.format(prompt.facts["answer"]))
    assert asyncio.run(run_grader(environment, episode)) == reward


def test_a_turn_that_ends_in_a_call_is_no_answer(make_episode):
    environment = made()
    prompt = environment.prompt("train", 0)
    call = ToolCall("calculator", {"expression": prompt.facts["answer"]})
    text = json.dumps({"expression": prompt.facts["answer"]})
    assert environment.grade(make_episode(prompt, turns=(Turn(text, (call,)),))) == 0.0
    assert environment.grade(make_episode(prompt, turns=())) == 0.0


def test_a_question_that_came_from_elsewhere_is_an_error_not_a_zero(make_episode):
    environment = made()
    prompt = environment.prompt("train", 0)
    moved = Prompt(prompt.prompt_id, ({"role": "user", "content": "Another question?"},), prompt.facts)
    with pytest.raises(RewardFault):
        asyncio.run(run_grader(environment, make_episode(moved, "1")))


@pytest.mark.parametrize("dataset", [SMALL, "gsm_symbolic"])
def test_worked_examples_are_calls_the_parser_reads_and_answers_that_are_right(dataset):
    environment = made(dataset=dataset, examples=3)
    messages = environment.prompt("train", 0).messages
    assert [m["role"] for m in messages] == ["system", *["user", "assistant", "tool", "assistant"] * 3, "user"]
    for place in range(1, 13, 4):
        _, call, shown, said = messages[place : place + 4]
        (parsed,) = environment.parse(call["content"])
        assert parsed.error is None
        assert environment.calculator(**parsed.arguments) == shown["content"] == said["content"]


@pytest.mark.parametrize(("args", "named"), [
    ({"dataset": "gsm_symbolc"}, "gsm_symbolic"),
    ({"dataset": {"chain_sum": {"min_terms": 5, "max_terms": 2}}}, "chain_sum"),
    ({"dataset": {"chain_sum": {"seed": 2}}}, "seed"),
    ({"answer": "last"}, "answer"),
])  # fmt: skip
def test_arguments_that_cannot_be_are_told(args, named):
    with pytest.raises(ConfigError, match=named):
        made(**args)

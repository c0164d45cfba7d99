"""Questions, splits, examples and grades of reasoning-gym's datasets."""

from __future__ import annotations

import asyncio
import json

import pytest

from libra.envs import make_environment, run_action, run_grader
from libra.errors import ConfigError, RewardFault
from libra.types import Prompt, ToolCall, ToolStatus, Turn

pytest.importorskip("reasoning_gym", reason="pip install 'libra-rl[reasoning-gym]'")

SMALL = {"chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}}


def made(seed: int = 0, **args):
    return make_environment("reasoning_gym", {"dataset": "gsm_symbolic", **args}, seed)


def question(prompt: Prompt) -> str:
    return prompt.messages[-1]["content"]


def test_questions_are_determined_by_seed_split_and_index():
    one, same, other = made(), made(), made(seed=1)
    shown = [[question(each.prompt("train", i)) for i in range(20)] for each in (one, same, other)]
    assert shown[0] == shown[1] != shown[2]
    assert len(set(shown[0])) == 20


def test_no_question_is_in_both_splits_whatever_the_seed():
    train, held_out, examples = set(), set(), set()
    for seed in range(4):
        environment = made(
            seed, dataset=SMALL, examples=3
        )  # some hundred different questions: they meet again and again
        train |= {question(environment.prompt("train", index)) for index in range(60)}
        held_out |= {question(environment.prompt("eval", index)) for index in range(60)}
        examples |= {m["content"] for m in environment.prompt("train", 0).messages[1:-1] if m["role"] == "user"}
    assert len(train) > 50
    assert len(held_out) > 5
    assert len(examples) > 2
    assert not train & held_out
    assert not examples & (train | held_out)


def test_size_is_the_number_of_different_training_questions():
    environment = made(size=5)
    assert len({question(environment.prompt("train", index)) for index in range(15)}) == 5
    assert len({question(environment.prompt("eval", index)) for index in range(15)}) == 15
    names = [environment.prompt_id("train", index) for index in range(15)]
    assert names == [environment.prompt("train", index).prompt_id for index in range(15)]
    assert environment.prompt_id("eval", 0) == made().prompt_id("train", 0) == ""


@pytest.mark.parametrize(
    ("answer", "text", "reward"),
    [
        ("number", "{} is it", 1.0),
        ("number", "It is 17, no: {}.", 1.0),
        ("number", "no idea", 0.0),
        ("tags", "<answer>1</answer> or <answer> {} </answer>", 1.0),
        ("tags", "{}", 0.0),
        ("text", " {}\n", 1.0),
    ],
)
def test_the_dataset_grades_what_is_read_from_the_last_turn(answer, text, reward, make_episode):
    environment = made(answer=answer)
    prompt = environment.prompt("train", 3)
    episode = make_episode(prompt, text.format(prompt.facts["answer"]))
    assert asyncio.run(run_grader(environment, episode)) == reward


def test_partial_credit_is_the_datasets_own(make_episode):
    environment = made(dataset="basic_arithmetic", answer="text")
    prompt = environment.prompt("train", 0)
    right = prompt.facts["answer"]
    assert environment.grade(make_episode(prompt, f"{right} it is")) == len(right) / len(f"{right} it is")


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
    with pytest.raises(RewardFault, match="another question for seed"):
        asyncio.run(run_grader(environment, make_episode(moved, "1")))


def test_the_calculator_is_a_tool_and_its_errors_are_for_the_model():
    environment = made()
    prompt = environment.prompt("train", 0)

    def returned(expression: object):
        call = ToolCall("calculator", {"expression": expression})
        return asyncio.run(run_action(environment, prompt, call, action_id="a"))

    assert returned("12 * 7 + 5").content == "89"
    assert returned("os.exit()").status is ToolStatus.ERROR
    assert returned(3).status is ToolStatus.MALFORMED
    assert made(calculator=False).tools == ()
    assert "calculator" not in made(calculator=False).prompt("train", 0).messages[0]["content"]


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


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"dataset": "gsm_symbolc"}, "did you mean 'gsm_symbolic'"),
        ({"dataset": []}, "name at least one"),
        ({"dataset": {"chain_sum": {"terms": 2}}}, "refuses"),
        ({"dataset": {"chain_sum": {"min_terms": 5, "max_terms": 2}}}, "refuses"),
        ({"dataset": {"chain_sum": {"seed": 2}}}, "'seed' is Libra's"),
        ({"answer": "last"}, "allowed are 'number', 'tags', 'text'"),
        ({"size": 0}, "at least 1"),
        ({"examples": -1}, "0 or more"),
    ],
)
def test_arguments_that_cannot_be_are_told(args, message):
    with pytest.raises(ConfigError, match=message):
        made(**args)


def test_a_missing_package_names_the_extra(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "reasoning_gym.factory", None)
    with pytest.raises(ConfigError, match=r"libra-rl\[reasoning-gym\]"):
        made()


def test_a_dataset_without_enough_questions_is_named(monkeypatch):
    monkeypatch.setattr("libra.envs.reasoning_gym._split_of", lambda name, question: "train")
    environment = made(dataset="chain_sum")
    assert environment.prompt("train", 0)
    with pytest.raises(ConfigError, match="chain_sum has too few different questions for the split 'eval'"):
        environment.prompt("eval", 0)

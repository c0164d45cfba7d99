"""An environment of the package verifiers, as its users write them: the quick start's questions, with a calculator as its tool."""

from __future__ import annotations

import operator
import random
import re
from itertools import pairwise

import verifiers as vf
from datasets import Dataset

SYSTEM = (
    "Work out ans. Each line leads from one name to the next by one operation; the lines are in no order. "
    "Use the calculator, one line per call. Then reply with the final number only."
)
OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
LINE = re.compile(r"\s*\w+\s*->\s*(\w+)\s*:\s*([-+*])\s*(-?\d+)\s*")


def calculator(line: str, value: int) -> str:
    """Works out one line.

    Args:
        line: The line, as it is in the question, e.g. "k -> d: + 5".
        value: The value of the name that the line begins with, e.g. 17.
    """
    match = LINE.fullmatch(line)
    if match is None:
        return 'one line per call, such as "k -> d: + 5"'
    name, sign, operand = match.groups()
    return f"{name} = {OPERATORS[sign](int(value), int(operand))}"


def question(generator: random.Random) -> dict[str, str]:
    """A chain of 1 to 4 operations, and its answer."""
    value, names = generator.randint(2, 99), [*generator.sample("abcdefghkmnp", generator.randint(1, 4)), "ans"]
    start, lines = f"{names[0]} = {value}", []
    for before, name in pairwise(names):
        while True:
            sign, operand = generator.choice("+-*"), generator.randint(2, 9)
            if 0 <= OPERATORS[sign](value, operand) <= 999:
                break
        value = OPERATORS[sign](value, operand)
        lines.append(f"{before} -> {name}: {sign} {operand}")
    generator.shuffle(lines)
    return {"question": "\n".join([start, *lines]), "answer": str(value)}


def right(completion: list, answer: str) -> float:
    """1 if the last number of the last message is the answer."""
    last = completion[-1]
    content = last["content"] if isinstance(last, dict) else last.content
    numbers = re.findall(r"-?\d+", str(content or ""))
    return float(bool(numbers) and numbers[-1] == answer)


def load_environment(size: int = 1000, seed: int = 0) -> vf.Environment:
    """What ``vf.load_environment("verifiers_arithmetic")`` gives."""
    generator = random.Random(seed)
    rows = Dataset.from_list([question(generator) for _ in range(size)])
    return vf.ToolEnv(
        dataset=rows, system_prompt=SYSTEM, tools=[calculator], max_turns=8, rubric=vf.Rubric(funcs=[right])
    )

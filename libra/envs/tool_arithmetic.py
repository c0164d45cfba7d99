"""Chains of 1 to 8 operations in shuffled lines, with a calculator for one line at a time.

A question reads::

    k = 17
    d -> ans: * 3
    k -> d: + 5

Every operation needs a call, so a trajectory has one turn per operation and one for the answer.
After a malformed call, an overflow or an injected time-out the model may try again.
"""

from __future__ import annotations

import asyncio
import operator
import random
import re
from itertools import pairwise

from libra.envs.environment import BIN, Environment, question_class
from libra.envs.tool import Tool, tool
from libra.errors import ConfigError
from libra.types import Episode, Prompt

MAX_OPERATIONS = 8
LIMIT = 999
"""Largest magnitude of a result, which only wrong operations exceed."""

SYSTEM = (
    "Work out ans. Each line leads from one name to the next by one operation; the lines are in no order. "
    "Use the calculator, one line per call. Then reply with the final number only."
)
NAMES = "abcdefghkmnp"
ANSWER = "ans"
_OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
_LINE = re.compile(r"\s*[A-Za-z_]\w{0,20}\s*->\s*([A-Za-z_]\w{0,20})\s*:\s*([-+*])\s*(-?\d{1,9})\s*")
_INTEGER = re.compile(r"-?\d+")

TRAIN_SHARES = (0.20, 0.19, 0.16, 0.13, 0.11, 0.08, 0.07, 0.06)
"""Shares of training questions with 1, 2, ... 8 operations: most are short, the tail is long."""


class ToolArithmetic(Environment):
    """The environment registered as ``tool_arithmetic``.

    The reward is 1.0 if the last integer of the last turn is the answer, else 0.0. Training
    questions have 1 to ``max_operations`` operations in the shares of `TRAIN_SHARES`; evaluation
    question ``i`` has ``i % max_operations + 1``. A hash of the text puts 1 in 8 questions into the
    evaluation split for every seed. Facts: ``num_operations``, ``answer``.

    Parameters
    ----------
    timeout_rate : float
        Share of calls, drawn by action id, that hang until their time-out.
    timeout_s : float
        Wall seconds of a call.
    spare_lines : int
        Most superfluous lines of a question; the number is drawn uniformly from 0 on.
    calculator : bool
        Whether the environment has its calculator; otherwise a tool of the same name must come from
        elsewhere, such as an MCP server.
    inline : bool
        Whether calls may run inside the generation quantum, where a hang holds the engine's slot.
    """

    def __init__(
        self, *, timeout_rate: float = 0.02, timeout_s: float = 0.2, max_operations: int = MAX_OPERATIONS,
        spare_lines: int = 0, calculator: bool = True, inline: bool = False, seed: int = 0,
    ) -> None:  # fmt: skip
        most_spare = MAX_OPERATIONS - max_operations
        for name, value, fits, allowed in (
            ("timeout_rate", timeout_rate, 0.0 <= timeout_rate < 1.0, "a share of calls, at least 0 and below 1"),
            ("max_operations", max_operations, 1 <= max_operations <= MAX_OPERATIONS, f"1 to {MAX_OPERATIONS}"),
            ("spare_lines", spare_lines, 0 <= spare_lines <= most_spare, f"0 to {MAX_OPERATIONS} - max_operations"),
        ):
            if not fits:
                raise ConfigError(f"environment.args.{name}: got {value!r}; {allowed}")
        self.seed, self.timeout_rate = seed, timeout_rate
        self.max_operations, self.spare_lines = max_operations, spare_lines
        own = tool(self.calculator, timeout_s=timeout_s, inline=inline)
        self.tools: tuple[Tool, ...] = (own,) if calculator else ()

    def prompt(self, split: str, index: int) -> Prompt:
        self.check_split(split)
        attempt = 0
        while True:
            generator = random.Random(f"tool_arithmetic/{self.seed}/{split}/{index}/{attempt}")
            if split == "eval":
                num_operations = index % self.max_operations + 1
            else:
                shares = TRAIN_SHARES[: self.max_operations]
                num_operations = generator.choices(range(1, len(shares) + 1), shares)[0]
            text, answer = question(generator, num_operations, generator.randint(0, self.spare_lines))
            if (question_class(text) == 0) == (split == "eval"):
                messages = ({"role": "system", "content": SYSTEM}, {"role": "user", "content": text})
                name = f"{num_operations} operation{'s' if num_operations > 1 else ''}"
                facts = {"num_operations": num_operations, "answer": answer, BIN: name}
                return Prompt(f"{split}-{index}", messages, facts)
            attempt += 1

    def grade(self, episode: Episode) -> float:
        numbers = _INTEGER.findall(episode.answer)
        # Compared as text: int() of a million generated digits would raise.
        return float(bool(numbers) and numbers[-1] == str(episode.prompt.facts["answer"]))

    async def calculator(self, line: str, value: int, action_id: str = "") -> str:
        """Works out one line.

        Args:
            line: The line, as it is in the question, e.g. "k -> d: + 5".
            value: The value of the name that the line begins with, e.g. 17.
        """
        if self._hangs(action_id):
            await asyncio.Event().wait()
        return calculate(line, value)

    def _hangs(self, action_id: str) -> bool:
        return random.Random(f"hang/{self.seed}/{action_id}").random() < self.timeout_rate


def question(generator: random.Random, num_operations: int, num_spare: int = 0) -> tuple[str, int]:
    """Text and answer of a chain of ``num_operations`` operations with results from 0 to `LIMIT`.
    ``num_spare`` superfluous lines form a chain of their own, whose first name has no value."""
    value = generator.randint(2, 99)
    shuffled = generator.sample(NAMES, num_operations + num_spare + bool(num_spare))
    names, spare = [*shuffled[:num_operations], ANSWER], shuffled[num_operations:]
    start, lines = f"{names[0]} = {value}", []
    for before, name in pairwise(names):
        sign, operand = _step(generator, value)
        value = _OPERATORS[sign](value, operand)
        lines.append(f"{before} -> {name}: {sign} {operand}")
    for before, name in pairwise(spare):
        lines.append(f"{before} -> {name}: {generator.choice('+-*')} {generator.randint(2, 9)}")
    generator.shuffle(lines)
    return "\n".join((start, *lines)), value


def _step(generator: random.Random, value: int) -> tuple[str, int]:
    while True:
        sign, operand = generator.choice("+-*"), generator.randint(2, 9)
        if 0 <= _OPERATORS[sign](value, operand) <= LIMIT:
            return sign, operand


def calculate(line: str, value: int) -> str:
    """``"k -> d: + 5"`` with 17 for k gives ``"d = 22"``. ValueError for a malformed line;
    OverflowError if ``value`` or the result exceeds `LIMIT` in magnitude."""
    match = _LINE.fullmatch(line)
    if match is None:
        raise ValueError('one line per call, such as "k -> d: + 5"')
    name, sign, operand = match.groups()
    result = _OPERATORS[sign](value, int(operand))
    if max(abs(result), abs(value)) > LIMIT:
        raise OverflowError(f"above {LIMIT}")
    return f"{name} = {result}"

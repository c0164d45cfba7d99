"""Word problems and puzzles of the package reasoning-gym, with a calculator, graded by each
dataset's own rules."""

from __future__ import annotations

import ast
import json
import logging
import math
import operator
import random
import re
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal, localcontext
from fractions import Fraction
from functools import lru_cache
from typing import Any

from libra.envs.environment import BIN, Environment, question_class
from libra.envs.tool import Tool, tool
from libra.errors import ConfigError, EnvironmentFault, nearest, one_of, pip_install
from libra.types import Episode, Prompt
from libra.untrusted import error_text, repr_text

logger = logging.getLogger(__name__)

EXTRA = pip_install("reasoning-gym")
_SPLITS = {0: "eval", 1: "example"}
"""Classes of questions for evaluation and worked examples; the others are for training."""
_MAX_ATTEMPTS = 2000
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_OPEN, _CLOSE = "<answer>", "</answer>"

ENDINGS = {
    "number": "reply with the final number only.",
    "tags": "give the final answer between <answer> and </answer>.",
    "text": "reply with the final answer only.",
}
"""Instruction to the model, by the graded part of the last turn."""
CALL = "Write one call of the calculator and read its result. Then "

_EXAMPLES = (
    ("Tom has 12 bags of 7 apples and 5 more apples. How many apples does he have?", "12 * 7 + 5"),
    ("Ann has 96 cards and gives a third of them to Bob. How many cards are left?", "96 - 96 / 3"),
    ("A bus has 40 seats, and 25 % of them are free. How many are taken?", "40 - 40 * 25 / 100"),
)
"""Worked examples for datasets whose questions have no expression."""


class ReasoningGym(Environment):
    """Needs the package reasoning-gym. In a configuration: ``examples.math.reasoning_gym:ReasoningGym``.

    The reward is the dataset's ``score_answer``, 0 to 1. A hash of a question's text decides its
    split (1 in 8 is evaluation), so no run trains on a question that another holds out. Facts:
    ``dataset``, ``answer``, and ``seed``: the dataset of size 1 with this seed has only this
    question.

    Parameters
    ----------
    dataset : str, list of str, or mapping
        Names such as "gsm_symbolic" or "chain_sum", of which each question draws one evenly; a
        mapping gives each its configuration, ``{"chain_sum": {"max_terms": 3}}``.
    calculator : bool
        Whether the model has the calculator.
    answer : str
        Graded part of the last turn: the last "number", the text between <answer> "tags", or its
        whole "text". A turn that ends in a call has no answer.
    examples : int
        Worked examples before the question, as a conversation with calls. Small models need some.
    size : int, optional
        Number of training questions, which then repeat; unlimited by default.
    inline : bool
        Whether calls run inside the generation quantum.

    Raises
    ------
    ConfigError
        The package is not installed, the dataset is unknown, or it refuses the configuration.
    """

    def __init__(
        self, *, dataset: str | Sequence[str] | Mapping[str, Mapping[str, Any]] = "chain_sum", calculator: bool = True,
        answer: str = "number", examples: int = 0, size: int | None = None, inline: bool = False, seed: int = 0,
    ) -> None:  # fmt: skip
        one_of("environment.args.answer", answer, tuple(ENDINGS))
        if size is not None and size < 1:
            raise ConfigError(f"environment.args.size: got {size!r}; at least 1 question, or null for no limit")
        if examples < 0:
            raise ConfigError(f"environment.args.examples: got {examples!r}; 0 or more")
        self.datasets = _datasets(dataset)
        self.seed, self.answer, self.examples, self.size = seed, answer, examples, size
        self.tools: tuple[Tool, ...] = (tool(self.calculator, timeout_s=5.0, inline=inline),) if calculator else ()
        ending = ENDINGS[answer]
        self.system = CALL + ending if calculator else ending.capitalize()

    def prompt(self, split: str, index: int) -> Prompt:
        self.check_split(split)
        if split == "train" and self.size is not None:
            index %= self.size
        name, seed, entry = self._drawn(split, index)
        worked = (message for number in range(self.examples) for message in self._example(name, number))
        messages = ({"role": "system", "content": self.system}, *worked, {"role": "user", "content": _question(entry)})
        facts = {"dataset": name, "seed": seed, "answer": str(entry["answer"]), BIN: name}
        return Prompt(f"{split}-{index}", messages, facts)

    def prompt_id(self, split: str, index: int) -> str:
        return f"train-{index % self.size}" if split == "train" and self.size is not None else ""

    def grade(self, episode: Episode) -> float:
        name, seed = episode.prompt.facts["dataset"], episode.prompt.facts["seed"]
        dataset, entry = _entry(name, self.datasets[name], seed)
        if _question(entry) != episode.prompt.messages[-1]["content"]:
            raise EnvironmentFault(
                f"reasoning_gym: {name} gave another question for seed {seed} than before: it depends on more than its seed, "
                "or another version of reasoning-gym is installed here"
            )
        answer = self.answered(episode)
        try:
            return float(dataset.score_answer(answer, entry))
        except Exception as error:  # noqa: BLE001 boundary: an odd answer may break the dataset's own parser
            logger.info("reasoning_gym: %s scores 0: %s for %s", name, error_text(error), repr_text(answer))
            return 0.0

    def answered(self, episode: Episode) -> str | None:
        """The graded text; None without an answer."""
        if not episode.turns or episode.turns[-1].calls:
            return None
        text = episode.answer
        if self.answer == "text":
            return text.strip() or None
        if self.answer == "tags":  # the last closed pair; a pattern would be quadratic in open tags
            before, closed, _ = text.rpartition(_CLOSE)
            return before.rpartition(_OPEN)[2].partition(_CLOSE)[0].strip() if closed and _OPEN in before else None
        found = _NUMBER.findall(text)
        return found[-1].replace(",", "") if found else None

    def calculator(self, expression: str) -> str:
        """Works out arithmetic.

        Args:
            expression: The arithmetic, e.g. "12 * 7 + 5".
        """
        return calculate(expression)

    def _drawn(self, split: str, index: int, name: str | None = None) -> tuple[str, int, dict[str, Any]]:
        """Dataset, seed and entry of a question in ``split``."""
        draw = random.Random(f"reasoning_gym/{self.seed}/{split}/{index}/{name}")
        name = name or draw.choice(sorted(self.datasets))
        for _ in range(_MAX_ATTEMPTS):
            seed = draw.getrandbits(32)
            entry = _entry(name, self.datasets[name], seed)[1]
            if _SPLITS.get(question_class(f"{name}/{_question(entry)}"), "train") == split:
                return name, seed, entry
        raise ConfigError(
            f"environment.args.dataset: {name} has too few different questions for the split {split!r}: none among "
            f"{_MAX_ATTEMPTS} drawn; give it a configuration with more of them"
        )

    def _example(self, name: str, number: int) -> list[dict[str, str]]:
        """A worked question of the dataset if it has an expression, else one of `_EXAMPLES`."""
        entry = self._drawn("example", number, name)[2]
        expression = entry.get("metadata", {}).get("expression")
        if isinstance(expression, str):
            question, result = _question(entry), str(entry["answer"])
        elif number < len(_EXAMPLES):
            question, expression = _EXAMPLES[number]
            result = calculate(expression)
        else:
            return []
        call = json.dumps({"name": "calculator", "arguments": {"expression": expression}})
        called = [("assistant", f"<tool_call>\n{call}\n</tool_call>"), ("tool", calculate(expression))]
        last = f"<answer>{result}</answer>" if self.answer == "tags" else result
        said = [("user", question), *(called if self.tools else ()), ("assistant", last)]
        return [{"role": role, "content": content} for role, content in said]


def _datasets(given: str | Sequence[str] | Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Configurations as JSON by dataset, checked by making each dataset once."""
    where = "environment.args.dataset"
    names = [given] if isinstance(given, str) else list(given)
    configs = {name: dict((given[name] if isinstance(given, Mapping) else None) or {}) for name in names}
    if not configs:
        raise ConfigError(f"{where}: got none; name at least one, e.g. gsm_symbolic")
    try:
        from reasoning_gym.factory import DATASETS, create_dataset
    except ImportError as error:
        raise ConfigError(f"{where}: the package reasoning-gym is not installed ({error}); type {EXTRA}") from error
    for name, config in configs.items():
        if name not in DATASETS:
            known = ", ".join(sorted(DATASETS))
            raise ConfigError(
                f"{where}: reasoning-gym has no dataset {name!r}{nearest(name, DATASETS)}; it has {known}"
            )
        for key in ("seed", "size"):
            if key in config:
                raise ConfigError(f"{where}.{name}: Libra sets {key!r}; environment.args.size counts questions")
        try:
            create_dataset(name, size=1, seed=0, **config)[0]
        except (TypeError, AssertionError, ValueError) as error:
            raise ConfigError(f"{where}.{name}: reasoning-gym refuses {config}: {error!r}") from error
    return {name: json.dumps(config, sort_keys=True) for name, config in configs.items()}


@lru_cache(maxsize=8192)
def _entry(name: str, config: str, seed: int) -> tuple[Any, dict[str, Any]]:
    """The dataset of the one question of ``seed``, and its entry."""
    from reasoning_gym.factory import create_dataset

    dataset = create_dataset(name, size=1, seed=seed, **json.loads(config))
    return dataset, dataset[0]


def _question(entry: Mapping[str, Any]) -> str:
    return str(entry["question"]).strip()


MAX_CHARS = 200
MAX_DIGITS = 60
"""Most digits of a numerator or denominator, also in between."""
MAX_EXPONENT = 100

_SPELLINGS = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "–": "-", "^": "**"})

_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_BINARY: dict[type[ast.operator], Callable[[Fraction, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow,
}  # fmt: skip


def calculate(expression: str) -> str:
    """The value of ``expression``: a whole number, or a decimal with at most twelve significant
    digits.

    It takes + - * / // % ** (or ^), brackets, and numbers with optional commas between thousands:
    "1,200 * (3 + 4.5)". ValueError, with a message for the model, for anything else, a division by
    zero, or more than `MAX_DIGITS` digits.
    """
    if len(expression) > MAX_CHARS:
        raise ValueError(f"the expression has {len(expression)} characters, of at most {MAX_CHARS}")
    try:
        tree = ast.parse(_as_python(expression), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError('not arithmetic; write e.g. "12 * 7 + 5"') from error
    return _shown(_value(tree.body))


def _as_python(expression: str) -> str:
    text = expression.strip().removesuffix("=").translate(_SPELLINGS)
    plain = _THOUSANDS.sub("", text)
    if "," in plain:
        raise ValueError('a comma that does not separate thousands; write e.g. "1,200 + 5"')
    return plain


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=number) if type(number) in (int, float):
            if number in (math.inf, -math.inf):
                raise ValueError(f"a number of more than {MAX_DIGITS} digits")
            value = Fraction(str(number))  # the text is exact, the float is not
        case ast.UnaryOp(op=ast.UAdd() | ast.USub()):
            value = -_value(node.operand) if isinstance(node.op, ast.USub) else _value(node.operand)
        case ast.BinOp(op=operation) if type(operation) in _BINARY:
            left, right = _value(node.left), _value(node.right)
            if isinstance(operation, ast.Pow) and (right.denominator != 1 or abs(right) > MAX_EXPONENT):
                raise ValueError(f"an exponent is a whole number from -{MAX_EXPONENT} to {MAX_EXPONENT}")
            try:
                value = Fraction(_BINARY[type(operation)](left, right))
            except ZeroDivisionError as error:
                raise ValueError("division by zero") from error
        case _:
            raise ValueError("only numbers, + - * / // % ** and brackets")
    if max(abs(value.numerator), value.denominator) >= 10**MAX_DIGITS:
        raise ValueError(f"a number of more than {MAX_DIGITS} digits")
    return value


def _shown(value: Fraction) -> str:
    if value.denominator == 1:
        return str(value.numerator)
    with localcontext() as context:
        context.prec = 12
        quotient = Decimal(value.numerator) / Decimal(value.denominator)
        return f"{quotient.normalize():f}"

"""Word problems and puzzles of the package reasoning-gym, with a calculator, graded by each dataset's own rules."""

from __future__ import annotations

import difflib
import hashlib
import json
import random
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from libra.envs.calculator import calculate
from libra.envs.environment import Environment
from libra.envs.tool import Tool, tool
from libra.errors import ConfigError, EnvironmentFault
from libra.types import Episode, Prompt

EXTRA = "pip install 'libra-rl[reasoning-gym]'"
_SHARES = 8
_HELD_OUT, _SHOWN = 0, 1
"""Of 8 classes of questions, by a hash of the text: one is evaluation, one gives the worked examples, the others are training."""
_MAX_ATTEMPTS = 2000
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)

ENDINGS = {
    "number": "reply with the final number only.",
    "tags": "give the final answer between <answer> and </answer>.",
    "text": "reply with the final answer only.",
}
"""How the model is asked to answer, by what is read from the last turn."""
CALL = "Write one call of the calculator and read its result. Then "

_EXAMPLES = (
    ("Tom has 12 bags of 7 apples and 5 more apples. How many apples does he have?", "12 * 7 + 5"),
    ("Ann has 96 cards and gives a third of them to Bob. How many cards are left?", "96 - 96 / 3"),
    ("A bus has 40 seats, and 25 % of them are free. How many are taken?", "40 - 40 * 25 / 100"),
)
"""Worked examples for datasets whose questions come without an expression."""


class ReasoningGym(Environment):
    """The environment registered as ``reasoning_gym``; needs the package reasoning-gym.

    The reward is what the dataset's ``score_answer`` gives, 0 to 1, some of it in part. A question is evaluation where a hash of
    its text says so (1 in 8), whatever the seed, so no run trains on a question that another holds out. Facts: ``dataset``,
    ``seed`` (of the question: the dataset of size 1 made with it holds just this one), ``answer``.

    Parameters
    ----------
    dataset : str, list of str, or mapping
        Names such as "gsm_symbolic" or "chain_sum"; a mapping gives each its configuration, ``{"chain_sum": {"max_terms": 3}}``.
        Of several, each question draws one evenly.
    calculator : bool
        Whether the model has the calculator.
    answer : str
        What of the last turn is graded: the last "number", what is between <answer> "tags", or its whole "text". A turn that ends
        in a call has no answer.
    examples : int
        Worked examples shown before the question, as a conversation with calls. Small models need some.
    size : int, optional
        Different training questions; after that they come again. None: no two are meant to be the same.
    inline : bool
        Whether calls run inside the generation quantum.

    Raises
    ------
    ConfigError
        The package is not installed; no such dataset; a configuration it refuses.
    """

    def __init__(
        self,
        *,
        dataset: str | Sequence[str] | Mapping[str, Mapping[str, Any]] = "chain_sum",
        calculator: bool = True,
        answer: str = "number",
        examples: int = 0,
        size: int | None = None,
        inline: bool = False,
        seed: int = 0,
    ) -> None:
        where = "environment.args"
        if answer not in ENDINGS:
            raise ConfigError(f"{where}.answer: got {answer!r}; one of {', '.join(ENDINGS)}")
        if size is not None and size < 1:
            raise ConfigError(f"{where}.size: got {size!r}; at least 1 question, or null for no end of them")
        if examples < 0:
            raise ConfigError(f"{where}.examples: got {examples!r}; 0 or more")
        self.datasets = _datasets(dataset)
        self.seed, self.answer, self.examples, self.size = seed, answer, examples, size
        self.tools: tuple[Tool, ...] = (tool(self.calculator, timeout_s=5.0, inline=inline),) if calculator else ()
        ending = ENDINGS[answer]
        self.system = CALL + ending if calculator else ending.capitalize()

    def prompt(self, split: str, index: int) -> Prompt:
        if split not in ("train", "eval"):
            raise ConfigError(f"split {split!r}: reasoning_gym has the splits 'train' and 'eval'")
        if split == "train" and self.size is not None:
            index %= self.size
        name, seed, entry = self._drawn(split, index)
        messages = (
            {"role": "system", "content": self.system},
            *(message for number in range(self.examples) for message in self._example(name, number)),
            {"role": "user", "content": _question(entry)},
        )
        return Prompt(f"{split}-{index}", messages, {"dataset": name, "seed": seed, "answer": str(entry["answer"])})

    def prompt_id(self, split: str, index: int) -> str:
        return f"train-{index % self.size}" if split == "train" and self.size is not None else ""

    def grade(self, episode: Episode) -> float:
        name, seed = episode.prompt.facts["dataset"], episode.prompt.facts["seed"]
        dataset, entry = _entry(name, self.datasets[name], seed)
        if _question(entry) != episode.prompt.messages[-1]["content"]:
            raise EnvironmentFault(
                f"reasoning_gym: {name} gave another question for seed {seed} than before; it does not depend on its seed alone, "
                "or another version of reasoning-gym is installed here"
            )
        return float(dataset.score_answer(self.answered(episode), entry))

    def answered(self, episode: Episode) -> str | None:
        """What is graded, None where the trajectory gave no answer."""
        if not episode.turns or episode.turns[-1].calls:
            return None
        text = episode.answer
        if self.answer == "text":
            return text.strip() or None
        found = (_NUMBER if self.answer == "number" else _TAGGED).findall(text)
        if not found:
            return None
        return found[-1].replace(",", "") if self.answer == "number" else found[-1].strip()

    def calculator(self, expression: str) -> str:
        """Works out arithmetic.

        Args:
            expression: The arithmetic, e.g. "12 * 7 + 5".
        """
        return calculate(expression)

    def _drawn(self, split: str, index: int, name: str | None = None) -> tuple[str, int, dict[str, Any]]:
        """The dataset, seed and entry of a question that belongs to ``split``."""
        draw = random.Random(f"reasoning_gym/{self.seed}/{split}/{index}/{name}")
        name = name or draw.choice(sorted(self.datasets))
        for _ in range(_MAX_ATTEMPTS):
            seed = draw.getrandbits(32)
            entry = _entry(name, self.datasets[name], seed)[1]
            if _split_of(name, _question(entry)) == split:
                return name, seed, entry
        raise ConfigError(
            f"environment.args.dataset: {name} has too few different questions for the split {split!r}: none among "
            f"{_MAX_ATTEMPTS} drawn; give it a configuration with more of them"
        )

    def _example(self, name: str, number: int) -> list[dict[str, str]]:
        """A worked question: of the dataset where it says what is to be calculated, else one that was written for the purpose."""
        question, expression = _EXAMPLES[number % len(_EXAMPLES)]
        entry = self._drawn("example", number, name)[2]
        if isinstance(entry.get("metadata", {}).get("expression"), str):
            question, expression = _question(entry), entry["metadata"]["expression"]
            result = str(entry["answer"])
        elif number < len(_EXAMPLES):
            result = calculate(expression)
        else:
            return []
        last = f"<answer>{result}</answer>" if self.answer == "tags" else result
        messages = [{"role": "user", "content": question}]
        if self.tools:
            call = json.dumps({"name": self.tools[0].name, "arguments": {"expression": expression}})
            messages += [
                {"role": "assistant", "content": f"<tool_call>\n{call}\n</tool_call>"},
                {"role": "tool", "content": calculate(expression)},
            ]
        return [*messages, {"role": "assistant", "content": last}]


def _datasets(given: str | Sequence[str] | Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Configuration, as JSON, by dataset; each is made once to see that it can be."""
    where = "environment.args.dataset"
    named = (
        {given: {}} if isinstance(given, str) else dict(given) if isinstance(given, Mapping) else {n: {} for n in given}
    )
    if not named:
        raise ConfigError(f"{where}: got none; name at least one, e.g. gsm_symbolic")
    try:
        from reasoning_gym.factory import DATASETS, create_dataset
    except ImportError as error:
        raise ConfigError(f"{where}: the package reasoning-gym is not installed ({error}); type {EXTRA}") from error
    for name, config in named.items():
        if name not in DATASETS:
            nearest = difflib.get_close_matches(str(name), list(DATASETS), n=1)
            meant = f" (did you mean {nearest[0]!r}?)" if nearest else ""
            raise ConfigError(
                f"{where}: reasoning-gym has no dataset {name!r}{meant}; it has {', '.join(sorted(DATASETS))}"
            )
        taken = sorted({"seed", "size"} & set(config or {}))
        if taken:
            raise ConfigError(f"{where}.{name}: {taken[0]!r} is Libra's to set; environment.args.size counts questions")
        try:
            create_dataset(name, size=1, seed=0, **dict(config or {}))[0]
        except (TypeError, AssertionError, ValueError) as error:
            raise ConfigError(f"{where}.{name}: reasoning-gym refuses {dict(config or {})}: {error!r}") from error
    return {name: json.dumps(dict(config or {}), sort_keys=True) for name, config in named.items()}


@lru_cache(maxsize=8192)
def _entry(name: str, config: str, seed: int) -> tuple[Any, dict[str, Any]]:
    """The dataset of the one question that ``seed`` gives, and its entry."""
    from reasoning_gym.factory import create_dataset

    dataset = create_dataset(name, size=1, seed=seed, **json.loads(config))
    return dataset, dataset[0]


def _question(entry: Mapping[str, Any]) -> str:
    return str(entry["question"]).strip()


def _split_of(name: str, question: str) -> str:
    kind = hashlib.sha256(f"{name}/{question}".encode()).digest()[0] % _SHARES
    return "eval" if kind == _HELD_OUT else "example" if kind == _SHOWN else "train"

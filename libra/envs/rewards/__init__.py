"""Rewards by name, for prompts whose rows have a column ``answer``.

A reward is ``"gsm8k"``, or ``{"name": "gsm8k", "method": "flexible"}`` with options.
``docs/rewards.md`` lists all names.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from libra.envs.rewards import boxed, dapo_math, gsm8k, symbolic
from libra.envs.rewards.boxed import truth
from libra.errors import ConfigError, nearest
from libra.types import EndReason, Episode, Prompt
from libra.untrusted import repr_text

TAGS = ("think", "answer")


def tag_format(text: str, *, tags: Sequence[str] = TAGS, trailing: bool = False) -> float:
    """1.0 if ``text`` is ``<think>...</think> <answer>...</answer>`` and nothing else, else 0.0.

    Each tag opens and closes once, in order, with white space around it (DeepSeek-R1,
    arXiv:2501.12948, format reward). ``trailing`` allows text after the last tag, so that
    ``tags=["think"]`` requires one thought block before the answer.
    """
    marks = _marks(tags)
    position, between = 0, True
    for mark in marks:
        at = text.find(mark, position)
        if at < 0 or text.count(mark) != 1 or (between and text[position:at].strip()):
            return 0.0
        position, between = at + len(mark), not between
    return float(trailing or not text[position:].strip())


def tag_count(text: str, *, tags: Sequence[str] = TAGS) -> float:
    """Share of the tags that occur exactly once: partial credit for `tag_format`."""
    marks = _marks(tags)
    return sum(text.count(mark) == 1 for mark in marks) / len(marks)


def overlong(num_tokens: int, *, max_tokens: int, buffer_tokens: int, penalty: float = 1.0) -> float:
    """Penalty of a long response: DAPO, arXiv:2503.14476, eq. 13 (soft overlong punishment).

    0 up to ``max_tokens - buffer_tokens``, then linear to ``-penalty`` at ``max_tokens`` and above.
    Up to ``max_tokens`` it equals verl 0.9.1 (``overlong_buffer``: len, penalty_factor), whose
    penalty keeps growing above. ConfigError unless 1 <= ``buffer_tokens`` <= ``max_tokens``.
    """
    if not 1 <= buffer_tokens <= max_tokens:
        raise ConfigError(
            f"reward option buffer_tokens: got {buffer_tokens!r}; allowed are 1 to max_tokens={max_tokens}, over which the "
            "penalty rises"
        )
    excess = num_tokens - (max_tokens - buffer_tokens)
    return -penalty * min(max(excess, 0) / buffer_tokens, 1.0) or 0.0


def _marks(tags: Sequence[str]) -> list[str]:
    if isinstance(tags, str) or not tags or not all(isinstance(tag, str) and tag for tag in tags):
        raise ConfigError(f"reward option tags: got {tags!r}; give a list of names, e.g. tags=['think', 'answer']")
    return [mark for tag in tags for mark in (f"<{tag}>", f"</{tag}>")]


_READS: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    "completion": lambda given: given["completion"],
    "answer": lambda given: truth(given["answer"]),
    "episode": lambda given: given["episode"].num_tokens,
}

REWARDS: dict[str, tuple[Callable[..., float], tuple[str, ...]]] = {
    "gsm8k": (gsm8k.score, ("completion", "answer")),
    "math": (boxed.score, ("completion", "answer")),
    "dapo_math": (dapo_math.score, ("completion", "answer")),
    "math_verify": (symbolic.score, ("completion", "answer")),
    "tag_format": (tag_format, ("completion",)),
    "tag_count": (tag_count, ("completion",)),
    "overlong": (overlong, ("episode",)),
}
"""Function and the parameters that it reads, by name; its other parameters are the options."""


@dataclass(frozen=True)
class NamedReward:
    """A reward by name. Its signature has only the columns that it reads, never its options."""

    name: str
    options: Mapping[str, Any]

    def __call__(self, **given: Any) -> float:
        function, reads = REWARDS[self.name]
        return function(*(_READS[name](given) for name in reads), **self.options)

    def check_truths(self, answers: Sequence[Any]) -> None:
        """ConfigError if there are answers and the reward can read none of them."""
        if "answer" not in REWARDS[self.name][1] or not answers:
            return
        read, wanted = (gsm8k.wanted, "number") if self.name == "gsm8k" else (str, "text or number")
        if not any(read(truth(answer)) for answer in answers):
            raise ConfigError(
                f"reward {self.name}: the column 'answer' has no {wanted} in the first {len(answers)} rows, e.g. "
                f"{repr_text(answers[0])[:80]}; give it the right answers, e.g. 18, '#### 18' or '\\boxed{{18}}'"
            )

    @property
    def __signature__(self) -> inspect.Signature:
        reads = REWARDS[self.name][1]
        return inspect.Signature([inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in reads])


def make_reward(given: str | Mapping[str, Any]) -> NamedReward:
    """The reward of a name, or of a mapping with "name" and options. ConfigError for an unknown
    name, a wrong, missing or unknown option, and a missing package."""
    options = {"name": given} if isinstance(given, str) else dict(given)
    name = options.pop("name", None)
    if name not in REWARDS:
        raise ConfigError(f"reward: none is called {name!r}{nearest(name, REWARDS)}; type one of {', '.join(REWARDS)}")
    function, reads = REWARDS[name]
    known = dict(list(inspect.signature(function).parameters.items())[len(reads) :])
    for option in options:
        if option not in known:
            raise ConfigError(f"reward {name}: no option {option!r}{nearest(option, known)}; known: {', '.join(known)}")
    for option, parameter in known.items():
        if parameter.default is parameter.empty and option not in options:
            raise ConfigError(f"reward {name}: option {option!r} is missing; type {{name: {name}, {option}: ...}}")
    reward = NamedReward(name, options)
    # Grading an empty completion finds impossible options before a run starts.
    reward(completion="", answer="0", episode=Episode("", Prompt("", ()), (), EndReason.ANSWERED))
    return reward

"""Rewards for the format and the length of a completion, independent of its answer.

Reading is linear in the text: tags are searched for, never matched by a pattern that could backtrack.
"""

from __future__ import annotations

from collections.abc import Sequence

from libra.errors import ConfigError

TAGS = ("think", "answer")


def tag_format(text: str, *, tags: Sequence[str] = TAGS, trailing: bool = False) -> float:
    """1.0 if ``text`` is ``<think>...</think> <answer>...</answer>`` and nothing else, else 0.0.

    Each tag opens and closes once, in order; white space may stand before, between and after. DeepSeek-R1,
    arXiv:2501.12948 (format reward). ``trailing`` allows text after the last closing tag, so that ``tags=["think"]`` requires
    one thought block before the answer.
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
    """The share of opening and closing tags that occur exactly once: partial credit on the way to `tag_format`."""
    marks = _marks(tags)
    return sum(text.count(mark) == 1 for mark in marks) / len(marks)


def overlong(num_tokens: int, *, max_tokens: int, buffer_tokens: int, penalty: float = 1.0) -> float:
    """Penalty of a long response: DAPO, arXiv:2503.14476, eq. 13 (soft overlong punishment).

    0 up to ``max_tokens - buffer_tokens``, falling linearly to ``-penalty`` at ``max_tokens``, and ``-penalty`` above. Up
    to ``max_tokens`` it equals verl 0.9.1 (``overlong_buffer``: len, penalty_factor), whose penalty keeps growing above.

    Raises
    ------
    ConfigError
        Unless 1 <= ``buffer_tokens`` <= ``max_tokens``.
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

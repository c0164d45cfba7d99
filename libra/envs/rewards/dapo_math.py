r"""Answers after ``Answer:``, else in ``\boxed{}``, scored +1 or -1 (DAPO, arXiv:2503.14476).

Answers are normalised as by Minerva (Lewkowycz et al., arXiv:2206.14858, appendix). Scores equal
verl 0.9.1 (``math_dapo.compute_score``), with its surprises: words such as "ways" or "sue" vanish
anywhere in an answer, "34.0" is not 34, and a box counts only in the last 100 characters and is
compared letter by letter.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from libra.envs.rewards.boxed import closed_brace

TAIL_CHARS = 300
BOX_TAIL_CHARS = 100
NONE_GIVEN = "[INVALID]"

_GIVEN = re.compile(r"(?i:answer)\s*:\s*([^\n]+)")
_REPLACED = (
    ("an ", ""), ("a ", ""), (".$", "$"), ("\\$", ""), ("\\ ", ""), (" ", ""), ("mbox", "text"), (",\\text{and}", ","),
    ("\\text{and}", ","), ("\\text{m}", "\\text{}"),
)  # fmt: skip
# fmt: off
_REMOVED = (
    "square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", "\\ldots", "sue", "points", "feet",
    "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges", "students",
    "childrentickets", "multiples", "\\text{s}", "\\text{.}", "\\text{\ns}", "\\text{}^2", "\\text{}^3", "\\text{\n}",
    "\\text{}", "\\mathrm{th}", "^\\circ", "^{\\circ}", "\\;", ",\\!", "{,}", '"', "\\dots",
)
# fmt: on
_PATTERNS = (
    (re.compile(r"[^$\n]*\$([^$\n]*)\$.*"), r"$\1$"),
    (re.compile(r"\\text\{([^}\n]*)\}"), r"\1"),
    (re.compile(r"\\textbf\{([^}\n]*)\}"), r"\1"),
    (re.compile(r"\\overline\{([^}\n]*)\}"), r"\1"),
    (re.compile(r"\\boxed\{(.*)\}"), r"\1"),
    (re.compile(r"frac([^{])(.)"), r"frac{\1}{\2}"),
    (re.compile(r"sqrt([^{])"), r"sqrt{\1}"),
)


class MathVerdict(NamedTuple):
    """``score`` is 1.0 or -1.0; ``given`` is the answer found, None without the required box."""

    score: float
    correct: bool
    given: str | None


def normalised(answer: str) -> str:
    """One spelling for equal answers: no words, units, dollar signs or spaces; braced arguments."""
    answer = answer.rpartition("=")[2]
    for before, after in _REPLACED:
        answer = answer.replace(before, after)
    for word in _REMOVED:
        answer = answer.replace(word, "")
    for pattern, replacement in _PATTERNS:
        answer = pattern.sub(replacement, answer)
    answer = answer.replace("$", "")
    digits = answer.replace(",", "")
    return (digits if digits.isdigit() else answer).strip()


def verdict(text: str, answer: str, *, box_only: bool = False) -> MathVerdict:
    """Whether ``text`` ends with ``answer``; ``box_only`` (verl: ``strict_box_verify``) needs a
    box."""
    text = text[-TAIL_CHARS:]
    boxed = _box(text[-BOX_TAIL_CHARS:])
    answers = _GIVEN.findall(text)
    given = normalised(answers[-1] if answers else NONE_GIVEN)
    if box_only or (given == NONE_GIVEN and boxed is not None):
        correct, found = boxed == answer, boxed
    else:
        correct, found = given == normalised(answer), given
    return MathVerdict(1.0 if correct else -1.0, correct, found)


def score(text: str, answer: str, *, box_only: bool = False) -> float:
    """1.0 if ``text`` ends with ``answer``, else -1.0."""
    return verdict(text, answer, box_only=box_only).score


def _box(text: str) -> str | None:
    start = text.rfind("\\boxed{")
    end = closed_brace(text, start) if start >= 0 else -1
    return None if end < 0 else text[start + len("\\boxed{") : end]

"""Answers of grade-school problems: the number after ``#### ``, or the last number of the text.

Solutions of Cobbe et al., arXiv:2110.14168, end in ``#### 42``. Answers are compared as numbers:
"1,234" is 1234, "3.50" is 3.5, and a full stop after a number ends the sentence.

``like="verl"`` reproduces verl 0.9.1: it reads only the last 300 characters and compares text.
Strict extraction then keeps a full stop ("1000000."), and flexible extraction keeps commas too, so
that 1,234 is never equal to 1234.
"""

from __future__ import annotations

import re
from typing import Literal

from libra.errors import one_of

Method = Literal["strict", "flexible"]
_VERL_TAIL_CHARS = 300
_NUMERALS = re.compile(r"-?[0-9.,]+")
_MARKED = re.compile(r"#### (-?[0-9.,]+)")


def extract(text: str, method: Method = "strict", *, like: Literal["verl"] | None = None) -> str | None:
    """The last number after ``#### `` (strict), or the last number of ``text`` (flexible)."""
    one_of("reward option method", method, ("strict", "flexible"))
    one_of("reward option like", like, (None, "verl"))
    pattern = _MARKED if method == "strict" else _NUMERALS
    if like is None:
        found = (canonical(numeral) for numeral in reversed(pattern.findall(text)))
        return next((number for number in found if number is not None), None)
    numerals: list[str] = pattern.findall(text[-_VERL_TAIL_CHARS:])
    if method == "strict":
        return numerals[-1].replace(",", "") if numerals else None
    usable = [numeral for numeral in numerals if numeral != "."]
    return usable[-1] if usable else numerals[0] if numerals else None


def canonical(numeral: str) -> str | None:
    """One spelling per number: no commas, final stop or redundant zeros; None without a number."""
    whole, _, fraction = numeral.removeprefix("-").replace(",", "").rstrip(".").partition(".")
    digits = whole + fraction
    if not (digits.isascii() and digits.isdigit()):
        return None
    whole, fraction = whole.lstrip("0") or "0", fraction.rstrip("0")
    value = f"{whole}.{fraction}" if fraction else whole
    return "-" + value if numeral.startswith("-") and value != "0" else value


def wanted(answer: str) -> str | None:
    """The one number in a right answer, e.g. "... #### 1,000", "$18" or "9 (apples)", or None."""
    answer = answer.rpartition("####")[2]
    found = [number for numeral in _NUMERALS.findall(answer) if (number := canonical(numeral)) is not None]
    return canonical(answer.strip()) or (found[0] if len(found) == 1 else None)


def score(
    text: str, answer: str, method: Method = "strict", *, format_score: float = 0.0, full_score: float = 1.0,
    like: Literal["verl"] | None = None,
) -> float:  # fmt: skip
    """``full_score`` for the right answer, ``format_score`` for another answer, 0 without an
    answer. ValueError if ``answer`` does not have exactly one number."""
    right = answer if like == "verl" else wanted(answer)
    if right is None:
        raise ValueError(f"the right answer {answer[:80]!r} does not have one number; give e.g. 18 or '#### 18'")
    found = extract(text, method, like=like)
    if found is None:
        return 0.0
    return full_score if found == right else format_score

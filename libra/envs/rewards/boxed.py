r"""Answers of competition problems: the last ``\boxed{}``, compared as normalised LaTeX.

Source: the MATH dataset (Hendrycks et al., arXiv:2103.03874), with the scores of verl 0.9.1
(``math_reward.compute_score``). Texts are compared: ``\frac12``, ``1/2`` and ``0.5`` are equal, but
``1,000`` is not ``1000`` and ``\fbox{7}`` is not an answer. To compare values use
`libra.envs.rewards.symbolic`.
"""

from __future__ import annotations

import re

_BOX, _BOX_SPACE, _FRAME = "\\boxed", "\\boxed ", "\\fbox"
_BEFORE_UNITS = (
    ("\n", ""), ("\\!", ""), ("\\\\", "\\"), ("tfrac", "frac"), ("dfrac", "frac"), ("\\left", ""), ("\\right", ""),
    ("^{\\circ}", ""), ("^\\circ", ""), ("\\$", ""),
)  # fmt: skip
_AFTER_UNITS = (("\\\\%", ""), ("\\%", ""), (" .", " 0."), ("{.", "{0."))
_UNITS = "\\text{ "
_INTEGER_RATIO = re.compile(r"(0|-?[1-9][0-9]{0,999})/(0|-?[1-9][0-9]{0,999})")


def closed_brace(text: str, start: int) -> int:
    """Position of the ``}`` that closes the first brace from ``start`` on, or -1."""
    depth = 0
    for match in re.finditer(r"[{}]", text[start:]):
        depth += 1 if match.group() == "{" else -1
        if depth == 0 and match.group() == "}":
            return start + match.start()
    return -1


def extract(text: str) -> str | None:
    r"""The last box's content, or None. ``\boxed 5``, which ends at a dollar sign, has
    precedence."""
    _, spaced, held = text.rpartition(_BOX_SPACE)
    if spaced:
        return held.partition("$")[0]
    start = text.rfind(_BOX)
    if start < 0 or not text.startswith(_BOX + "{", start):
        return None
    end = closed_brace(text, start)
    return None if end < 0 else text[start + len(_BOX) + 1 : end]


def normalised(latex: str) -> str:
    r"""One spelling for simple equal answers. ValueError for two ``\text{ ``, or ``\sqrt`` or
    ``\frac`` without an argument."""
    for before, after in _BEFORE_UNITS:
        latex = latex.replace(before, after)
    if latex.count(_UNITS) > 1:
        raise ValueError("two units")
    latex = latex.partition(_UNITS)[0]
    for before, after in _AFTER_UNITS:
        latex = latex.replace(before, after)
    if not latex:
        return latex
    if latex[0] == ".":
        latex = "0" + latex
    name, equals, value = latex.partition("=")
    if equals and "=" not in value and len(name) <= 2:
        latex = value
    latex = _with_fraction_braces(_with_root_braces(latex).replace(" ", ""))
    if latex == "0.5":
        latex = "\\frac{1}{2}"
    ratio = _INTEGER_RATIO.fullmatch(latex)
    return f"\\frac{{{ratio[1]}}}{{{ratio[2]}}}" if ratio else latex


def equal(one: str, other: str) -> bool:
    """Whether two answers are equal; they are normalised if both can be."""
    try:
        return normalised(one) == normalised(other)
    except ValueError:
        return one == other


def score(text: str, answer: str) -> float:
    """1.0 if the last box of ``text`` holds ``answer``, else 0.0."""
    found = extract(text)
    return float(found is not None and equal(found, answer))


def _with_root_braces(latex: str) -> str:
    head, *tails = latex.split("\\sqrt")
    if "" in tails:
        raise ValueError("nothing after \\sqrt")
    return head + "".join("\\sqrt" + (tail if tail[0] == "{" else f"{{{tail[0]}}}{tail[1:]}") for tail in tails)


def _with_fraction_braces(latex: str) -> str:
    head, *tails = latex.split("\\frac")
    parts = [head]
    for tail in tails:
        if not tail:
            raise ValueError("nothing after \\frac")
        if tail[0] != "{":
            if len(tail) < 2:
                return latex
            below = tail[1:] if tail[1] == "{" else f"{{{tail[1]}}}{tail[2:]}"
            tail = f"{{{tail[0]}}}{below}"
        parts.append(tail)
    return "\\frac".join(parts)


_MARKED = re.compile(r"####\s*([^\n]+)")
_TAGGED = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
_TOLD = re.compile(r"\banswer\b(?: is)?\s*:\s*([^\n]+)", re.IGNORECASE)
_IN_MATH = re.compile(r"\$+([^$]+)\$+|\\\((.+)\\\)|\\\[(.+)\\\]", re.DOTALL)


def truth(published: object) -> str:
    """The answer in a value of a column, or "". Commas after ``####`` are dropped, as verl does."""
    if isinstance(published, list | tuple) and len(published) == 1:
        published = published[0]
    if isinstance(published, float) and published.is_integer():  # an integer, in a column that lacks others
        published = int(published)
    if published is None or published != published or not isinstance(published, str | int | float):
        return ""
    text = str(published).strip()
    if marked := _MARKED.findall(text):
        text = str(marked[-1]).replace(",", "")
    elif box := extract(text):
        text = box
    elif found := _TAGGED.findall(text) or _TOLD.findall(text):
        text = str(found[-1])
    in_math = _IN_MATH.fullmatch(text.strip())
    return (in_math[in_math.lastindex or 0] if in_math else text).strip()

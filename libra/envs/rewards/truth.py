r"""Right answers as data sets publish them: alone, or after a solution, as ``#### 18``, ``\boxed{18}`` or ``The answer is: 18``."""

from __future__ import annotations

import re

from libra.envs.rewards import boxed

_MARKED = re.compile(r"####\s*([^\n]+)")
_TAGGED = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
_TOLD = re.compile(r"\banswer\b(?: is)?\s*:\s*([^\n]+)", re.IGNORECASE)
_IN_MATH = re.compile(r"\$+([^$]+)\$+|\\\((.+)\\\)|\\\[(.+)\\\]", re.DOTALL)


def truth(published: object) -> str:
    """The answer in the value of a column, "" without one. Commas after ``####`` are left out, as verl's preparation does."""
    if isinstance(published, list | tuple) and len(published) == 1:
        published = published[0]
    if isinstance(published, float) and published.is_integer():  # an integer, in a column that lacks others
        published = int(published)
    if published is None or published != published or not isinstance(published, str | int | float):
        return ""
    text = str(published).strip()
    if marked := _MARKED.findall(text):
        text = str(marked[-1]).replace(",", "")
    elif box := boxed.extract(text):
        text = box
    elif found := _TAGGED.findall(text) or _TOLD.findall(text):
        text = str(found[-1])
    in_math = _IN_MATH.fullmatch(text.strip())
    return (in_math[in_math.lastindex or 0] if in_math else text).strip()

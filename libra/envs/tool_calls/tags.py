"""Searching generated text for tags, in linear time over all searches."""

from __future__ import annotations

from bisect import bisect_left

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class Places:
    """Positions of a mark in a text: found once, then looked up.

    ``str.find`` from every opening tag on is quadratic where the mark is far away or nowhere.
    """

    def __init__(self, text: str, mark: str) -> None:
        self._at: list[int] = []
        position = text.find(mark)
        while position >= 0:
            self._at.append(position)
            position = text.find(mark, position + len(mark))

    def after(self, start: int) -> int:
        """The first place at or after ``start``, or -1."""
        index = bisect_left(self._at, start)
        return self._at[index] if index < len(self._at) else -1


def skip_space(text: str, position: int) -> int:
    """The first position at or after ``position`` that is not white space."""
    while position < len(text) and text[position].isspace():
        position += 1
    return position

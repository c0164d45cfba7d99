"""``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``: the format of Hermes and of Qwen's chat models."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from libra.envs.tool_calls.tags import CLOSE, OPEN, Places, skip_space
from libra.types import ToolCall

_DECODER = json.JSONDecoder()
_WINDOW_CHARS = 512
_LONGEST_WORD_CHARS = 16  # "-Infinity" or "\\ud83d\\ude00", cut by the end of a window, are reported where they begin


def parse_hermes(text: str) -> tuple[ToolCall, ...]:
    """The calls in ``text``, in order.

    The JSON is decoded, not searched for its end, so an argument may contain ``</tool_call>``. A malformed call is returned with
    ``error`` set, and reading continues after its closing tag.
    """
    calls: list[ToolCall] = []
    closing = Places(text, CLOSE)
    position = text.find(OPEN)
    while position >= 0:
        call, end = _one_call(text, position + len(OPEN), closing)
        calls.append(call)
        position = text.find(OPEN, end)
    return tuple(calls)


def _one_call(text: str, start: int, closing: Places) -> tuple[ToolCall, int]:
    """The call whose JSON begins at or after ``start``, and the position behind it."""
    close = closing.after(start)
    resume = close + len(CLOSE) if close >= 0 else start
    try:
        value, end = _decode(text, skip_space(text, start))
    except (ValueError, RecursionError):
        return ToolCall("", {}, "not valid JSON"), resume
    end = skip_space(text, end)
    if not text.startswith(CLOSE, end):
        return ToolCall("", {}, "its tag is not closed after the JSON"), max(resume, end)
    return _check(value), end + len(CLOSE)


def _decode(text: str, start: int) -> tuple[Any, int]:
    """The JSON value that begins at ``start``, and where it ends.

    Decoded from windows that grow only while the value may continue: an error of `json` counts the lines before it, which would be
    quadratic over many bad calls. All calls of a text together are linear too: reading passes a tag only inside a string, and a
    call that begins at this tag is outside one, so it ends at the next tag at the latest.
    """
    size = _WINDOW_CHARS
    while True:
        window = text[start : start + size]
        whole = start + size >= len(text)
        try:
            value, end = _DECODER.raw_decode(window)
            if whole or end < len(window):
                return value, start + end
        except json.JSONDecodeError as problem:
            may_go_on = problem.msg.startswith("Unterminated string") or problem.pos > len(window) - _LONGEST_WORD_CHARS
            if whole or not may_go_on:
                raise
        size *= 4


def _check(value: object) -> ToolCall:
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
        return ToolCall("", {}, 'no "name"')
    if not isinstance(value.get("arguments"), Mapping):
        return ToolCall("", {}, 'no "arguments"')
    return ToolCall(value["name"], value["arguments"])

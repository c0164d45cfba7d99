"""Readers of tool calls in generated text.

Invariants of every format
--------------------------
1. Reading any text raises nothing and takes time linear in its length.
2. Each opening tag gives at most one malformed call, with ``error`` set; the model reads the error
   and may try again. No call is dropped silently.
3. A well-formed call keeps its text, also with closing tags in its arguments.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from libra.envs.tool import Tool
from libra.types import ToolCall

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class Places:
    """Positions of a mark in a text, found once: ``str.find`` from every opening tag would be
    quadratic."""

    def __init__(self, text: str, mark: str) -> None:
        self._at: list[int] = []
        position = text.find(mark)
        while position >= 0:
            self._at.append(position)
            position = text.find(mark, position + len(mark))

    def after(self, start: int) -> int:
        """The first position at or after ``start``, or -1."""
        index = bisect_left(self._at, start)
        return self._at[index] if index < len(self._at) else -1


def skip_space(text: str, position: int) -> int:
    """The first position at or after ``position`` without white space."""
    while position < len(text) and text[position].isspace():
        position += 1
    return position


_DECODER = json.JSONDecoder()
_WINDOW_CHARS = 512
_LONGEST_WORD_CHARS = 16  # `json` reports "-Infinity" or "\\ud83d\\ude00" at its start, if the window's end cuts it


def parse_hermes(text: str) -> tuple[ToolCall, ...]:
    """The calls in ``text``, in order.

    Decoding finds the end of the JSON, so an argument may contain ``</tool_call>``. After a
    malformed call reading continues behind its closing tag.
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
    """The call whose JSON starts at or after ``start``, and the position behind it."""
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
    """The JSON value at ``start``, and its end.

    Windows grow only while the value may continue: an error of `json` counts the lines before it,
    which would be quadratic over many bad calls. All calls of a text are linear, too: reading
    passes a tag only inside a string, and a call from this tag on is outside of it, so that call
    ends at the next tag.
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


MAX_NAME_CHARS = 256
_FUNCTION, _END_FUNCTION = "<function=", "</function>"
_PARAMETER, _END_PARAMETER = "<parameter=", "</parameter>"


def parse_qwen3_coder(text: str, tools: Sequence[Tool] = ()) -> tuple[ToolCall, ...]:
    """The calls in ``text``, in order; one tag may hold several functions. Schemas of ``tools``
    give the types of values."""
    reader = _Reader(text, {tool.name: tool.parameters for tool in tools})
    calls: list[ToolCall] = []
    position = text.find(OPEN)
    while position >= 0:
        found, end = reader.read(position + len(OPEN))
        calls += found
        position = text.find(OPEN, end)
    return tuple(calls)


def _coder_usage(tool: Tool) -> str:
    """The shape of a valid call, e.g.
    ``<function=run><parameter=code>...</parameter></function>``."""
    parameters = "".join(f"{_PARAMETER}{name}>...{_END_PARAMETER}" for name in tool.parameters)
    return f"{_FUNCTION}{tool.name}>{parameters}{_END_FUNCTION}"


class _Malformed(Exception):
    """A malformed call, and the position up to which it was read."""

    def __init__(self, reason: str, position: int) -> None:
        super().__init__(reason)
        self.position = position


class _Reader:
    def __init__(self, text: str, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        self.text, self.schemas = text, schemas
        self.closing = Places(text, CLOSE)
        self.value_ends: list[int] = []
        if OPEN in text:
            position = text.find(_END_PARAMETER)
            while position >= 0:
                after = skip_space(text, position + len(_END_PARAMETER))
                if text.startswith((_PARAMETER, _END_FUNCTION), after):
                    self.value_ends.append(position)
                position = text.find(_END_PARAMETER, after)

    def read(self, start: int) -> tuple[list[ToolCall], int]:
        """The calls of the tag before ``start``, and the next position."""
        calls: list[ToolCall] = []
        position = skip_space(self.text, start)
        try:
            while not (calls and self.text.startswith(CLOSE, position)):
                call, position = self._function(position)
                calls.append(call)
        except _Malformed as problem:
            # After the last read position: all calls together take linear time.
            close = self.closing.after(problem.position)
            resume = close + len(CLOSE) if close >= 0 else problem.position
            return [ToolCall("", {}, str(problem))], resume
        return calls, position + len(CLOSE)

    def _function(self, position: int) -> tuple[ToolCall, int]:
        if not self.text.startswith(_FUNCTION, position):
            reason = "its tag is not closed" if position >= len(self.text) else "no <function=NAME>"
            raise _Malformed(reason, position)
        name, position = self._name(position + len(_FUNCTION), "function")
        schema, arguments = self.schemas.get(name, {}), {}
        position = skip_space(self.text, position)
        while self.text.startswith(_PARAMETER, position):
            parameter, start = self._name(position + len(_PARAMETER), "parameter")
            index = bisect_left(self.value_ends, start)
            if index == len(self.value_ends):
                raise _Malformed(f"parameter {parameter} is not closed", start)
            end = self.value_ends[index]
            if parameter in arguments:
                raise _Malformed(f"parameter {parameter} is given twice", end)
            # One line break on either side belongs to the format, not to the value.
            value = self.text[start:end].removeprefix("\n").removesuffix("\n")
            arguments[parameter] = _converted(value, schema.get(parameter, {}))
            position = skip_space(self.text, end + len(_END_PARAMETER))
        if not self.text.startswith(_END_FUNCTION, position):
            raise _Malformed(f"function {name} is not closed", position)
        return ToolCall(name, arguments), skip_space(self.text, position + len(_END_FUNCTION))

    def _name(self, start: int, what: str) -> tuple[str, int]:
        end = self.text.find(">", start, start + MAX_NAME_CHARS)
        name = self.text[start:end].strip() if end >= 0 else ""
        if not name or "<" in name or "\n" in name:
            raise _Malformed(f"a {what} without a name", start)
        return name, end + 1


def _converted(value: str, schema: Mapping[str, Any]) -> Any:
    """``value`` in the type of its schema, or unchanged."""
    kinds = schema.get("type", "string")
    kinds = {kinds} if isinstance(kinds, str) else set(kinds)
    if schema.get("nullable"):
        kinds.add("null")
    if "string" in kinds and not ("null" in kinds and value.strip() == "null"):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        # Models trained on Python write its constants.
        return {"True": True, "False": False, "None": None}.get(value.strip(), value)


class ToolFormat(NamedTuple):
    """The parser of a format, and the shape of a valid call for the model."""

    parse: Callable[[str, Sequence[Tool]], tuple[ToolCall, ...]]
    usage: Callable[[Tool], str]


TOOL_FORMATS: dict[str, ToolFormat] = {
    "hermes": ToolFormat(lambda text, tools: parse_hermes(text), lambda tool: tool.usage),
    "qwen3_coder": ToolFormat(parse_qwen3_coder, _coder_usage),
}
"""By the value of ``rollout.tool_format``."""

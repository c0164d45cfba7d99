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
import re
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from libra.envs.tool import Tool
from libra.types import ToolCall

OPEN, CLOSE = "<tool_call>", "</tool_call>"
MAX_NAME_CHARS = 256
_FUNCTION, _END_FUNCTION = "<function=", "</function>"
_PARAMETER, _END_PARAMETER = "<parameter=", "</parameter>"
_VALUE_END = re.compile(rf"{_END_PARAMETER}(?=\s*(?:{_PARAMETER}|{_END_FUNCTION}))")
_SPACE = re.compile(r"\s*")


class _Malformed(Exception):
    def __init__(self, reason: str, position: int) -> None:
        super().__init__(reason)
        self.position = position


def _read(text: str, calls_at: Callable[[int], tuple[Sequence[ToolCall], int]]) -> tuple[ToolCall, ...]:
    """The calls of all opening tags; ``calls_at`` reads a tag's calls and the position after
    them."""
    closing = [match.start() for match in re.finditer(CLOSE, text)]  # str.find from every tag would be quadratic
    calls: list[ToolCall] = []
    position = text.find(OPEN)
    while position >= 0:
        try:
            found, end = calls_at(_skip_space(text, position + len(OPEN)))
        except _Malformed as problem:
            found, end = (ToolCall("", {}, str(problem)),), problem.position
            index = bisect_left(closing, end)
            end = closing[index] + len(CLOSE) if index < len(closing) else end
        calls += found
        position = text.find(OPEN, end)
    return tuple(calls)


def _skip_space(text: str, position: int) -> int:
    match = _SPACE.match(text, position)
    return match.end() if match else position


def parse_hermes(text: str, tools: Sequence[Tool] = ()) -> tuple[ToolCall, ...]:
    """The calls in ``text``, in order. An argument may contain ``</tool_call>``, because decoding
    finds the end of the JSON. Reading resumes after the closing tag of a malformed call."""

    def call_at(start: int) -> tuple[Sequence[ToolCall], int]:
        try:
            value, end = _decode(text, start)
        except (ValueError, RecursionError) as error:
            raise _Malformed("not valid JSON", start) from error
        end = _skip_space(text, end)
        if not text.startswith(CLOSE, end):
            raise _Malformed("its tag is not closed after the JSON", end)
        end += len(CLOSE)
        if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
            return [ToolCall("", {}, 'no "name"')], end
        if not isinstance(value.get("arguments"), Mapping):
            return [ToolCall("", {}, 'no "arguments"')], end
        return [ToolCall(value["name"], value["arguments"])], end

    return _read(text, call_at)


_DECODER = json.JSONDecoder()
_WINDOW_CHARS = 512
_LONGEST_WORD_CHARS = 16  # `json` reports "-Infinity" or "\\ud83d\\ude00" at its start, if the window's end cuts it


def _decode(text: str, start: int) -> tuple[Any, int]:
    """The JSON value at ``start``, and its end.

    Windows grow only while the value may continue, because `json` counts the lines before an error,
    which would be quadratic over many malformed calls. All calls together are linear as well:
    reading passes a tag only inside a string, so a call that starts at that tag ends at the next
    tag.
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


def parse_qwen3_coder(text: str, tools: Sequence[Tool] = ()) -> tuple[ToolCall, ...]:
    """The calls in ``text``, in order, typed by the schemas of ``tools``; a tag may have
    several."""
    schemas = {tool.name: tool.parameters for tool in tools}
    value_ends = [match.start() for match in _VALUE_END.finditer(text)] if OPEN in text else []

    def name_at(start: int, what: str) -> tuple[str, int]:
        end = text.find(">", start, start + MAX_NAME_CHARS)
        name = text[start:end].strip() if end >= 0 else ""
        if not name or "<" in name or "\n" in name:
            raise _Malformed(f"a {what} without a name", start)
        return name, end + 1

    def function_at(position: int) -> tuple[ToolCall, int]:
        if not text.startswith(_FUNCTION, position):
            reason = "its tag is not closed" if position >= len(text) else "no <function=NAME>"
            raise _Malformed(reason, position)
        name, position = name_at(position + len(_FUNCTION), "function")
        schema, arguments = schemas.get(name, {}), dict[str, Any]()
        position = _skip_space(text, position)
        while text.startswith(_PARAMETER, position):
            parameter, start = name_at(position + len(_PARAMETER), "parameter")
            index = bisect_left(value_ends, start)
            if index == len(value_ends):
                raise _Malformed(f"parameter {parameter} is not closed", start)
            end = value_ends[index]
            if parameter in arguments:
                raise _Malformed(f"parameter {parameter} is given twice", end)
            # One line break on either side belongs to the format, not to the value.
            value = text[start:end].removeprefix("\n").removesuffix("\n")
            arguments[parameter] = _converted(value, schema.get(parameter, {}))
            position = _skip_space(text, end + len(_END_PARAMETER))
        if not text.startswith(_END_FUNCTION, position):
            raise _Malformed(f"function {name} is not closed", position)
        return ToolCall(name, arguments), _skip_space(text, position + len(_END_FUNCTION))

    def calls_at(position: int) -> tuple[Sequence[ToolCall], int]:
        calls: list[ToolCall] = []
        while not (calls and text.startswith(CLOSE, position)):
            call, position = function_at(position)
            calls.append(call)
        return calls, position + len(CLOSE)

    return _read(text, calls_at)


def _converted(value: str, schema: Mapping[str, Any]) -> Any:
    kinds = schema.get("type", "string")
    kinds = {kinds} if isinstance(kinds, str) else set(kinds)
    null = "null" in kinds or bool(schema.get("nullable"))
    if "string" in kinds and not (null and value.strip() == "null"):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        # Models trained on Python write its constants.
        return {"True": True, "False": False, "None": None}.get(value.strip(), value)


def _hermes_usage(tool: Tool) -> str:
    arguments = ", ".join(f'"{name}": ...' for name in tool.parameters)
    return f'{{"name": "{tool.name}", "arguments": {{{arguments}}}}}'


def _coder_usage(tool: Tool) -> str:
    parameters = "".join(f"{_PARAMETER}{name}>...{_END_PARAMETER}" for name in tool.parameters)
    return f"{_FUNCTION}{tool.name}>{parameters}{_END_FUNCTION}"


class ToolFormat(NamedTuple):
    """A format's parser, and an example of a valid call for the model."""

    parse: Callable[[str, Sequence[Tool]], tuple[ToolCall, ...]]
    usage: Callable[[Tool], str]


TOOL_FORMATS: dict[str, ToolFormat] = {
    "hermes": ToolFormat(parse_hermes, _hermes_usage),
    "qwen3_coder": ToolFormat(parse_qwen3_coder, _coder_usage),
}
"""Formats by their names in ``rollout.tool_format``."""

"""``<tool_call><function=NAME><parameter=NAME>VALUE</parameter>...</function></tool_call>``: Qwen3-Coder and Qwen3.5.

Values are not escaped, so where one ends is a rule: at the first ``</parameter>`` that is followed, white space aside, by
another ``<parameter=`` or by ``</function>``. A value may therefore hold ``</parameter>``, ``</function>`` or ``</tool_call>``
in any other place, and a last parameter without end includes the text up to the next end.

A value is a string unless the tool's schema has another type. Then it is read as JSON, and stays a string where it is not JSON, so
that the model reads which type was expected.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any

from libra.envs.tool import Tool
from libra.envs.tool_calls.tags import CLOSE, OPEN, Places, skip_space
from libra.types import ToolCall

MAX_NAME_CHARS = 256
_FUNCTION, _END_FUNCTION = "<function=", "</function>"
_PARAMETER, _END_PARAMETER = "<parameter=", "</parameter>"


def parse_qwen3_coder(text: str, tools: Sequence[Tool] = ()) -> tuple[ToolCall, ...]:
    """The calls in ``text``, in order; one tag may hold several functions.

    Parameters
    ----------
    tools : sequence of Tool
        Their schemas say which values are not strings.
    """
    reader = _Reader(text, {tool.name: tool.parameters for tool in tools})
    calls: list[ToolCall] = []
    position = text.find(OPEN)
    while position >= 0:
        found, end = reader.read(position + len(OPEN))
        calls += found
        position = text.find(OPEN, end)
    return tuple(calls)


def usage(tool: Tool) -> str:
    """The shape of a right call on one line, e.g. ``<function=run><parameter=code>...</parameter></function>``."""
    parameters = "".join(f"{_PARAMETER}{name}>...{_END_PARAMETER}" for name in tool.parameters)
    return f"{_FUNCTION}{tool.name}>{parameters}{_END_FUNCTION}"


class _Malformed(Exception):
    """A malformed call, and the position up to which it was read; internal."""

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
        """The calls of the tag that opens before ``start``, and where to read on."""
        calls: list[ToolCall] = []
        position = skip_space(self.text, start)
        try:
            while not (calls and self.text.startswith(CLOSE, position)):
                call, position = self._function(position)
                calls.append(call)
        except _Malformed as problem:
            # Not from the start of the call: nothing is read twice, so all calls together take linear time.
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

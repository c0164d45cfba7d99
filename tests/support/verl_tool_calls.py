"""The parsers of verl 0.9.1, for runs moved from verl and for comparisons.

They differ from Libra's on adversarial and on broken text. Hermes: a call ends at the first ``</tool_call>``, so one with that
text inside a string argument is lost. Both: a malformed call is dropped, and the model gets no error.
Qwen3-Coder: a parameter ends at the first ``</parameter>``, an unclosed one at the end of its function, and "null" is None
whatever the type.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from libra.envs.tool import Tool
from libra.envs.tool_call_formats import CLOSE, OPEN


class VerlCall(NamedTuple):
    """``arguments`` is JSON text."""

    name: str
    arguments: str


class VerlReading(NamedTuple):
    """``content`` is the text without its calls (Hermes), or up to the first of them (Qwen3-Coder)."""

    content: str
    calls: tuple[VerlCall, ...]


def verl_hermes(text: str) -> VerlReading:
    """``HermesToolParser.extract_tool_calls`` of the decoded text."""
    content, calls = [], []
    position = 0
    while (start := text.find(OPEN, position)) >= 0 and (end := text.find(CLOSE, start)) >= 0:
        content.append(text[position:start])
        position = end + len(CLOSE)
        try:
            value = json.loads(text[start + len(OPEN) : end])
            calls.append(_call(value["name"], value["arguments"]))
        except (ValueError, TypeError, KeyError, RecursionError):
            continue
    return VerlReading("".join(content) + text[position:], tuple(calls))


def verl_qwen3_coder(text: str, tools: Sequence[Tool] = ()) -> VerlReading:
    """``Qwen3XMLToolParser.extract_tool_calls`` of the decoded text."""
    schemas = {tool.name: tool.parameters for tool in tools}
    functions = [
        function
        for held in _between(text, OPEN, CLOSE, last_line_break=False)
        for function in _between(held, "<function=", "</function>", last_line_break=True)
    ]
    if not functions:
        return VerlReading(text, ())
    calls = []
    for function in functions:
        name, found, body = function.partition(">")
        if not found:
            continue
        arguments: dict[str, Any] = {}
        for parameter in _between(body, "<parameter=", "</parameter>", last_line_break=False):
            key, found, value = parameter.partition(">")
            if found:
                arguments[key] = _converted(value.removeprefix("\n").removesuffix("\n"), key, schemas.get(name, {}))
        try:
            calls.append(_call(name, arguments))
        except (ValueError, TypeError, RecursionError):
            return VerlReading(text, ())
    return VerlReading(text[: text.find(OPEN)], tuple(calls))


def _call(name: object, arguments: object) -> VerlCall:
    """TypeError if the name is not text, or JSON cannot express the arguments."""
    if not isinstance(name, str):
        raise TypeError("the name is not text")
    return VerlCall(name, json.dumps(arguments, ensure_ascii=False))


def _between(text: str, opening: str, closing: str, *, last_line_break: bool) -> Iterator[str]:
    """What stands between the marks; after the last opening one without a closing one, all the rest.

    ``last_line_break`` says whether that rest keeps a line break at its very end.
    """
    position = text.find(opening)
    while position >= 0:
        start = position + len(opening)
        end = text.find(closing, start)
        if end < 0:
            yield text[start:] if last_line_break else text[start:].removesuffix("\n")
            return
        yield text[start:end]
        position = text.find(opening, end + len(closing))


def _converted(value: str, name: str, schema: Mapping[str, Any]) -> Any:
    if value.lower() == "null":
        return None
    kind = str(schema.get(name, {}).get("type", "string")).strip().lower()
    if name not in schema or kind in ("string", "str", "text", "varchar", "char", "enum"):
        return value
    if kind in ("boolean", "bool", "binary"):
        return value.lower() == "true"
    try:
        if kind.startswith(("int", "uint", "long", "short", "unsigned")):
            return int(value)
        if kind.startswith(("num", "float")):
            number = float(value)
            return int(number) if number == int(number) else number
    except (ValueError, OverflowError):
        return value
    if kind == "object" or kind.startswith("dict"):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            pass  # it may still be a Python literal
    try:
        return ast.literal_eval(value)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return value

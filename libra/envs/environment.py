"""The seam between Libra and a task: prompts, tools, how calls are read, how a finished trajectory is graded."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from libra.envs.tool import Tool
from libra.types import Episode, Prompt, ToolCall

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_DECODER = json.JSONDecoder()


class Environment(ABC):
    """A task family. Instances are stateless between calls: every worker makes its own from (name, args, seed).

    Subclasses give `prompt` and `grade`, and ``tools`` where there are any.
    """

    tools: tuple[Tool, ...] = ()

    @abstractmethod
    def prompt(self, split: str, index: int) -> Prompt:
        """Question ``index`` (>= 0, no upper end) of ``split``, "train" or "eval".

        Deterministic in (seed, split, index); no question is in both splits.
        """

    @abstractmethod
    def grade(self, episode: Episode) -> float:
        """Reward of a finished trajectory: one finite number. May be ``async def``; blocking is fine, it has a
        thread.
        """

    def parse(self, text: str) -> tuple[ToolCall, ...]:
        """The calls in a generated turn, in order; none means that the turn is the answer. Here: `parse_hermes`."""
        return parse_hermes(text)

    async def setup(self) -> None:  # noqa: B027 optional hook
        """Opened once per worker before the first action."""

    async def close(self) -> None:  # noqa: B027 optional hook
        """Closed once per worker after the last action."""

    @property
    def name(self) -> str:
        """What messages and logs call this environment."""
        return type(self).__name__

    @property
    def tool_schemas(self) -> list[dict[str, Any]]:
        """OpenAI-style JSON schemas, for the chat template's ``tools``."""
        return [dict(tool.schema) for tool in self.tools]


def parse_hermes(text: str) -> tuple[ToolCall, ...]:
    """Calls written as ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, the format of Hermes and Qwen.

    The JSON is decoded rather than searched for its end, so an argument may itself contain ``</tool_call>``. A call
    that is not right is returned with ``error`` set, and reading goes on after its closing tag.
    """
    calls: list[ToolCall] = []
    position = text.find(OPEN)
    while position >= 0:
        start = position + len(OPEN)
        call, end = _one_call(text, start)
        calls.append(call)
        position = text.find(OPEN, end)
    return tuple(calls)


def _one_call(text: str, start: int) -> tuple[ToolCall, int]:
    """The call whose JSON begins at or after ``start``, and where to read on."""
    close = text.find(CLOSE, start)
    resume = close + len(CLOSE) if close >= 0 else start
    brace = start + len(text[start:]) - len(text[start:].lstrip())
    try:
        value, end = _DECODER.raw_decode(text, brace)
    except (ValueError, RecursionError):
        return ToolCall("", {}, "not valid JSON"), resume
    if not text[end:].lstrip().startswith(CLOSE):
        return ToolCall("", {}, "its tag is not closed after the JSON"), max(resume, end)
    resume = text.index(CLOSE, end) + len(CLOSE)
    return _check(value), resume


def _check(value: object) -> ToolCall:
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
        return ToolCall("", {}, 'no "name"')
    if not isinstance(value.get("arguments"), Mapping):
        return ToolCall("", {}, 'no "arguments"')
    return ToolCall(value["name"], value["arguments"])

"""Tool calls as models write them, read from generated text.

Invariants, for every format
----------------------------
1. Any text is read without raising, in time linear in its length.
2. Each opening tag gives at most one malformed call, with ``error`` set; the model reads the error and may try again. No call is
   dropped silently.
3. A well-formed call is read as it was written, also with closing tags in its arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from libra.envs.tool import Tool
from libra.envs.tool_calls import qwen3_coder
from libra.envs.tool_calls.hermes import parse_hermes
from libra.envs.tool_calls.qwen3_coder import parse_qwen3_coder
from libra.types import ToolCall

__all__ = ["TOOL_FORMATS", "ToolFormat", "parse_hermes", "parse_qwen3_coder"]


class ToolFormat(NamedTuple):
    """The parser of a format, and the shape of a right call to show after a malformed one."""

    parse: Callable[[str, Sequence[Tool]], tuple[ToolCall, ...]]
    usage: Callable[[Tool], str]


TOOL_FORMATS: dict[str, ToolFormat] = {
    "hermes": ToolFormat(lambda text, tools: parse_hermes(text), lambda tool: tool.usage),
    "qwen3_coder": ToolFormat(parse_qwen3_coder, qwen3_coder.usage),
}
"""By the value of ``rollout.tool_format``."""

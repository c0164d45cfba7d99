"""Tool calls as models write them, read from generated text.

Invariants, for every format
----------------------------
1. Any text is read without raising, in time linear in its length.
2. Each opening tag gives at most one malformed call; a malformed call has ``error`` set and is shown to the model, which may
   try again. No call is dropped in silence.
3. A right call is read as it was written, whatever its arguments hold, closing tags included.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from libra.envs.tool import Tool
from libra.envs.tool_calls.hermes import parse_hermes
from libra.envs.tool_calls.qwen3_coder import parse_qwen3_coder
from libra.types import ToolCall

__all__ = ["TOOL_FORMATS", "parse_hermes", "parse_qwen3_coder"]

TOOL_FORMATS: dict[str, Callable[[str, Sequence[Tool]], tuple[ToolCall, ...]]] = {
    "hermes": lambda text, tools: parse_hermes(text),
    "qwen3_coder": parse_qwen3_coder,
}
"""Parsers by the name that ``rollout.tool_format`` takes."""

"""The border for foreign text: text of a model, returns of tools, messages of errors.

`storable`, `storable_calls` and `error_text` are called where such text enters a run, and nowhere
else; behind this border it can be stored, sent and compared:

* generated turns and their calls: `libra.worker.trajectory.quanta`, before they are recorded
* returns and errors of tools: `libra.envs.tool_calls`
* errors of rewards and parsers: `libra.envs.grader`, `libra.worker.trajectory.quanta`
* requests of agents: `libra.agents.gateway`

`libra.rollout.chat_format` breaks special tokens spelled in a tool's text. `shown` is the border
towards a reader: terminals, the page and logs get no text that could act on them.

Invariants
----------
1. `storable` text is valid Unicode of unchanged length without control characters except line feed,
   carriage return and tab. A second application changes nothing.
2. A stored call has a name of at most `MAX_NAME_CHARS` and arguments that survive JSON and have at
   most `MAX_DEPTH` levels; otherwise it is malformed, with ``error`` set.
3. A turn has at most `MAX_CALLS` calls, plus one that counts the calls not made.
4. `shown` text has no control characters except line feed and tab, no escape sequence, and nothing
   that reorders or hides text.
5. All functions take time linear in the text, and raise for no text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from libra.types import ToolCall

MAX_NAME_CHARS: Final = 256
"""Longest name of a tool in a call."""
MAX_DEPTH: Final = 64
"""Most levels in a call's arguments. Python's JSON fails at about a thousand."""
MAX_CALLS: Final = 64
"""Most calls of a turn: all run at once, each on its own thread or in its own sandbox."""
MAX_INTEGER_BITS: Final = 4096
"""Largest integer in arguments: Python refuses to write more than 4,300 digits."""
MAX_ERROR_CHARS: Final = 2000
"""Longest text of an error."""
REPLACEMENT: Final = "\ufffd"

_UNSTORABLE = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")
_SURROGATES = re.compile(r"[\ud800-\udfff]")

# No part may match what another one begins with: then each character is looked at a bounded number of times.
_ACTING = re.compile(
    r"(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])[^\x00-\x1f\x7f-\x9f]*(?:\x07|\x1b\\|\x9c)"  # OSC, DCS, SOS, PM, APC, to their end
    r"|(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"  # CSI: colours, movements, clearing
    r"|[\x00-\x08\x0b-\x1f\x7f-\x9f]"  # C0 and C1
    r"|[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]"  # bidirectional controls
    r"|[\u2028\u2029]"  # line and paragraph separators
    r"|[\ufff9-\ufffb\U000e0000-\U000e007f]"  # annotations and tags, which are invisible
    r"|[\ud800-\udfff]"
)
_ACTING_IN_JSON = re.compile(
    "[\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufff9-\ufffb\U000e0000-\U000e007f]"
)


def storable(text: str) -> str:
    """``text`` with lone surrogates and control characters replaced by U+FFFD, one for one."""
    return _UNSTORABLE.sub(REPLACEMENT, text)


def valid_unicode(text: str) -> str:
    """``text`` with lone surrogates replaced by U+FFFD, and control characters kept."""
    return _SURROGATES.sub(REPLACEMENT, text)


def storable_calls(calls: Iterable[ToolCall]) -> tuple[ToolCall, ...]:
    """A turn's calls by `storable_call`; one malformed call replaces those beyond `MAX_CALLS`."""
    found = tuple(calls)
    kept = tuple(storable_call(call) for call in found[:MAX_CALLS])
    if len(found) == len(kept):
        return kept
    return (
        *kept,
        ToolCall("", {}, f"{len(found)} calls in one turn, of at most {MAX_CALLS}; only the first were made"),
    )


def storable_call(call: ToolCall) -> ToolCall:
    """A parsed call as it may be stored and given to its tool; malformed if over a limit.

    TypeError if the parser gave a value without a JSON form: the parser's fault, not the model's.
    """
    if call.error is not None:
        return ToolCall("", {}, storable(call.error)[:MAX_ERROR_CHARS])
    if not isinstance(call.name, str) or not isinstance(call.arguments, Mapping):
        raise TypeError(
            f"a call named {repr_text(call.name)} with arguments {repr_text(call.arguments)}; allowed are a str and a mapping"
        )
    if len(call.name) > MAX_NAME_CHARS:
        return ToolCall("", {}, f"its name has {len(call.name)} characters, of at most {MAX_NAME_CHARS}")
    try:
        return ToolCall(storable(call.name), {_key(k): _value(v, 1) for k, v in call.arguments.items()})
    except _OverLimit as limit:
        return ToolCall("", {}, str(limit))


class _OverLimit(Exception):
    """Arguments are too deep, or a number in them is too large; internal."""


def _value(value: Any, depth: int) -> Any:
    if isinstance(value, str):
        return storable(value)
    if value is None or isinstance(value, bool | float):
        return value
    if isinstance(value, int):
        if value.bit_length() > MAX_INTEGER_BITS:
            raise _OverLimit("a whole number in its arguments is too large")
        return value
    if depth >= MAX_DEPTH:
        raise _OverLimit(f"its arguments are nested more than {MAX_DEPTH} levels deep")
    if isinstance(value, Mapping):
        return {_key(key): _value(held, depth + 1) for key, held in value.items()}
    if isinstance(value, list | tuple):
        return [_value(held, depth + 1) for held in value]
    raise TypeError(f"an argument of type {type(value).__name__}; only JSON types are allowed")


def _key(key: object) -> str:
    if isinstance(key, str):
        return storable(key)
    if key is None or isinstance(key, int | float):
        return json.dumps(_value(key, 0))
    raise TypeError(f"an argument's name of type {type(key).__name__}; only JSON types are allowed")


def error_text(error: BaseException) -> str:
    """``Type: message`` of a foreign error, storable even if the error's ``str`` raises."""
    try:
        message = str(error)
    except Exception as second:  # noqa: BLE001 boundary: __str__ of a foreign error is foreign code too
        message = f"(its message could not be read: {type(second).__name__})"
    return storable(f"{type(error).__name__}: {message}"[:MAX_ERROR_CHARS])


def repr_text(value: object) -> str:
    """``repr`` of a foreign value, at most 200 characters; its type if ``repr`` raises."""
    try:
        return storable(repr(value)[:200])
    except Exception:  # noqa: BLE001 boundary: __repr__ of a foreign value is foreign code too
        return f"a {type(value).__name__}"


def shown(text: str) -> str:
    """``text`` for a terminal, page or log; each sequence that could act on it becomes U+FFFD."""
    return _ACTING.sub(REPLACEMENT, text.replace("\r\n", "\n"))


def shown_json(line: str) -> str:
    """JSON on one line for a terminal: same value, active characters as ``\\u`` escapes."""
    return _ACTING_IN_JSON.sub(lambda found: json.dumps(found[0])[1:-1], line)


def shown_line(text: str, max_chars: int = 200) -> str:
    """``text`` as `shown`, on one line, cut to ``max_chars``."""
    line = shown(text[: 4 * max_chars]).replace("\n", " ").replace("\t", " ")
    return line if len(line) <= max_chars else line[: max_chars - 3] + "..."

"""Messages of an agent's request in one form, whatever client sent them.

Two messages are equal if the model would read the same: null, "" and an absent content are equal, as are text and a list of text
parts, ``developer`` and ``system``, and arguments with the same JSON value. Unknown fields are ignored. Surrounding white space of
an assistant's text is ignored, because clients strip it. Ids of calls are no part of a message: an id proves nothing where the
text changed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from libra.errors import RequestRefused
from libra.untrusted import MAX_DEPTH, storable

ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call of an assistant's message; ``arguments`` is JSON, or the client's text where it is none."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation.

    Attributes
    ----------
    role : "system", "user", "assistant" or "tool"
    text : str
    calls : tuple of Call
        Of an assistant.
    call_id : str
        Of a tool's message: the call that it answers.
    reasoning : str
        Of an assistant, if the client sent it; it then counts in a comparison.
    """

    role: str
    text: str
    calls: tuple[Call, ...] = ()
    call_id: str = ""
    reasoning: str = ""
    _key: list[bytes] = field(default_factory=list, init=False, repr=False, compare=False)

    @property
    def key(self) -> bytes:
        """Equal for equal messages."""
        if not self._key:  # it is asked for several times in a request
            own = self.role == "assistant"
            calls = [[call.name, call.arguments] for call in self.calls]
            fields = [self.role, self.text.strip() if own else self.text, calls, self.reasoning.strip()]
            self._key.append(digest(json.dumps(fields, ensure_ascii=True).encode()))
        return self._key[0]

    def as_chat(self) -> dict[str, Any]:
        """As chat templates take it."""
        chat: dict[str, Any] = {"role": self.role, "content": self.text}
        if self.role == "tool":
            chat |= {"name": "tool", "tool_call_id": self.call_id}
        if self.reasoning:
            chat["reasoning_content"] = self.reasoning
        if self.calls:
            chat["tool_calls"] = [
                {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": parsed(c.arguments)}}
                for c in self.calls
            ]
        return chat

    def to_plain(self) -> list[Any]:
        """As plain data, for a record; `from_plain` reads it."""
        calls = [[call.id, call.name, call.arguments] for call in self.calls]
        return [self.role, self.text, calls, self.call_id, self.reasoning]

    @classmethod
    def from_plain(cls, plain: Sequence[Any]) -> Message:
        """The inverse of `to_plain`."""
        role, text, calls, call_id, reasoning = plain
        return cls(role, text, tuple(Call(*call) for call in calls), call_id, reasoning)


def digest(*parts: bytes) -> bytes:
    """128 bits of the parts, in order."""
    return hashlib.blake2b(b"".join(parts), digest_size=16).digest()


def parsed(arguments: str) -> Any:
    """The JSON value of a call's arguments, or the text where it is none."""
    try:
        return json.loads(arguments) if arguments else {}
    except (ValueError, RecursionError):
        return arguments


def canonical_json(value: Any) -> str:
    """One text for each JSON value."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))


def canonical_arguments(arguments: Any) -> str:
    """A call's arguments, given as JSON text or as a value, in one form that can be stored; text that is no JSON stays as it is.

    RequestRefused where they have too many levels.
    """
    value = parsed(arguments) if isinstance(arguments, str) else arguments
    if isinstance(value, str) and value == arguments:
        return value
    if levels(value, MAX_DEPTH) > MAX_DEPTH:
        raise RequestRefused(f"arguments: a call has more than {MAX_DEPTH} levels of lists and objects", "arguments")
    return storable(canonical_json({} if value is None and arguments is None else value))


def levels(value: Any, most: int) -> int:
    """Levels of lists and objects in a JSON value, counted up to one more than ``most``."""
    level, depth = [value], 0
    while level and depth <= most:
        inner = [each for each in level if isinstance(each, dict | list)]
        level = [child for each in inner for child in (each.values() if isinstance(each, dict) else each)]
        depth += bool(inner)
    return depth


def tool_schema(given: Any, where: str) -> dict[str, Any]:
    """A tool of a request as chat templates take it. ``parameters`` may be a list of them (qwen-agent)."""
    function = given.get("function", given) if isinstance(given, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RequestRefused(
            f"{where}: a tool is {{'type': 'function', 'function': {{'name': ..., 'parameters': ...}}}}", where
        )
    parameters = function.get("parameters", function.get("input_schema")) or {"type": "object", "properties": {}}
    if isinstance(parameters, Sequence) and not isinstance(parameters, str):
        rows = [row for row in parameters if isinstance(row, Mapping) and isinstance(row.get("name"), str)]
        if len(rows) < len(parameters):
            raise RequestRefused(f"{where}.parameters: each entry of a list has a 'name'", where)
        parameters = {
            "type": "object",
            "properties": {r["name"]: {k: v for k, v in r.items() if k not in ("name", "required")} for r in rows},
            "required": [row["name"] for row in rows if row.get("required")],
        }
    if not isinstance(parameters, Mapping):
        raise RequestRefused(f"{where}.parameters: got {type(parameters).__name__}; it is a JSON schema", where)
    schema = {
        "name": function["name"],
        "description": str(function.get("description") or ""),
        "parameters": dict(parameters),
    }
    return {"type": "function", "function": schema}

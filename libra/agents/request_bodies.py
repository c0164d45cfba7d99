"""Bodies of agents' requests as checked values, with a cache for repeated messages and tools.

Invariants
----------
1. Every value can be stored (`libra.untrusted.storable`), and has at most `MAX_DEPTH` levels of
   lists and objects.
2. A malformed body is refused with its field's name; unknown fields are ignored.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple, TypeVar

import msgspec

from libra.agents.messages import Message, bounded, tools_text
from libra.errors import RequestRefused
from libra.untrusted import repr_text, storable

KNOWN_BYTES = 4 << 20
"""Bytes of messages that a session's cache holds."""
_CACHED_BYTES = 64 << 10
_BOM = b"\xef\xbb\xbf"
_ESCAPED = re.compile(rb"\\u(?:00[0189]|d[89a-f])|[\x7f]|\xc2[\x80-\x9f]", re.IGNORECASE)
"""Spellings in valid JSON of characters that cannot be stored."""
_PLACE = re.compile(r" - at `\$\.?([^`]*)`$")
_NO_VARIABLES = frozenset({
    "chat_template", "conversation", "messages", "tools", "tokenize", "add_generation_prompt", "continue_final_message", "padding",
    "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs",
})  # fmt: skip
"""Rendering arguments that a client may not set: its template could write model turns, or never
end."""

T = TypeVar("T")
NOTHING = msgspec.Raw(b"")
_TOOLS: Any = list[Any] | None
_ARGS: Any = dict[str, Any] | None


class Part(msgspec.Struct):
    """A part of a message's content."""

    type: str | None = None
    text: str | None = None
    refusal: str | None = None


Content = str | list[str | Part] | None


class RunsOwn(msgspec.Struct, kw_only=True):
    """Parameters that the run sets itself."""

    temperature: Any = None
    top_p: Any = None
    top_k: Any = None
    min_p: Any = None
    seed: Any = None
    presence_penalty: Any = None
    frequency_penalty: Any = None
    logit_bias: Any = None


RUNS_OWN = RunsOwn.__struct_fields__


class Sampling(RunsOwn, kw_only=True):
    """Fields that all dialects have."""

    model: str | None = None
    stream: bool | None = None
    tools: msgspec.Raw = NOTHING
    tool_choice: Any = None
    chat_template_kwargs: msgspec.Raw = NOTHING
    n: Any = None
    best_of: Any = None


class Offered(NamedTuple):
    """Tools and template arguments of a request, and their `tools_text`."""

    tools: tuple[Mapping[str, Any], ...]
    args: Mapping[str, Any]
    text: str


class Known:
    """Cache of a session's messages by their bytes."""

    def __init__(self) -> None:
        self._found: dict[bytes, Message] = {}
        self._bytes = 0

    def messages(
        self, given: Sequence[msgspec.Raw], read: Callable[[bytes, str], Message], where: str
    ) -> tuple[Message, ...]:
        """Read messages; each distinct message is read once."""
        all_of = []
        for index, data in enumerate(map(bytes, given)):
            message = self._found.get(data)
            if message is None:
                message = read(data, f"{where}[{index}]")
                if self._bytes > KNOWN_BYTES:
                    self._found.clear()
                    self._bytes = 0
                self._found[data] = message
                self._bytes += len(data)
            all_of.append(message)
        return tuple(all_of)


def storable_json(data: bytes) -> bytes:
    """JSON of the same value with storable texts; RequestRefused if ``data`` is not JSON."""
    data = data.removeprefix(_BOM)
    if not _ESCAPED.search(data):
        return data
    try:
        return json.dumps(_storable(json.loads(data.decode())), ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise _no_json(error) from error


def _storable(value: Any) -> Any:
    if isinstance(value, str):
        return storable(value)
    if isinstance(value, dict):
        return {storable(key): _storable(each) for key, each in value.items()}
    return [_storable(each) for each in value] if isinstance(value, list) else value


def decoded(kind: type[T], data: bytes | msgspec.Raw, where: str = "") -> T:
    """JSON as a value of type ``kind``, at the place ``where``; RequestRefused for another form."""
    try:
        return _decoder(kind).decode(data)  # type: ignore[no-any-return, arg-type]
    except msgspec.ValidationError as error:
        place = _PLACE.search(str(error))
        field = place[1] if place is not None else ""
        full = f"{where}.{field}" if where and field and not field.startswith("[") else where + field
        raise RequestRefused(f"{full or 'the body'}: {_PLACE.sub('', str(error))}", where or field) from error
    except (ValueError, RecursionError) as error:
        raise _no_json(error) from error


@cache
def _decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


def _no_json(error: Exception) -> RequestRefused:
    return RequestRefused(f"the body is not JSON: {str(error)[:200]}")


def offered(body: Sampling) -> Offered:
    """Tools of a request, unless its choice is "none", and template arguments."""
    choice = body.tool_choice
    if choice not in (None, "auto", "none", "required", "any") and not isinstance(choice, Mapping):
        raise RequestRefused(f"tool_choice: got {repr_text(choice)}; auto and none are answered", "tool_choice")
    # Forcing a call would change the trained distribution: with "required" the model may still answer without one.
    tools, args = b"" if choice == "none" else bytes(body.tools), bytes(body.chat_template_kwargs)
    short = len(tools) + len(args) < _CACHED_BYTES
    return _offered(tools, args) if short else _offered.__wrapped__(tools, args)


@lru_cache(64)
def _offered(raw_tools: bytes, raw_args: bytes) -> Offered:
    tools = bounded(decoded(_TOOLS, raw_tools or b"null", "tools"), "tools") or ()
    where = "chat_template_kwargs"
    args = bounded(decoded(_ARGS, raw_args or b"null", where), where) or {}
    for name in _NO_VARIABLES & args.keys():
        raise RequestRefused(f"{where}: {name!r} is not a variable of the template; the run decides it", where)
    schemas = tuple(_tool_schema(tool, f"tools[{i}]") for i, tool in enumerate(tools))
    return Offered(schemas, args, tools_text(schemas, args))


def _tool_schema(given: Any, where: str) -> dict[str, Any]:
    """A tool as chat templates take it. ``parameters`` may be a list of parameters (qwen-agent)."""
    function = given.get("function", given) if isinstance(given, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RequestRefused(
            f"{where}: a tool is {{'type': 'function', 'function': {{'name': ..., 'parameters': ...}}}}", where
        )
    parameters = function.get("parameters", function.get("input_schema")) or {"type": "object", "properties": {}}
    if isinstance(parameters, list):
        if not all(isinstance(row, Mapping) and isinstance(row.get("name"), str) for row in parameters):
            raise RequestRefused(f"{where}.parameters: each entry of a list has a 'name'", where)
        properties = {r["name"]: {k: v for k, v in r.items() if k not in ("name", "required")} for r in parameters}
        required = [row["name"] for row in parameters if row.get("required")]
        parameters = {"type": "object", "properties": properties, "required": required}
    if not isinstance(parameters, Mapping):
        raise RequestRefused(f"{where}.parameters: got {type(parameters).__name__}; it is a JSON schema", where)
    described = str(function.get("description") or "")
    schema = {"name": function["name"], "description": described, "parameters": dict(parameters)}
    return {"type": "function", "function": schema}


def refuse_choices(body: Any) -> None:
    """RequestRefused for several choices; trainer.group_size decides the number of samples."""
    for name in ("n", "best_of"):
        if getattr(body, name) not in (None, 1):
            got = repr_text(getattr(body, name))
            raise RequestRefused(f"{name}: got {got}; a request has one answer, ask again for another", name)


def whole(value: int | None, name: str) -> int | None:
    """A number above 0, or None."""
    if value is not None and value < 1:
        raise RequestRefused(f"{name}: got {value!r}; a whole number above 0 is needed", name)
    return value


def stops(given: str | list[str] | None, where: str) -> tuple[str, ...]:
    """Stop texts: none, one, or a list."""
    found = (given,) if isinstance(given, str) else tuple(given or ())
    if len(found) > 16 or not all(found):
        raise RequestRefused(f"{where}: one text, or a list of at most 16, is needed", where)
    return found


def text_of(content: Content, where: str) -> str:
    """The text of a content; RequestRefused if it has parts other than text."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for part in content:
        text = part if isinstance(part, str) else part.text if part.text is not None else part.refusal
        if text is None:
            kind = part.type if isinstance(part, Part) else "text"
            raise RequestRefused(f"{where}.content: a part of type {kind!r}; this model reads text only", where)
        texts.append(text)
    return "".join(texts)

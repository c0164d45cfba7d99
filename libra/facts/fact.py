"""The base of all facts, and facts as lines of the event log and as messages between processes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, lru_cache, reduce
from math import isfinite
from operator import or_
from typing import Any, ClassVar, NamedTuple

import msgspec
import numpy as np

from libra.errors import StoreError

__all__ = [
    "SCHEMA", "STREAM_OP", "Command", "Fact", "Line", "Signal", "fields_of", "from_dict", "from_json", "kinds", "known",
    "name_of", "pack", "to_dict", "to_json", "unpack",
]  # fmt: skip


def _tag(class_name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", class_name).lower()


class Fact(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="name", tag=_tag, gc=False):
    """Something that happened or was decided in a run; its `Line` has run and time.

    ``words`` is its sentence for people, with fields in braces (`libra.facts.sentences`).
    ``subject`` is the kind of history that has it: trajectory, gate, batch, worker or steps.
    """

    words: ClassVar[str] = ""
    subject: ClassVar[str] = "trajectory"

    @property
    def name(self) -> str:
        """Name in the log: the class's in snake case, or the tag that the class gives."""
        return name_of(type(self))


def name_of(kind: type[Fact]) -> str:
    return str(kind.__struct_config__.tag)


class Command(Fact, frozen=True):
    """A decision of a policy object, with its ``reason``; ``plural`` names several such decisions.

    The object's name is imperative; its name in the log is in the past tense.
    """

    plural: ClassVar[str] = "decisions"

    @property
    def about(self) -> str:
        """The trajectory, iteration, batch or worker that the command concerns."""
        return str(getattr(self, self.__struct_fields__[0]))


class Signal(Fact, frozen=True):
    """A fact for the scheduler alone; it is not logged."""


class Line(NamedTuple):
    """A fact of ``run``, ``t_s`` seconds after the run started."""

    run: str
    t_s: float
    fact: Fact


def kinds(base: type[Fact] = Fact) -> Iterator[type[Fact]]:
    """Every kind of fact: the classes without subclasses."""
    below = base.__subclasses__()
    if not below:
        yield base
    for cls in below:
        yield from kinds(cls)


SCHEMA = 5  # layout of a line; a change that old code cannot read takes the next number

STREAM_OP = "libra-facts"
"""Name of messages with facts on the stream from a worker or a client to the scheduler."""

ENVELOPE = ("schema", "run", "t_s")


class _Envelope(msgspec.Struct):
    run: str
    t_s: float


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    for kind in (str, float, int):
        if isinstance(value, kind):
            return kind(value)
    raise TypeError(f"{type(value).__name__} {value!r} has no form in JSON")


_json = msgspec.json.Encoder(enc_hook=_plain).encode
_msgpack = msgspec.msgpack.Encoder(enc_hook=_plain).encode


@cache
def known() -> dict[str, type[Fact]]:
    return {name_of(kind): kind for kind in kinds()}


@cache
def _decoder() -> msgspec.msgpack.Decoder[tuple[Fact, ...]]:
    any_of: Any = reduce(or_, known().values())
    return msgspec.msgpack.Decoder(tuple[any_of, ...])


def pack(facts: Sequence[Fact]) -> bytes:
    """Facts for another process; TypeError if msgpack cannot encode a value."""
    try:
        return _msgpack(facts)
    except UnicodeEncodeError:
        text = json.dumps([msgspec.to_builtins(fact, enc_hook=_plain) for fact in facts], ensure_ascii=False)
        return _msgpack(json.loads(text.encode(errors="replace")))


def unpack(packed: bytes) -> tuple[Fact, ...]:
    """Decode the facts of `pack`; `msgspec.DecodeError` for anything else."""
    return _decoder().decode(packed)


def fields_of(fact: Fact) -> dict[str, Any]:
    values: dict[str, Any] = msgspec.to_builtins(fact, enc_hook=_plain)
    del values["name"]
    return values


def to_dict(line: Line) -> dict[str, Any]:
    return {"schema": SCHEMA, "name": line.fact.name, "run": line.run, "t_s": line.t_s} | fields_of(line.fact)


@lru_cache(1024)
def _head(kind: type[Fact], run: str) -> tuple[str, int]:
    name = name_of(kind)
    return f'{{"schema":{SCHEMA},"name":"{name}","run":{_json(run).decode()},"t_s":', len(name) + len('{"name":"",')


def to_json(line: Line) -> str:
    """A line of JSON without its newline; StoreError for a value that JSON does not have."""
    run, t_s, fact = line
    try:
        body = _json(fact)
        head, start = _head(type(fact), run)
        # msgspec writes NaN and infinity as null.
        found = "" if isfinite(t_s) and b"null" not in body else _not_finite(to_dict(line))
        if not found:
            return f"{head}{t_s!r},{body[start:].decode()}"
    except UnicodeEncodeError:  # half a surrogate pair needs an ASCII escape
        return json.dumps(to_dict(line), separators=(",", ":"), allow_nan=False)
    except TypeError as error:
        raise StoreError(
            f"event {fact.name}: {error}; allowed are None, bool, numbers, strings, lists and dicts"
        ) from error
    raise StoreError(f"event {fact.name}: {found}; allowed are finite numbers: {fact}")


def _not_finite(value: object, where: str = "") -> str:
    """The first number within ``value`` that is NaN or infinite, with its place; or ""."""
    if isinstance(value, float):
        return "" if isfinite(value) else f"{where} is {value}"
    if isinstance(value, dict):
        return next(filter(None, (_not_finite(each, str(name)) for name, each in value.items())), "")
    if isinstance(value, list | tuple):
        return next(filter(None, (_not_finite(each, where) for each in value)), "")
    return ""


def from_dict(values: Mapping[str, Any]) -> Line:
    """The line of a dict; StoreError for another schema, or an unknown name, field or type."""
    if values.get("schema") != SCHEMA:
        raise StoreError(
            f"event of schema {values.get('schema')!r}, this Libra reads {SCHEMA}; use the Libra that wrote it"
        )
    kind = known().get(values.get("name", ""))
    if kind is None:
        raise StoreError(f"event named {values.get('name')!r}; known are {', '.join(known())}")
    body = {name: value for name, value in values.items() if name not in ENVELOPE}
    try:
        head = msgspec.convert(values, _Envelope)
        return Line(head.run, head.t_s, msgspec.convert(body, kind, str_keys=True))
    except msgspec.ValidationError as error:
        fields = ", ".join((*ENVELOPE[1:], *kind.__struct_fields__))
        raise StoreError(
            f"event {name_of(kind)}: {error}; its fields are {fields}; use the Libra that wrote it"
        ) from error


def from_json(line: str) -> Line:
    """The line of a JSON text; StoreError if it is not JSON, or not an event."""
    try:
        values = msgspec.json.decode(line)
    except msgspec.DecodeError as error:
        raise StoreError(f"event line is not JSON ({error}): {line[:120]!r}") from error
    if not isinstance(values, dict):
        raise StoreError(f"event line is not a JSON object:  {line[:120]!r}")
    return from_dict(values)

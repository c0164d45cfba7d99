"""Every setting as its model describes it: name, allowed values and default."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, cast

from pydantic.fields import FieldInfo

from libra.config.planner import PlannedLayout
from libra.config.section import OwnOr, Section
from libra.config.sections import RunSections
from libra.config.yaml_text import one_line_yaml as one_line_yaml  # also read from here

MERGED = frozenset({
    *(("trainer", f"{name}_args") for name in ("loss", "correction", "reject", "lora", "adam", "late", "kl", "mismatch")),
    ("environment", "args"), ("slurm", "jobs"), ("rollout", "engine_args"), ("planner", "lengths"), ("cluster", "tool_supply"),
    ("observe", "callbacks"),
})  # fmt: skip
"""Settings that are mappings and are merged key by key."""

_WORDS: Mapping[Any, str] = types.MappingProxyType(
    {
        PlannedLayout: "a mapping that libra plan --write writes",
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        str: "text",
        Path: "a path",
        type(None): "null",
    }
)


@dataclass(frozen=True, slots=True)
class FieldReference:
    """One setting.

    Attributes
    ----------
    name : str
        Dotted name, e.g. ``trainer.lr``.
    allowed : str
        Type and bounds in words.
    default : str
        Default value as typed in YAML.
    description : str
        Docstring of the field, on one line.
    takes_text, takes_mapping : bool
        Whether any text, or a mapping, has a valid type.
    """

    name: str
    allowed: str
    default: str
    description: str
    takes_text: bool
    takes_mapping: bool


def sections() -> dict[str, type[Section]]:
    """The sections of a configuration by name, in order."""
    found = {name: field.annotation for name, field in RunSections.model_fields.items()}
    assert all(isinstance(section, type) and issubclass(section, Section) for section in found.values())
    return cast("dict[str, type[Section]]", found)


def in_arguments(path: Sequence[str]) -> bool:
    """Whether ``path`` is a key inside a mapping whose keys are set individually."""
    return tuple(path[:2]) in MERGED and len(path) > 2


@cache
def field_references() -> dict[str, FieldReference]:
    """Every setting by its dotted name, in the order of the models."""
    found = {}
    for section_name, section in sections().items():
        for field_name, field in section.model_fields.items():
            name = f"{section_name}.{field_name}"
            found[name] = reference_of(name, field)
    return found


def inner_reference(path: Sequence[str]) -> FieldReference | None:
    """A key inside an entry of a mapping, e.g. ``services.named.judge.max_batch``, or None."""
    annotation: Any = sections()[path[0]].model_fields[path[1]].annotation
    found = None
    for number, key in enumerate(path[2:], start=3):
        found = None
        if typing.get_origin(annotation) is dict:
            annotation = typing.get_args(annotation)[1]
        elif isinstance(annotation, type) and issubclass(annotation, Section) and key in annotation.model_fields:
            field = annotation.model_fields[key]
            found, annotation = reference_of(".".join(path[:number]), field), field.annotation
        else:
            return None
    return found


def reference_of(name: str, field: FieldInfo) -> FieldReference:
    """The setting ``name`` as its field describes it."""
    return FieldReference(
        name=name,
        allowed=_allowed(field),
        default=one_line_yaml(field.default),
        description=" ".join((field.description or "").split()),
        takes_text=any(kind in (str, Path) for kind in _kinds(field.annotation)),
        takes_mapping=any(
            typing.get_origin(kind) is dict or (isinstance(kind, type) and issubclass(kind, (dict, Section)))
            for kind in _kinds(field.annotation)
        ),
    )


def _allowed(field: FieldInfo) -> str:
    if own := _own_words(field.metadata):
        return own
    bounds = ", ".join(_bounds(field.metadata))
    words = _type_words(field.annotation)
    return f"{words}, {bounds}" if bounds else words


def _type_words(annotation: Any) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        if own := _own_words(arguments[1:]):
            return own
        bounds = ", ".join(_bounds(arguments[1:]))
        words = _type_words(arguments[0])
        return f"{words}, {bounds}" if bounds else words
    if origin is Literal:
        words = ", ".join(one_line_yaml(argument) for argument in arguments)
        return f"one of {words}" if len(arguments) > 1 else f"only {words}"
    if origin in (typing.Union, types.UnionType):
        return ", or ".join(_type_words(argument) for argument in arguments)
    if origin is tuple and arguments[-1] is Ellipsis:
        return f"a list, each {_type_words(arguments[0])}"
    if origin is tuple:
        inner = {_type_words(argument) for argument in arguments}
        assert len(inner) == 1, "a list field has items of one kind"
        return f"a list of {len(arguments)}, each {inner.pop()}"
    if origin is dict:
        if arguments[1] is Any:
            return "a mapping"
        return f"a mapping from {_type_words(arguments[0])} to {_type_words(arguments[1])}"
    if origin is list:
        return f"a list, each {_type_words(arguments[0])}"
    if isinstance(annotation, type) and issubclass(annotation, Section):
        keys = (f"{name} ({_allowed(field)})" for name, field in annotation.model_fields.items())
        return f"a mapping of {', '.join(keys)}"
    return _WORDS[annotation]


def _own_words(metadata: typing.Iterable[Any]) -> str:
    return next((item.words for item in metadata if isinstance(item, OwnOr)), "")


def _bounds(metadata: typing.Iterable[Any]) -> Iterator[str]:
    for item in metadata:
        if isinstance(item, FieldInfo):
            yield from _bounds(item.metadata)
        for attribute, words in (("ge", "at least"), ("gt", "above"), ("le", "at most"), ("lt", "below")):
            bound = getattr(item, attribute, None)
            if bound is not None and not isinstance(item, FieldInfo):
                yield f"{words} {bound}"
        if getattr(item, "min_length", None) == 1 and not isinstance(item, FieldInfo):
            yield "not empty"


def _kinds(annotation: Any) -> Iterator[Any]:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        yield from _kinds(arguments[0])
    elif origin in (typing.Union, types.UnionType):
        for argument in arguments:
            yield from _kinds(argument)
    else:
        yield annotation

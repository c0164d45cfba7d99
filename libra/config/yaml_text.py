"""YAML as Libra reads and writes it: YAML 1.2's core types, with the line of every key.

YAML 1.1, PyYAML's default, reads ``1e-4`` as text, ``no`` as false, ``010`` as 8 and ``12:30`` as 750, and keeps only the last
of two equal keys. Here numbers are numbers, only true and false are truth values, and a repeated key is an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import yaml

from libra.errors import ConfigError

_RESOLVERS: tuple[tuple[str, re.Pattern[str], str], ...] = (
    ("tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), "tTfF"),
    ("tag:yaml.org,2002:int", re.compile(r"^[-+]?[0-9]+$"), "-+0123456789"),
    (
        "tag:yaml.org,2002:float",
        re.compile(
            r"^(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
        ),
        "-+.0123456789",
    ),
    ("tag:yaml.org,2002:null", re.compile(r"^(?:~|null|Null|NULL|)$"), "~nN\0"),
)


def _core_resolvers() -> dict[str, list[tuple[str, re.Pattern[str]]]]:
    table: dict[str, list[tuple[str, re.Pattern[str]]]] = {}
    for tag, pattern, first in _RESOLVERS:
        for character in first:
            table.setdefault("" if character == "\0" else character, []).append((tag, pattern))
    return table


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = _core_resolvers()


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers = _core_resolvers()

    def ignore_aliases(self, data: Any) -> bool:
        """Write equal lists twice rather than as anchor and alias."""
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    """Text with line breaks or unprintable characters in double quotes: PyYAML loses some of them in other styles."""
    style = None if text.isprintable() else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)

# PyYAML's own constructor reads "010" as octal and "1_000" as 1000.
_Loader.add_constructor("tag:yaml.org,2002:int", lambda loader, node: int(node.value))

Lines = dict[tuple[str, ...], int]
"""1-based line of every key, by its path from the top of the file."""


def read_mapping(text: str, source: str) -> tuple[dict[str, Any], Lines]:
    """The mapping a YAML document holds, and the line of each of its keys.

    Parameters
    ----------
    text : str
        The document. An empty one is an empty mapping.
    source : str
        Its name in error messages.

    Raises
    ------
    ConfigError
        Where the text is no YAML, is no mapping, repeats a key, or has a key that is no text.
    """
    with _root(text, source) as (loader, node):
        if node is None:
            return {}, {}
        if not isinstance(node, yaml.MappingNode):
            raise ConfigError(f"{source}:1: a configuration is a mapping of sections; begin it with e.g. 'run:'")
        lines: Lines = {}
        value = _value(loader, node, source, (), lines, ())
    assert isinstance(value, dict)
    return value, lines


def read_value(text: str, source: str) -> Any:
    """The value that ``text`` is as YAML, as in an override ``a.b=text``; ConfigError where it is none, or not one."""
    with _root(text, source) as (loader, node):
        if node is None or text[node.end_mark.index :].strip():
            raise ConfigError(
                f"{source}: {text!r} is not one value; type null for none, and quotes around text with '#'"
            )
        return _value(loader, node, source, (), {}, ())


def write(value: Any) -> str:
    """``value`` (JSON-able) as YAML text that `read_mapping` reads back to an equal value."""
    text: str = yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=float("inf"))
    return text


@contextmanager
def _root(text: str, source: str) -> Iterator[tuple[_Loader, yaml.Node | None]]:
    """The loader and the root node of a document; what goes wrong while they are used is a ConfigError."""
    try:
        loader = _Loader(text)
        try:
            yield loader, loader.get_single_node()
        finally:
            loader.dispose()
    except ConfigError:
        raise
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(_syntax_message(error, source)) from error
    except RecursionError as error:
        raise ConfigError(f"{source}: lists and mappings are nested too deep to be read") from error


def _value(
    loader: _Loader,
    node: yaml.Node,
    source: str,
    path: tuple[str, ...],
    lines: Lines,
    ancestors: tuple[int, ...],
) -> Any:
    where = f"{source}:{node.start_mark.line + 1}"
    if id(node) in ancestors:
        raise ConfigError(f"{where}: an alias that contains itself; write the value out")
    ancestors = (*ancestors, id(node))
    if isinstance(node, yaml.SequenceNode):
        return [
            _value(loader, item, source, (*path, str(index)), lines, ancestors) for index, item in enumerate(node.value)
        ]
    if not isinstance(node, yaml.MappingNode):
        return loader.construct_object(node, deep=True)
    result: dict[str, Any] = {}
    for key_node, value_node in node.value:
        where = f"{source}:{key_node.start_mark.line + 1}"
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, str):
            raise ConfigError(f'{where}: the key {key!r} is not text; write it in quotes, as "{key}"')
        if key in result:
            raise ConfigError(f"{where}: the key {'.'.join((*path, key))} stands twice; keep one of them")
        lines[(*path, key)] = key_node.start_mark.line + 1
        result[key] = _value(loader, value_node, source, (*path, key), lines, ancestors)
    return result


def _syntax_message(error: Exception, source: str) -> str:
    mark = getattr(error, "problem_mark", None)
    where = f"{source}:{mark.line + 1}" if mark is not None else source
    problem = getattr(error, "problem", None) or " ".join(str(error).split())
    return f"{where}: not valid YAML: {problem}; check indentation, and put quotes around text with ':' or '#'"

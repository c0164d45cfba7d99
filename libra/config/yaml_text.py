"""Reading and writing YAML: PyYAML with the core types of YAML 1.2, and the line of every key.

YAML 1.1, PyYAML's default, reads ``1e-4`` as text, ``no`` as false, ``010`` as 8 and ``12:30`` as
750, and keeps the last of two equal keys. Here numbers are numbers, only true and false are
booleans, and a repeated key is an error.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from libra.errors import ConfigError

_FLOAT = r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
_CORE_TYPES = (  # tag, pattern, first characters
    ("bool", r"true|True|TRUE|false|False|FALSE", [*"tTfF"]),
    ("int", r"[-+]?[0-9]+", [*"-+0123456789"]),
    ("float", _FLOAT, [*"-+.0123456789"]),
    ("null", r"~|null|Null|NULL|", [*"~nN", ""]),
)

Lines = dict[tuple[str, ...], int]
"""1-based line of every key, by its path from the top of the file."""


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, Any] = {}


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers: dict[str, Any] = {}

    def ignore_aliases(self, data: Any) -> bool:
        """Write equal lists twice rather than as anchor and alias."""
        return True


for _tag, _pattern, _first in _CORE_TYPES:
    for _side in (_Loader, _Dumper):
        _side.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), _first)
# PyYAML's own constructor reads "010" as octal and "1_000" as 1000.
_Loader.add_constructor("tag:yaml.org,2002:int", lambda loader, node: int(node.value))
# Text with line breaks or unprintable characters in double quotes: PyYAML loses some of them in other styles.
_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style=None if text.isprintable() else '"'
    ),
)
_Dumper.add_multi_representer(Path, lambda dumper, path: dumper.represent_data(str(path)))


def read_mapping(text: str, source: str) -> tuple[dict[str, Any], Lines]:
    """The mapping in a YAML document ({} if empty), and the line of each key.

    ConfigError, which begins with ``source``, if the text is not YAML or not a mapping, repeats a
    key, or has a key that is not text.
    """
    node, value, lines = _parsed(text, source)
    if node is None:
        return {}, {}
    if not isinstance(value, dict):
        got = f"a list ({one_line_yaml(value)[:40]})" if isinstance(value, list) else repr(value)[:40]
        raise ConfigError(f"{source}:1: got {got}; a configuration is a mapping of sections: begin it with e.g. 'run:'")
    return value, lines


def read_value(text: str, source: str) -> Any:
    """``text`` as YAML, as in an override ``a.b=text``; ConfigError unless it is one value."""
    node, value, _ = _parsed(text, source)
    if node is None or text[node.end_mark.index :].strip():
        raise ConfigError(f"{source}: {text!r} is not one value; type null for none, and quotes around text with '#'")
    return value


def write(value: Any) -> str:
    """The JSON-able ``value`` as YAML text, which `read_mapping` reads back to an equal value."""
    text: str = yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=float("inf"))
    return text


def one_line_yaml(value: object) -> str:
    """``value`` as typed after ``=`` in an override: ``null``, ``0.2``, ``[0.9, 0.95]``."""
    text: str = yaml.dump(
        value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=float("inf"), default_flow_style=True
    )
    return text.removesuffix("\n").removesuffix("\n...")


def _parsed(text: str, source: str) -> tuple[yaml.Node | None, Any, Lines]:
    lines: Lines = {}

    def value_of(node: yaml.Node, path: tuple[str, ...], parents: tuple[yaml.Node, ...]) -> Any:
        if node in parents:
            raise ConfigError(f"{source}:{_line(node)}: an alias that contains itself; write the value out")
        if isinstance(node, yaml.SequenceNode):
            return [value_of(item, (*path, str(i)), (*parents, node)) for i, item in enumerate(node.value)]
        if not isinstance(node, yaml.MappingNode):
            return loader.construct_object(node, deep=True)
        mapping: dict[str, Any] = {}
        for key_node, inner in node.value:
            key, where = loader.construct_object(key_node, deep=True), f"{source}:{_line(key_node)}"
            if not isinstance(key, str):
                raise ConfigError(f'{where}: the key {key!r} is not text; write it in quotes, as "{key}"')
            if key in mapping:
                raise ConfigError(f"{where}: the key {'.'.join((*path, key))} is repeated; keep one of them")
            lines[(*path, key)] = _line(key_node)
            mapping[key] = value_of(inner, (*path, key), (*parents, node))
        return mapping

    try:
        loader = _Loader(text)
        try:
            root = loader.get_single_node()
            return root, None if root is None else value_of(root, (), ()), lines
        finally:
            loader.dispose()
    except ConfigError:
        raise
    except (yaml.YAMLError, ValueError) as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        where = source if mark is None else f"{source}:{mark.line + 1}"
        if problem is not None and r"'\t'" in problem:
            raise ConfigError(f"{where}: not valid YAML: a tab; indent with spaces") from error
        raise ConfigError(
            f"{where}: not valid YAML: {problem or ' '.join(str(error).split())}; check indentation, and put quotes around text "
            "with ':' or '#'"
        ) from error
    except RecursionError as error:
        raise ConfigError(f"{source}: lists and mappings are nested too deep to be read") from error


def _line(node: yaml.Node) -> int:
    line: int = node.start_mark.line
    return line + 1

"""The import graph of the package, read from its source: modules, and the rooms they are in."""

from __future__ import annotations

import ast
import functools
from collections.abc import Mapping
from pathlib import Path

Graph = Mapping[str, set[str]]
"""What each module or room imports, by name."""


def modules(repository: Path) -> dict[str, Path]:
    """Every module under libra/ by dotted name; a package has the name of its folder."""
    found = {}
    for path in sorted((repository / "libra").rglob("*.py")):
        parts = path.relative_to(repository).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def room(name: str) -> str:
    """The first name below ``libra``: a package, or a module beside the packages. ``libra`` and its ``__main__`` are one room."""
    return name.split(".")[1] if "." in name and not name.endswith("__main__") else "libra"


@functools.cache
def imports(source: str, module: str, *, package: bool = False) -> list[tuple[int, str]]:
    """(line, absolute dotted name) of every import in ``source``, in functions and under TYPE_CHECKING too.

    ``from a import b`` counts as ``a.b``: the imported module where b is one, and a name in ``a`` where it is not.
    ``package``: ``module`` is a package's ``__init__``, where one dot means the package itself.
    """
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parts = module.split(".")
            dots = node.level - package
            parent = parts[: len(parts) - dots] if node.level else []
            origin = ".".join([*parent, *([node.module] if node.module else [])])
            found += [(node.lineno, f"{origin}.{alias.name}") for alias in node.names]
    return found


def import_graph(paths: Mapping[str, Path]) -> dict[str, set[str]]:
    """The modules that each module names in an import. A package imported only as the parent of a module does not count."""

    def resolve(name: str) -> str:
        while name and name not in paths:
            name = name.rpartition(".")[0]
        return name

    graph = {}
    for module, path in paths.items():
        named = imports(path.read_text(), module, package=path.name == "__init__.py")
        graph[module] = {resolve(name) for _, name in named if name.split(".")[0] == "libra"} - {module, ""}
    return graph


def room_graph(graph: Graph) -> dict[str, set[str]]:
    """The rooms that each room imports."""
    rooms: dict[str, set[str]] = {room(module): set() for module in graph}
    for module, targets in graph.items():
        rooms[room(module)] |= {room(target) for target in targets} - {room(module)}
    return rooms


def reachable(graph: Graph, start: str) -> set[str]:
    """Everything that ``start`` imports, directly or through others."""
    found: set[str] = set()
    frontier = [start]
    while frontier:
        new = graph[frontier.pop()] - found
        found |= new
        frontier.extend(new)
    return found


def reduced(graph: Graph) -> dict[str, set[str]]:
    """The graph without every arrow that a longer way already implies. The graph has no circles."""

    def implied(target: str, targets: set[str]) -> bool:
        return any(target in reachable(graph, other) for other in targets - {target})

    return {name: {target for target in targets if not implied(target, targets)} for name, targets in graph.items()}

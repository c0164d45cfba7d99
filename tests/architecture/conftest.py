"""Reading the imports of a module from its source."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))  # for import_graph and picture

from import_graph import import_graph


def _imports(source: str, module: str) -> list[tuple[int, str]]:
    """(line, absolute dotted name) of everything ``source``, which is ``module``, imports anywhere in it.

    ``from a import b`` counts as ``a.b``, which is the module imported where b is one, and begins with it where it is not.
    """
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            package = module.split(".")[: -node.level] if node.level else []
            origin = ".".join([*package, *([node.module] if node.module else [])])
            found += [(node.lineno, f"{origin}.{alias.name}") for alias in node.names]
    return found


@pytest.fixture(scope="session")
def imports_of() -> Callable[[str, str], list[tuple[int, str]]]:
    """`_imports`, as a fixture because test directories share code through fixtures only."""
    return _imports


@pytest.fixture(scope="session")
def modules(repository: Path) -> dict[str, Path]:
    """Every module under libra/ by dotted name."""
    found = {}
    for path in sorted((repository / "libra").rglob("*.py")):
        parts = path.relative_to(repository).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    assert "libra.config.models" in found
    return found


@pytest.fixture(scope="session")
def graph(modules: dict[str, Path]) -> dict[str, set[str]]:
    """The modules that each module imports."""
    return import_graph(modules)

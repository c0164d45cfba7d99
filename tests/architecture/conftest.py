"""Reading the imports of a module from its source."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))  # for import_graph and picture

from import_graph import import_graph, imports
from import_graph import modules as module_paths


@pytest.fixture(scope="session")
def imports_of() -> Callable[[str, str], list[tuple[int, str]]]:
    """`import_graph.imports`, as a fixture because test directories share code through fixtures only."""
    return imports


@pytest.fixture(scope="session")
def modules(repository: Path) -> dict[str, Path]:
    """Every module under libra/ by dotted name."""
    return module_paths(repository)


@pytest.fixture(scope="session")
def graph(modules: dict[str, Path]) -> dict[str, set[str]]:
    """The modules that each module imports."""
    return import_graph(modules)

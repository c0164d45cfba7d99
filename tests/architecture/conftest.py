"""Reading the imports of a module from its source."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))  # for import_graph and picture

from import_graph import import_graph, imports
from import_graph import modules as module_paths


@pytest.fixture(scope="session")
def imports_of():
    """`import_graph.imports`, as a fixture because test directories share code through fixtures only."""
    return imports


@pytest.fixture(scope="session")
def modules(repository):
    """Every module under libra/ by dotted name."""
    return module_paths(repository)


@pytest.fixture(scope="session")
def graph(modules):
    return import_graph(modules)

"""What docs/security.md claims: the tests that it names exist, and its counts of attacks are those of the programs."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from libra.envs.sandbox import Level
from libra.testing import sandbox_attacks

NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def missing_tests(page: str, root: Path) -> list[str]:
    """Tests that ``page`` names, ``file::function``, and that are not there."""
    missing = []
    for file, name in NAMED.findall(page):
        path = root / file
        nodes = ast.walk(ast.parse(path.read_text())) if path.is_file() else ()
        functions = (node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
        if name not in functions:
            missing.append(f"{file}::{name}")
    return missing


def test_every_test_that_the_page_names_exists(repository: Path) -> None:
    page = (repository / "docs/security.md").read_text()
    assert len(NAMED.findall(page)) > 20
    assert missing_tests(page, repository) == []


def test_a_test_that_is_not_there_is_found(repository: Path) -> None:
    here = "tests/architecture/test_security_page.py"
    page = f"`{here}::missing_tests` `{here}::test_nothing` `tests/nowhere.py::test_x`"
    assert missing_tests(page, repository) == [f"{here}::test_nothing", "tests/nowhere.py::test_x"]


def test_every_row_of_threats_names_a_test_or_says_that_there_is_none(repository: Path) -> None:
    section = (repository / "docs/security.md").read_text().partition("## Threats")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ") and not line.startswith("| threat |")]
    assert len(rows) > 20
    assert [row for row in rows if not NAMED.search(row) and not row.endswith("| none |")] == []


def test_the_counts_of_attacks_are_those_of_the_programs(repository: Path) -> None:
    page = (repository / "docs/security.md").read_text()
    counts = {
        name: list(map(int, found))
        for name, *found in re.findall(r"^\| `?(\w+)`?[^|]* \| (\d+) \| (\d+) \| (\d+) \|$", page, re.M)
    }
    groups = {
        name: getattr(sandbox_attacks, name)
        for name in ("READS", "NETWORK", "PRIVILEGES", "FILES", "USES", "PROCESSES")
    }
    expected = {
        name: [sum(attack.least <= level for attack in attacks.values()) for level in sorted(Level)]
        for name, attacks in (*groups.items(), ("all", sandbox_attacks.ATTACKS))
    }
    assert counts == expected

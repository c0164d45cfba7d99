"""Patterns of hard sentences (docs/contributing.md) in pages and docstrings: their number may only go down."""

import ast
import re

PATTERNS = re.compile(
    r"\bthose of\b|\bthat of\b|\bis told\b|\bsays\b|\bNone:|^\s*(?:What |Of |How )[a-z]|\bis no [a-z]|\ballowed is\b|\bwhatever\b",
    re.MULTILINE,
)
REACHED = 68
LONG_LINES = 960


def texts(repository):
    yield from (path.read_text() for path in [repository / "README.md", *sorted((repository / "docs").glob("*.md"))])
    for path in sorted((repository / "libra").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield ast.get_docstring(node) or ""


def test_sentences_get_no_harder(repository):
    found = sum(len(PATTERNS.findall(text)) for text in texts(repository))
    assert found <= REACHED, f"{found} matches of the patterns"


def test_lines_of_prose_get_no_longer(repository):
    lines = [line for text in texts(repository) for line in text.splitlines() if not line.lstrip().startswith("|")]
    found = sum(len(line) > 100 for line in lines)
    assert found <= LONG_LINES, f"{found} lines of more than 100 characters"

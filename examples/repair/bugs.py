"""Bugs seeded into Python source: one small change each, as people make them.

A bug is a replacement of characters within one line, so the rest of the file stays as it was
written.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import NamedTuple

COMPARISONS = {"<": ("<=",), "<=": ("<",), ">": (">=",), ">=": (">",), "==": ("!=",), "!=": ("==",)}
ARITHMETIC = {"+": ("-",), "-": ("+",), "*": ("+",), "/": ("*",), "//": ("/",), "%": ("//",), "**": ("*",)}
LOGIC = {"and": ("or",), "or": ("and",)}
CALLS = {"min": "max", "max": "min", "any": "all", "all": "any", "upper": "lower", "lower": "upper"}


class Bug(NamedTuple):
    """``old`` at ``column`` of ``line`` (both from 1 and 0, as ast counts, the column in
    characters) becomes ``new``."""

    kind: str
    line: int
    column: int
    old: str
    new: str

    def put_in(self, source: str) -> str:
        """The source with the bug."""
        lines = source.splitlines(keepends=True)
        text = lines[self.line - 1]
        assert text.startswith(self.old, self.column), (self, text)
        lines[self.line - 1] = text[: self.column] + self.new + text[self.column + len(self.old) :]
        return "".join(lines)


def bugs_of(source: str) -> list[Bug]:
    """Every bug that can be put into a source, in the order of places; each leaves a source that
    can be parsed."""
    lines = source.splitlines(keepends=True)
    tree = ast.parse(source)
    inside = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    found = {bug for function in inside for node in ast.walk(function) for bug in _of_node(node, lines)}
    # Python 3.11 gives wrong places for what is inside an f-string.
    placed = [bug for bug in found if lines[bug.line - 1].startswith(bug.old, bug.column)]
    return [bug for bug in sorted(placed, key=lambda bug: bug[1:]) if _parses(bug.put_in(source))]


@lru_cache(maxsize=512)  # questions about one bug are asked again and again
def function_at(source: str, line: int) -> tuple[int, int]:
    """First and last line of the innermost function around a line; (line, line) outside of
    functions."""
    function = _innermost(source, line)
    return (line, line) if function is None else (function.lineno, function.end_lineno or function.lineno)


def code_lines_at(source: str, line: int) -> int:
    """Lines of that function without its docstring."""
    function, (first, last) = _innermost(source, line), function_at(source, line)
    if function is None or ast.get_docstring(function, clean=False) is None:
        return last - first + 1
    said = function.body[0]
    return last - first - ((said.end_lineno or said.lineno) - said.lineno)


def _innermost(source: str, line: int) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    around = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.lineno <= line <= (node.end_lineno or node.lineno)
    ]
    return max(around, key=lambda node: node.lineno, default=None)


def _of_node(node: ast.AST, lines: list[str]) -> Iterator[Bug]:
    if isinstance(node, ast.Compare):
        for left, right in zip([node.left, *node.comparators], node.comparators, strict=False):
            yield from _between("comparison", left, right, COMPARISONS, lines)
    elif isinstance(node, ast.BinOp):
        yield from _between("arithmetic", node.left, node.right, ARITHMETIC, lines)
    elif isinstance(node, ast.BoolOp):
        for left, right in zip(node.values, node.values[1:], strict=False):
            yield from _between("logic", left, right, LOGIC, lines)
    elif isinstance(node, ast.Constant) and type(node.value) is int and node.end_lineno == node.lineno:
        text = _text(node, lines)
        if text.isdigit():
            for near in {node.value + 1, node.value - 1} - {-1}:
                yield Bug("number", node.lineno, _column(node, lines), text, str(near))
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield Bug("truth", node.lineno, _column(node, lines), str(node.value), str(not node.value))
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        if _text(node, lines).startswith("not "):
            yield Bug("negation", node.lineno, _column(node, lines), "not ", "")
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CALLS:
        yield Bug("call", node.lineno, _column(node, lines), node.func.id, CALLS[node.func.id])


def _between(
    kind: str, left: ast.expr, right: ast.expr, swaps: Mapping[str, tuple[str, ...]], lines: list[str]
) -> Iterator[Bug]:
    """Swaps of the operator between two operands on one line."""
    if left.end_lineno != right.lineno or left.end_col_offset is None:
        return
    text = lines[right.lineno - 1]
    raw = text.encode()
    start = len(raw[: left.end_col_offset].decode(errors="ignore"))
    gap = raw[left.end_col_offset : right.col_offset].decode(errors="ignore")
    operator = gap.strip(" ()")
    for new in swaps.get(operator, ()):
        yield Bug(kind, right.lineno, start + gap.index(operator), operator, new)


def _column(node: ast.expr, lines: list[str]) -> int:
    return len(lines[node.lineno - 1].encode()[: node.col_offset].decode(errors="ignore"))


def _text(node: ast.expr, lines: list[str]) -> str:
    end = node.end_col_offset if node.end_lineno == node.lineno else None
    return lines[node.lineno - 1].encode()[node.col_offset : end].decode(errors="ignore")


def _parses(source: str) -> bool:
    try:
        compile(source, "library", "exec")
    except SyntaxError:
        return False
    return True

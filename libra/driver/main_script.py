"""Checks of the program that starts a run, where the run starts worker processes.

A worker process imports the program's file to find what it defines. So the file must exist, and what starts the run must not run
again when it is imported.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from types import FrameType

from libra.errors import ConfigError

_GUARD = 'if __name__ == "__main__":'


def check_main() -> None:
    """ConfigError if worker processes could not import this program, or would start the run again; says what to type.

    A notebook, an interactive interpreter and ``python -c`` have no file, and nothing is imported from them.
    """
    main = sys.modules.get("__main__")
    name = getattr(main, "__file__", None)
    if main is None or name is None or _interactive(main):
        return
    if main.__spec__ is not None and f".{main.__spec__.name}".endswith(".__main__"):
        return  # python -m PACKAGE, or an archive: worker processes leave its __main__ out
    file = Path(name)
    if not file.is_file():
        raise ConfigError(
            f"libra.train: this program is read from {name!r}, not from a file, and worker processes cannot import it; save it as "
            f"a file, e.g. train.py, put {_GUARD} around the call, and type python train.py"
        )
    line = _line_in_main(vars(main))
    if line is not None and not _is_guarded(file, line):
        raise ConfigError(
            f"libra.train: {file}, line {line}: each worker process imports this file and would start the run again; put "
            f"{_GUARD} before the call, and the call under it"
        )


def _interactive(main: object) -> bool:
    return bool(getattr(sys, "ps1", None)) or hasattr(main, "__IPYTHON__") or "get_ipython" in vars(main)


def _line_in_main(names: dict[str, object]) -> int | None:
    """The line that the main module itself is at; None if it is not among the callers, as in another thread."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_globals is names and frame.f_code.co_name == "<module>":
            return frame.f_lineno
        frame = frame.f_back
    return None


def _is_guarded(file: Path, line: int) -> bool:
    """Whether a line is under a condition on ``__name__``, or comes after one that leaves the module."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):  # not Python's own syntax: a runner has translated it
        return True
    for node in ast.walk(tree):
        if not isinstance(node, ast.If) or not _names_module(node.test):
            continue
        if node.lineno <= line <= (node.end_lineno or node.lineno):
            return True
        leaves = isinstance(node.body[-1], ast.Raise | ast.Expr)  # raise SystemExit, or sys.exit()
        if node.lineno < line and leaves and any(isinstance(each, ast.NotEq) for each in ast.walk(node.test)):
            return True
    return False


def _names_module(test: ast.expr) -> bool:
    return any(isinstance(node, ast.Name) and node.id == "__name__" for node in ast.walk(test))

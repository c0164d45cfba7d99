"""``python -m benchmarks NAME [OPTIONS]`` runs one benchmark; without a name it lists all of them."""

from __future__ import annotations

import ast
import sys
from importlib import import_module
from pathlib import Path

from benchmarks import BENCHMARKS


def module_of(name: str) -> str:
    return ".".join(filter(None, ("benchmarks", BENCHMARKS[name], "table" if name == "systems" else name)))


def main() -> None:
    """Run the benchmark that the first argument names, with the others as its options."""
    if len(sys.argv) < 2 or sys.argv[1] not in BENCHMARKS:
        for name in BENCHMARKS:
            path = Path(__file__).parents[1] / (module_of(name).replace(".", "/") + ".py")
            doc = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
            print(f"{name:18s}{' '.join(doc.partition(chr(10) * 2)[0].split())}")
        raise SystemExit("type python -m benchmarks NAME")
    name = sys.argv.pop(1)
    sys.argv[0] = f"python -m benchmarks {name}"
    raise SystemExit(import_module(module_of(name)).main())


if __name__ == "__main__":
    main()

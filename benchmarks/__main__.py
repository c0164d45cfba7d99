"""``python -m benchmarks NAME [OPTIONS]`` runs one benchmark; without a name it lists the files of this directory."""

from __future__ import annotations

import runpy
import sys
from importlib.util import find_spec
from pathlib import Path


def main() -> None:
    """Run the benchmark that the first argument names, with the others as its options."""
    if len(sys.argv) < 2 or find_spec(f"benchmarks.{sys.argv[1]}") is None:
        names = sorted(path.stem for path in Path(__file__).parent.glob("*.py") if not path.stem.startswith("_"))
        raise SystemExit(f"type python -m benchmarks NAME; names: {', '.join(names)}")
    name = sys.argv.pop(1)
    runpy.run_module(f"benchmarks.{name}", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()

"""Which tests catch the planted faults: ``python tests/planted/run.py [--fault NAME] [--all] [--together 1]``, or ``make planted``.

For each fault the working tree is copied, the fault is planted in the copy, and the fast suite runs there until something fails:
first what the fault names, then the rest. Every Python process of it imports the copy, and cannot import the real tree
(``sitecustomize.py``). A failed test counts if it passes in a copy without a fault.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from planted.faults import FAULTS, Fault

REPOSITORY = Path(__file__).resolve().parents[2]
FAST = "not live or core"
LEAST = 18
"""Faults that the fast suite has to catch; the whole suite all."""
MOST_FAILURES = 3
LIMIT_S = 3600
SITE = """
import os, sys
sys.path[:] = [each for each in sys.path if os.path.realpath(each or ".") != {real!r}]
"""


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy of the working tree: its files that git knows or would add."""

    root: Path

    @classmethod
    def make(cls, directory: Path) -> Copy:
        listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
        names = subprocess.run(listed, cwd=REPOSITORY, capture_output=True, check=True, text=True).stdout
        root = directory / "tree"
        for name in filter(None, names.split("\0")):
            if (source := REPOSITORY / name).is_file():  # git also knows those that were just removed
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, root / name)
        (directory / "site").mkdir()
        (directory / "site" / "sitecustomize.py").write_text(SITE.format(real=str(REPOSITORY)))
        copy = cls(root)
        asked = copy.python("-c", "import libra; print(libra.__file__)", cwd=directory)
        assert Path(asked.stdout.strip()).is_relative_to(root), asked
        return copy

    def python(self, *arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        path = os.pathsep.join(map(str, (self.root, self.root.parent / "site")))
        environment = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", "PYTEST_ADDOPTS": ""}
        command, where = [sys.executable, *arguments], cwd or self.root
        how = {"capture_output": True, "text": True, "timeout": LIMIT_S}
        return subprocess.run(command, cwd=where, env=environment, **how)

    def failed(self, *arguments: str) -> list[str]:
        """Run pytest; ids of the tests that failed, or errors of the collection."""
        fixed = (
            "-q", "-p", "no:cacheprovider", "--ignore=tests/planted", "--tb=no", "--durations=0", "--durations-min=999",
        )  # fmt: skip
        done = self.python("-m", "pytest", *fixed, *arguments)
        if done.returncode not in (0, 1, 2, 5):
            raise RuntimeError(f"pytest {' '.join(arguments)}: {done.stdout[-4000:]}{done.stderr[-4000:]}")
        lines = [line for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
        return [line.split(" ", 1)[1].split(" - ")[0] for line in lines]


def caught_by(fault: Fault, healthy: Copy, chosen: list[str], *, only_hinted: bool) -> list[str]:
    """Tests that fail with the fault and pass without it."""
    hinted = [f"tests/{path}" for path in fault.looks_in]
    rest = ["tests", *(f"--ignore={path}" for path in hinted)]
    with tempfile.TemporaryDirectory(prefix="libra-planted-") as directory:
        copy = Copy.make(Path(directory))
        fault.plant(copy.root)
        for paths in [hinted] if only_hinted else [hinted, rest]:
            failed = copy.failed(f"--maxfail={MOST_FAILURES}", *chosen, *paths)
            if failed:
                also_without = healthy.failed(*failed)
                if caught := [name for name in failed if name not in also_without]:
                    return caught
    return []


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [fault.name for fault in FAULTS]
    asked.add_argument("--fault", action="append", choices=names, help="only this one; repeatable")
    asked.add_argument("--all", action="store_true", help="the whole suite")
    asked.add_argument("--hinted", action="store_true", help="only what the fault names: minutes for all of them")
    asked.add_argument("--together", type=int, default=1, metavar="N", help="faults at once")
    given = asked.parse_args()
    faults = [fault for fault in FAULTS if not given.fault or fault.name in given.fault]
    chosen = [] if given.all else ["-m", FAST]
    with tempfile.TemporaryDirectory(prefix="libra-planted-") as directory, ThreadPoolExecutor(given.together) as pool:
        healthy = Copy.make(Path(directory))
        found = pool.map(lambda fault: caught_by(fault, healthy, chosen, only_hinted=given.hinted), faults)
        caught = 0
        for fault, tests in zip(faults, found, strict=True):
            caught += bool(tests)
            print(f"{fault.name:34}{'  '.join(tests) or 'NOT CAUGHT'}", flush=True)
    print(f"caught {caught} of {len(faults)} in the {'whole' if given.all else 'fast'} suite", flush=True)
    most = len(FAULTS) if given.all else LEAST
    sys.exit(caught < min(most, len(faults)))


if __name__ == "__main__":
    main()

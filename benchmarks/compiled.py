"""A benchmark with the simulator and what it asks compiled: the same digits in about a third of the time.

``python -m benchmarks.compiled NAME [OPTIONS]``, e.g. ``python -m benchmarks.compiled pipeline --gpus 16 --json``, copies ``libra``
and ``benchmarks`` into a folder of its own, compiles `MODULES` there with mypyc (which comes with mypy; it takes a C compiler, and
a minute once per state of the code), and runs ``benchmarks.NAME`` from the copy. mypyc only translates: what runs is what stands
in the files. Classes that are compiled cannot be derived from by others, so the benchmark may not do that.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import libra
from libra.errors import ConfigError

MODULES = (
    "libra/hardware/engine_tables.py",
    "libra/hardware/virtual_engine.py",
    "libra/policy/dispatcher.py",
    "libra/policy/engine_loads.py",
    "libra/policy/fifo.py",
    "libra/policy/fleet.py",
    "libra/policy/kv_profile.py",
    "libra/policy/move_price.py",
    "libra/policy/phase_queue.py",
    "benchmarks/systems/streamed_batches.py",
    "libra/policy/turning.py",
    "libra/sim/simulated_trajectory.py",
    "benchmarks/systems/pipeline.py",
    "libra/sim/simulator.py",
)
"""Nearly all of a simulation's time. Forecasts are numpy, and stay as they are."""
MYPY = """[mypy]
ignore_missing_imports = true
follow_imports = silent
[mypy-libra.planner.*,libra.config.*,libra.facts.*,libra.store.*,libra.graph.*,numpy.*,pydantic.*,yaml.*]
follow_imports = skip
follow_imports_for_stubs = true
"""
"""What the modules import is read for its types, where it decides anything; the rest is a hundred times as much code."""


def files_of_code(source: Path) -> list[str]:
    """The files of ``libra`` and ``benchmarks`` that git has, new ones included; ConfigError where there is no checkout."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", "libra", "benchmarks"]
    done = subprocess.run(listed, cwd=source, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ConfigError(f"{source} is no checkout of git; run it from a checkout")
    return sorted(name for name in done.stdout.split("\0") if name and (source / name).is_file())


def built(folder: Path, modules: Sequence[str] = MODULES) -> Path:
    """The copy in ``folder``, compiled now unless it was before; ConfigError says why it cannot be."""
    if (folder / "built").exists():
        return folder
    source = Path(libra.__file__).parents[1]
    if (missing := [name for name in modules if not (source / name).exists()]) or not (source / "benchmarks").exists():
        raise ConfigError(f"{source} has no {', '.join(missing) or 'benchmarks'}; run it from a checkout")
    shutil.rmtree(folder, ignore_errors=True)
    for name in files_of_code(source):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / name, folder / name)
    (folder / "mypy.ini").write_text(MYPY)
    package = folder / "libra" / "__init__.py"
    names = package.read_text()
    package.write_text("")  # its imports for types are all of Libra and torch
    done = subprocess.run([sys.executable, "-m", "mypyc", *modules], cwd=folder, capture_output=True, text=True)
    package.write_text(names)
    if done.returncode:
        said = (done.stdout + done.stderr).strip().splitlines()
        raise ConfigError(
            f"mypyc failed: {' | '.join(said[-3:])}; install mypy and a C compiler, or run the benchmark as it is"
        )
    (folder / "built").touch()
    return folder


def folder_of_code() -> Path:
    """A folder for this state of the code."""
    digest, root = hashlib.sha256(MYPY.encode()), Path(libra.__file__).parents[1]
    for name in files_of_code(root):
        if name.endswith(".py"):
            digest.update((root / name).read_bytes())
    return Path(tempfile.gettempdir()) / f"libra-compiled-{os.getuid()}-{digest.hexdigest()[:16]}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Compile, and become the benchmark."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    names = sorted(path.stem for path in Path(__file__).parent.glob("*.py"))
    if not given or given[0] not in names:
        raise SystemExit(
            f"benchmarks.compiled: got {' '.join(given[:1]) or 'nothing'}; type the name of a benchmark, e.g. pipeline"
        )
    try:
        folder = built(folder_of_code())
    except ConfigError as error:
        raise SystemExit(f"benchmarks.compiled: {error}") from error
    # -P: the working directory, where relative paths of options are, is not searched for modules.
    command = [sys.executable, "-P", "-m", f"benchmarks.{given[0]}", *given[1:]]
    os.execve(sys.executable, command, os.environ | {"PYTHONPATH": str(folder), "PYTHONSAFEPATH": "1"})


if __name__ == "__main__":
    main()

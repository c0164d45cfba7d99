"""Benchmarks with compiled modules: the copy runs the same code, compiled, and says what is missing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.compiled import MODULES, built, folder_of_code, main
from libra.errors import ConfigError

ROOT = Path(__file__).parents[2]
FOUND = """
import libra.sim.agenda as compiled
agenda = compiled.Agenda()
agenda.at(2.0, print, "later")
agenda.advance()
print(compiled.__file__)
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_a_module_is_compiled_once_and_runs_from_the_copy(tmp_path: Path) -> None:
    folder = built(tmp_path / "copy", ("libra/sim/agenda.py",))
    path = os.environ | {"PYTHONPATH": str(folder), "PYTHONSAFEPATH": "1"}
    said = subprocess.run([sys.executable, "-c", FOUND], cwd=ROOT, env=path, capture_output=True, text=True, check=True)
    later, file = said.stdout.splitlines()
    assert later == "later" and file.startswith(str(folder)) and file.endswith(".so")
    assert (folder / "libra" / "__init__.py").read_text() == (ROOT / "libra" / "__init__.py").read_text()
    (folder / "mypy.ini").write_text("not read again")
    assert built(folder, ("libra/sim/agenda.py",)) == folder


def test_what_cannot_be_compiled_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no libra/sim/nothing\.py; run it from a checkout"):
        built(tmp_path / "copy", ("libra/sim/nothing.py",))
    with pytest.raises(SystemExit, match="got pipelin; type the name of a benchmark"):
        main(["pipelin"])
    assert all((ROOT / name).exists() for name in MODULES) and folder_of_code() == folder_of_code()

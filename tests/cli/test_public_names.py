"""The public names of ``libra``, which load nothing until they are used."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import libra

CHECK = """
import sys, libra
assert not {"torch", "dask", "distributed", "transformers"} & set(sys.modules), "import libra loads them"
libra.errors, libra.Environment, libra.tool
assert not {"torch", "dask", "distributed", "transformers"} & set(sys.modules), "an environment does not need them"
assert set(libra.__all__) <= set(dir(libra))
import libra.train.losses
assert callable(libra.train) and callable(libra.Session) and libra.RunSummary
"""


def test_importing_libra_loads_neither_torch_nor_dask(repository: Path) -> None:
    done = subprocess.run([sys.executable, "-c", CHECK], cwd=repository, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_public_names_are_what_they_say() -> None:
    from libra import Environment, errors, tool

    assert (Environment.__module__, tool.__module__) == ("libra.envs.environment", "libra.envs.tool")
    assert issubclass(errors.ConfigError, errors.LibraError)
    with pytest.raises(AttributeError, match="module 'libra' has no attribute 'enviroment'"):
        _ = libra.enviroment

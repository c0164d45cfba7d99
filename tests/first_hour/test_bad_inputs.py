"""What a new user may type wrong: each is one clear answer of at most three lines, before any worker starts."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from bad_inputs import commands, environments, files, models, settings
from bad_inputs.case import BadInput

from libra.cli.main import main

MAX_LINES = 3
OWN_MODULES = ("mine", "broken", "raises", "needs")
TABLES = {
    f"{module.__name__.split('.')[-1]}-{name.lower()}": table
    for module in (settings, files, models, environments, commands)
    for name, table in vars(module).items()
    if isinstance(table, tuple) and table and isinstance(table[0], BadInput)
}
CASES = [
    pytest.param(case, id=f"{name}-{index}-{' '.join(case.arguments)[-60:]}")
    for name, table in TABLES.items()
    for index, case in enumerate(table)
]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty working directory whose modules can be imported, as with PYTHONPATH=."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    handlers = list(logging.getLogger().handlers)
    yield tmp_path
    for name in OWN_MODULES:
        sys.modules.pop(name, None)
    importlib.invalidate_caches()
    logging.getLogger().handlers[:] = handlers  # the command logs to the standard error of its test


@pytest.fixture(autouse=True)
def no_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that reaches its local cluster fails the test."""

    def started(config: Any) -> None:
        raise AssertionError("workers were started")

    monkeypatch.setattr("libra.driver.run_cluster.local_cluster", started)


@pytest.mark.parametrize("case", CASES)
def test_the_answer_names_field_value_and_what_to_type(
    case: BadInput, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _skip_elsewhere(" ".join(case.arguments))
    if case.make is not None:
        case.make(here)
    before = sorted(path.relative_to(here) for path in here.rglob("*"))
    with pytest.raises(SystemExit) as stopped:
        main(list(case.arguments))
    told = capsys.readouterr()
    assert stopped.value.code == 2, told.err
    assert len(told.err.splitlines()) <= MAX_LINES, told.err
    assert "Traceback" not in told.err
    for wanted in (case.field, case.value, case.typed):
        assert wanted in told.err
    assert told.err.startswith("libra: ")
    after = [path.relative_to(here) for path in here.rglob("*") if "__pycache__" not in path.parts]
    assert sorted(after) == before, "a start that fails leaves nothing"


def _skip_elsewhere(words: str) -> None:
    """Skip what this machine answers otherwise."""
    if "reasoning_gym" in words:
        pytest.importorskip("reasoning_gym")
    if "device=cuda" in words or "layout=auto" in words:
        import torch

        if torch.cuda.is_available():
            pytest.skip("this machine has a GPU")


def test_the_tables_hold_two_hundred_inputs_of_every_kind() -> None:
    assert len(CASES) >= 200

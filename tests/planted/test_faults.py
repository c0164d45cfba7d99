"""Every planted fault still has its place in the source: when code moves, the faults move with it."""

import ast

import pytest
from planted.faults import FAULTS


def test_there_are_twenty_faults_of_different_names():
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) == 20


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_can_be_planted_and_leaves_python(fault, repository, tmp_path):
    source, copy = repository / "libra" / fault.file, tmp_path / "libra" / fault.file
    copy.parent.mkdir(parents=True)
    copy.write_text(source.read_text(encoding="utf-8"), encoding="utf-8")
    fault.plant(tmp_path)
    assert ast.dump(ast.parse(copy.read_text(encoding="utf-8"))) != ast.dump(ast.parse(source.read_text("utf-8")))
    assert all((repository / "tests" / path).exists() for path in fault.looks_in)

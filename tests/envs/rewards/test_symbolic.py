import importlib.util
from concurrent.futures import ThreadPoolExecutor

import pytest

from libra.envs.rewards import symbolic
from libra.errors import RewardFault

pytestmark = pytest.mark.live

needs_package = pytest.mark.skipif(
    importlib.util.find_spec("math_verify") is None, reason="math-verify: pip install -e '.[math]'"
)


@needs_package
def test_values_are_compared_from_any_thread():
    pairs = [("\\boxed{50/100}", "0.5"), ("so \\boxed{\\{2,1\\}}", "\\{1,2\\}"), ("Answer: 8", "7")] * 4
    with ThreadPoolExecutor(8) as threads:
        scores = list(threads.map(lambda pair: symbolic.score(*pair), pairs))
    assert scores == [1.0, 1.0, 0.0] * 4
    assert 1 <= len(symbolic._idle) <= symbolic.MAX_PROCESSES


@pytest.fixture
def program(monkeypatch, tmp_path):
    """Puts a program of the test's own in the place of the one that compares, and no process of an earlier test."""

    def put(source):
        path = tmp_path / "program.py"
        path.write_text(source)
        monkeypatch.setattr(symbolic, "_PROGRAM", path)
        monkeypatch.setattr(symbolic, "_idle", [])
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)

    return put


def test_one_that_takes_too_long_is_killed_and_the_next_gets_a_fresh_process(program):
    program(
        "import sys\nfor line in sys.stdin:\n    if 'hang' in line: sys.stdin.read()\n    print('{\"score\": 1.0}', flush=True)\n"
    )
    assert symbolic.score("fine", "1") == 1.0
    (process,) = symbolic._idle
    assert symbolic.score("hang", "1", timeout_s=0.05, timeout_score=-0.5) == -0.5
    assert process.returncode is not None
    assert symbolic._idle == []
    assert symbolic.score("fine", "1") == 1.0
    symbolic._end(symbolic._idle.pop())


def test_a_process_that_dies_is_a_fault_and_not_a_reward(program):
    program("import sys\nsys.stdin.readline()\nsys.exit(3)\n")
    with pytest.raises(RewardFault):
        symbolic.score("a", "b")
    assert symbolic._idle == []

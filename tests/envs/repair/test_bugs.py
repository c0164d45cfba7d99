"""Seeded bugs: each is one small change of the text, and leaves the rest as it was written."""

import ast
import difflib

import pytest

from libra.envs.repair.bugs import bugs_of
from libra.envs.repair.tampering import tampering

SOURCE = '''"""Größe."""

LIMIT = 10


def f(a, b):
    """Text with < and 1."""
    if not a and b >= 10:  # über 9
        return max(a, b) - 1
    return a <  b or "ä" == a


def g(x):
    return (x // 2) ** 3 if x % 2 == 0 else True
'''


def test_every_kind_of_bug_is_found_in_functions_only():
    bugs = bugs_of(SOURCE)
    assert {(bug.kind, bug.old, bug.new) for bug in bugs} >= {
        ("comparison", ">=", ">"), ("comparison", "==", "!="), ("logic", "and", "or"), ("negation", "not ", ""),
        ("call", "max", "min"), ("arithmetic", "-", "+"), ("arithmetic", "**", "*"), ("arithmetic", "%", "//"),
        ("number", "10", "11"), ("truth", "True", "False"),
    }  # fmt: skip
    assert all(bug.line > 6 for bug in bugs)


def test_a_bug_changes_its_place_and_nothing_else():
    for bug in bugs_of(SOURCE):
        broken = bug.put_in(SOURCE)
        changed = [line for line in difflib.ndiff(SOURCE.splitlines(), broken.splitlines()) if line[0] in "+-"]
        assert len(changed) == 2
        assert ast.dump(ast.parse(broken)) != ast.dump(ast.parse(SOURCE))


BEFORE = {"a.py": "import math\n\n\ndef f(x):\n    return math.floor(x)\n"}


@pytest.mark.parametrize(
    "text",
    [
        "import sys\n\n\ndef f(x):\n    return 1\n",
        "import math\n\n\ndef f(x):\n    return __import__('os')\n",
        "import math\n\n\nclass Same:\n    def __eq__(self, other):\n        return True\n\n\ndef f(x):\n    return Same()\n",
        "import math\n\n\ndef f(x):\n    return getattr(math, 'f' + 'loor')(x)\n",
        "import math\n\n\ndef f(x):\n    return ().__class__\n",
        "import math\n\n\ndef f(x):\n    return '{0.__globals__}'.format(f)\n",
        "def f(:\n",
        "import math\ndef f(x):\n    match x:\n        case object(__class__=c):\n            return c\n",
        "import math\ndef f(x):\n    return x.f_builtins\n",
    ],
)
def test_an_edit_that_could_reach_the_tests_is_found(text):
    assert tampering(BEFORE, {"a.py": text}) is not None


def test_plain_edits_and_what_was_there_before_are_none():
    assert tampering(BEFORE, {"a.py": BEFORE["a.py"].replace("floor", "ceil")}) is None
    assert tampering(BEFORE, BEFORE) is None
    assert tampering(BEFORE, {**BEFORE, "b.py": ""}) == "b.py: a new file"

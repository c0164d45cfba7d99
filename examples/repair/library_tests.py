"""Runs a library's own tests; its text is the program inside the sandbox, so it imports the
standard library alone.

Test functions, methods of test classes and of ``unittest.TestCase`` are found by their names. Of
pytest a test may use ``raises``, ``approx`` and ``mark.parametrize``; a test that takes a fixture
is not collected.
"""

# mypy: disallow_untyped_defs=False, disallow_untyped_calls=False, check_untyped_defs=False
from __future__ import annotations

import contextlib
import importlib
import inspect
import itertools
import math
import os
import re
import sys
import traceback
import types
import unittest

MAX_MESSAGE_CHARS = 300


@contextlib.contextmanager
def raises(expected, match=None):
    """pytest.raises, as a context manager."""
    try:
        yield
    except expected as error:
        if match is not None and not re.search(match, str(error)):
            raise AssertionError(f"{match!r} does not match {str(error)!r}") from error
    else:
        raise AssertionError(f"did not raise {expected}")


class approx:
    """pytest.approx of a number."""

    def __init__(self, expected, rel=1e-6, abs=1e-12):
        self.expected, self.rel, self.abs = expected, rel, abs

    def __eq__(self, value):
        return math.isclose(value, self.expected, rel_tol=self.rel, abs_tol=self.abs)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self):
        return f"approx({self.expected})"


class Mark:
    """pytest.mark: cases of parametrize are kept, tests that may be skipped or fail are left out,
    other marks change nothing."""

    def __getattr__(self, name):
        def mark(*given, **options):
            def decorate(test):
                if name == "parametrize":
                    names = given[0].replace(" ", "").split(",") if isinstance(given[0], str) else list(given[0])
                    rows = [dict(zip(names, row if len(names) > 1 else (row,), strict=False)) for row in given[1]]
                    test.cases = [{**a, **b} for a, b in itertools.product(rows, getattr(test, "cases", [{}]))]
                elif name in ("skip", "skipif", "xfail"):
                    test.left_out = True
                return test

            return decorate

        return mark


def _pytest():
    module = types.ModuleType("pytest")
    module.raises, module.approx, module.mark = raises, approx, Mark()
    module.param = lambda *values, **options: values
    return module


def tests_of(module):
    """(name, function without arguments) of each test of a module; what cannot be called without a
    fixture is left out."""
    for name, found in sorted(vars(module).items()):
        if inspect.isclass(found) and issubclass(found, unittest.TestCase):
            for case in unittest.defaultTestLoader.getTestCaseNames(found):
                yield f"{module.__name__}.{name}.{case}", lambda found=found, case=case: _unittest(found(case))
        elif inspect.isclass(found) and name.startswith("Test"):
            for case in sorted(each for each in vars(found) if each.startswith("test")):
                yield from _cases(f"{module.__name__}.{name}.{case}", getattr(found(), case))
        elif inspect.isfunction(found) and name.startswith("test"):
            yield from _cases(f"{module.__name__}.{name}", found)


def _cases(name, test):
    cases = getattr(test, "cases", [{}])
    required = {key for key, each in inspect.signature(test).parameters.items() if each.default is each.empty}
    if getattr(test, "left_out", False) or any(required - set(case) for case in cases):
        return
    for number, case in enumerate(cases):
        yield (name if len(cases) == 1 else f"{name}[{number}]"), lambda case=case: test(**case)


def _unittest(test):
    result = unittest.TestResult()
    test.run(result)
    for _, text in (*result.errors, *result.failures):
        raise AssertionError(text.strip().splitlines()[-1])


def _said(error):
    places = [each for each in traceback.extract_tb(error.__traceback__) if "test" in os.path.basename(each.filename)]  # noqa: PTH119
    place = f" ({os.path.basename(places[-1].filename)}:{places[-1].lineno}: {places[-1].line})" if places else ""  # noqa: PTH119
    return f"{type(error).__name__}: {error}"[:MAX_MESSAGE_CHARS] + place[:MAX_MESSAGE_CHARS]


def run_tests(files, tests):
    """The message of each test by its name, "" if it passed. A module that cannot be imported has
    one entry, of its own name.

    ``files`` and ``tests`` are texts by path below the repository; both are written into the
    working directory.
    """
    root = os.path.abspath("repository")  # noqa: PTH100
    for path, text in {**files, **tests}.items():
        place = os.path.join(root, path)  # noqa: PTH118
        os.makedirs(os.path.dirname(place), exist_ok=True)  # noqa: PTH103, PTH120
        with open(place, "w", encoding="utf-8") as file:  # noqa: PTH123
            file.write(text)
    folders = {os.path.join(root, os.path.dirname(path)) for path in tests}  # noqa: PTH118, PTH120
    sys.path[:0] = [root, os.path.join(root, "src"), *sorted(folders)]  # noqa: PTH118
    sys.modules["pytest"] = _pytest()
    sys.dont_write_bytecode = True
    said = {}
    for path in sorted(tests):
        name = os.path.basename(path)[: -len(".py")]  # noqa: PTH119
        if "test" not in name:
            continue
        try:
            found = list(tests_of(importlib.import_module(name)))
        except Exception as error:  # noqa: BLE001 the library, or its tests, may raise anything
            said[name] = _said(error)
            continue
        for each, test in found:
            try:
                test()
                said[each] = ""
            except Exception as error:  # noqa: BLE001
                said[each] = _said(error)
    return said

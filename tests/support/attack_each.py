"""Attacks on bubblewrap in a process of its own, with the system's Python, which any user may read.

``python tests/support/attack_each.py USER_ID`` writes JSON: why each attack was not contained (null: it was), or
``{"skip": reason}`` where there is no sandbox.
"""

import json
import os
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.live.sandbox_attacks import ATTACKS, containable, why_not_contained
from libra.envs.sandbox import MEGABYTE, Limits, SandboxFailed, Session, confined
from libra.envs.sandbox.confined import can_make_groups

SYSTEM_PYTHON = Path("/usr/bin/python3")
LIMITS = Limits(memory_bytes=256 * MEGABYTE)
AT_ONCE = 6


def use_system_python(folder, supervisor):
    """Let sandboxes run the Python of the distribution, and a supervisor that every user may read; why that cannot be, or None."""
    python = SYSTEM_PYTHON.resolve()
    stdlib = Path("/usr/lib", python.name)
    if not (stdlib / "os.py").is_file():
        return f"no Python for every user in {SYSTEM_PYTHON} and {stdlib}"
    confined.SUPERVISOR = folder / "supervisor.py"
    confined.SUPERVISOR.write_bytes(supervisor)
    confined.interpreter_paths = lambda: (python, stdlib, ())
    return None


def attack_each(secret):
    """Why each attack was not contained, None where it was; side by side, since most of the time is waiting."""
    names = containable(groups=can_make_groups())

    def attack(name):
        with Session(LIMITS) as session:
            return why_not_contained(session, ATTACKS[name], secret)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return dict(zip(names, pool.map(attack, names), strict=True))


def main():
    user = int(sys.argv[1])
    supervisor = confined.SUPERVISOR.read_bytes()
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
        reason = use_system_python(folder, supervisor)
        if reason is None:
            try:
                Session(LIMITS).close()
            except SandboxFailed as error:
                reason = str(error)
        sys.stdout.write(json.dumps({"skip": reason} if reason else attack_each(secret)))


if __name__ == "__main__":
    main()

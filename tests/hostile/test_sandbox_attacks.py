"""Programs that attack their sandbox: what each comes to, and that the next program runs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from attack_each import LIMITS, attack_each

from benchmarks.live.sandbox_attacks import ATTACKS, Attack, why_not_contained
from libra.envs.sandbox import Session

pytestmark = [pytest.mark.live, pytest.mark.usefixtures("needs_sandbox")]

ORDINARY_USER = 61_000
"""An id that no account has."""
STRONGEST = ("reads it through /proc", "listens", "makes a user namespace", "forks without end", "kills its supervisor")
"""One of each kind: files, network, privileges, resources, other processes."""


@pytest.fixture(name="secret", scope="module")
def _secret(tmp_path_factory):
    path = tmp_path_factory.mktemp("host") / "secret"
    path.write_text("what no program may read")
    path.chmod(0o600)
    return path


@pytest.mark.core
@pytest.mark.parametrize("name", STRONGEST)
def test_the_strongest_attack_of_each_kind_is_contained(name, secret):
    with Session(LIMITS) as session:
        assert why_not_contained(session, ATTACKS[name], secret) is None


def test_every_attack_is_contained(secret):
    found = attack_each(secret)
    assert found and {attack: why for attack, why in found.items() if why is not None} == {}


def test_every_attack_is_contained_for_an_ordinary_user():
    if os.geteuid() != 0:
        pytest.skip("type sudo: only root can be another user")
    script = str(Path(__file__).parents[1] / "support/attack_each.py")
    words = [sys.executable, script, str(ORDINARY_USER)]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, timeout=300, check=True)
    found = json.loads(done.stdout)
    if "skip" in found:
        pytest.skip(found["skip"])
    assert found and {attack: why for attack, why in found.items() if why is not None} == {}


def test_an_attack_that_succeeds_is_seen(secret):
    with Session(LIMITS) as session:
        assert "it succeeded" in (why_not_contained(session, Attack("print('BREACH')", "ended"), secret) or "")
        assert "it was ended" in (why_not_contained(session, Attack("pass", "refused"), secret) or "")

"""Programs that attack their sandbox, at every level that is to be had here: what each comes to, and that the next program runs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from attack_each import LIMITS, attack_each

from libra.envs.sandbox import Level, Session
from libra.testing.sandbox_attacks import ATTACKS, Attack, contained_at, why_not_contained

pytestmark = pytest.mark.live

ORDINARY_USER = 61_000
"""An id that no account has."""
ELSEWHERE = {
    "bubblewrap as an ordinary user": ("bubblewrap", ORDINARY_USER),
    "landlock": ("landlock", 0),
    "rlimits": ("rlimits", 0),
}
"""Levels that are tried by a process of their own, with its user; as root it gives programs a user of their own."""
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
def test_the_strongest_attack_of_each_kind_is_contained(name, sandbox_level, secret):
    with Session(sandbox_level, LIMITS) as session:
        assert why_not_contained(session, ATTACKS[name], secret) is None


def test_the_best_level_here_contains_what_it_has_to(sandbox_level, secret):
    found = attack_each(sandbox_level, secret)
    assert found and {attack: why for attack, why in found.items() if why is not None} == {}


@pytest.fixture(name="elsewhere", scope="module")
def _elsewhere():
    """Begun at once, since most of their time is waiting."""
    if os.geteuid() != 0:
        pytest.skip("type sudo: only root gives programs a user of their own, and can be another user itself")
    script = str(Path(__file__).parents[1] / "support/attack_each.py")
    begun = {
        name: subprocess.Popen([sys.executable, script, level, str(user)], stdout=subprocess.PIPE, text=True)
        for name, (level, user) in ELSEWHERE.items()
    }
    yield begun
    for process in begun.values():
        process.kill()
        process.communicate()


@pytest.mark.parametrize("name", ELSEWHERE)
def test_each_level_contains_what_it_has_to(elsewhere, name):
    output, _ = elsewhere[name].communicate(timeout=300)
    assert elsewhere[name].returncode == 0
    found = json.loads(output)
    if "skip" in found:
        pytest.skip(found["skip"])
    assert found and {attack: why for attack, why in found.items() if why is not None} == {}


def test_an_attack_that_succeeds_is_seen(sandbox_level, secret):
    with Session(sandbox_level, LIMITS) as session:
        assert "it succeeded" in (why_not_contained(session, Attack("print('BREACH')", "ended"), secret) or "")
        assert "it was ended" in (why_not_contained(session, Attack("pass", "refused"), secret) or "")


def test_a_better_level_contains_all_that_a_worse_one_does_and_more():
    rlimits, landlock, bubblewrap = (set(contained_at(level, groups=True)) for level in sorted(Level))
    assert rlimits < landlock < bubblewrap == set(ATTACKS)

"""``libra roles`` before it reaches a scheduler: what may be typed, and runs that cannot be asked."""

import json

import pytest

from libra.cli.clusters import assignments, table
from libra.cli.main import main
from libra.cluster.connection import FILE, RunContact, forget
from libra.errors import ConfigError


def _fails(capsys, *arguments):
    with pytest.raises(SystemExit) as stopped:
        main(["roles", *arguments])
    told = capsys.readouterr()
    assert stopped.value.code == 2
    assert "Traceback" not in told.err
    return told.err


def test_words_become_assignments():
    asked = assignments(["rollout-0=rollout:tp2", "rollout-1=lent", "rollout-2=train", "rollout-3=rollout"])
    roles = [{"role": "rollout", "tp": 2}, {"role": "lent"}, {"role": "train"}, {"role": "rollout"}]
    assert asked == {f"rollout-{number}": role for number, role in enumerate(roles)}


@pytest.mark.parametrize(
    "word", ["rollout-0", "rollout-0=", "=train", "rollout-0=trains", "rollout-0=train:tp2", "a=rollout:tp0"]
)
def test_another_word_is_refused_with_one_that_would_do(word):
    with pytest.raises(ConfigError):
        assignments([word])


def test_a_run_that_cannot_be_asked_says_what_to_type(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("libra.cluster.connection.CONNECT_TIMEOUT_S", 1)
    run = tmp_path / "demo"
    run.mkdir()
    assert "no run here" in _fails(capsys, str(run))
    (run / "config.resolved.yaml").write_text("run: {name: demo}\n")
    assert f"libra resume {run}" in _fails(capsys, str(run))
    RunContact("demo", 0, "tcp://127.0.0.1:9", 1).write(run)  # of a driver that was killed
    assert (run / FILE).stat().st_mode & 0o777 == 0o600
    told = _fails(capsys, str(run))
    assert f"no scheduler answers at tcp://127.0.0.1:9; type libra resume {run}" in told
    assert len(told.strip().splitlines()) == 1
    (run / FILE).write_text(json.dumps({"run": "demo"}))
    assert FILE in _fails(capsys, str(run))
    forget(run)
    forget(run)
    assert not (run / FILE).exists()


def test_the_table_has_a_line_for_each_worker():
    row = {"worker": "rollout-0", "role": "train", "tp": 1, "stage": "draining"}
    row |= {"for_s": 2.345, "generation": 3, "seconds": None}
    head, line = table([row])
    assert head.split() == ["worker", "role", "tp", "stage", "for_s", "generation", "seconds", "reason"]
    assert line.split() == ["rollout-0", "train", "1", "draining", "2.3", "3", "-", "-"]
    assert "cluster.hybrid_workers=1" in table([])[0]

"""A small run that finished, the same run stopped before its last step, and copies of that to damage; both are made once."""

import json
import shutil

import pytest

import factories
import libra.driver.submitted_graphs
from damaged_run import ITERATIONS, copy_of, set_committed
from libra.config import config_from_dict
from libra.driver.run_session import run as run_graphs
from libra.store.run_files import check_run


@pytest.fixture(scope="session")
def finished(tmp_path_factory, random_model, client):
    """A finished run that kept its journals and every group record."""
    directory = tmp_path_factory.mktemp("damage")
    sections = {"run": {"iterations": ITERATIONS}, "evaluation": {"prompts": 2, "every": 2}}
    sections |= {"checkpoint": {"every": 1, "keep": 3}, "store": {"keep_journals": True}}
    config = config_from_dict(factories.run_settings(directory / "finished", random_model, **sections))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(libra.driver.submitted_graphs, "prune_groups", lambda spec, first, before: before)
        run_graphs(config, client=client)
    return directory / "finished" / "demo"


@pytest.fixture(scope="session")
def stopped(finished):
    """The run when batch 3 was committed, its step not taken, and nothing of it stored."""
    run = copy_of(finished, finished.parent.parent / "stopped" / "demo")
    last = ITERATIONS - 1
    set_committed(run, last - 1)
    for name in (f"checkpoints/step-{ITERATIONS:06d}", f"weights/{ITERATIONS:08d}"):
        shutil.rmtree(run / name)
    for name in ("evaluations", "groups", "journal", "steps"):
        for path in (run / name).iterdir():
            if path.name.startswith((f"version-{ITERATIONS:06d}", f"eval-{ITERATIONS:06d}", f"eval-{ITERATIONS}-")):
                path.unlink()
    (run / "steps" / f"step-{last:06d}.json").unlink()
    best = run / "checkpoints" / "best"
    if best.is_symlink() and not best.exists():
        best.unlink()
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(line for line in lines if json.loads(line)["step"] < last))
    assert check_run(run).damages == []
    return run


@pytest.fixture
def run(stopped, tmp_path, monkeypatch):
    """A copy of the stopped run, to damage; no worker changes it, so that it is read again at once."""
    monkeypatch.setattr("libra.driver.damage.RECHECK_S", 0.0)
    return copy_of(stopped, tmp_path / "demo")

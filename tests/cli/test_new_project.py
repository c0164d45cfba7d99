"""``libra init``: its project runs, its test passes, and it never overwrites a file."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from libra.cli.projects import make_project
from libra.errors import ConfigError


def environment_of(repository):
    return {**os.environ, "PYTHONPATH": str(repository), "OMP_NUM_THREADS": "1"}


@pytest.mark.live
@pytest.mark.timeout(900)
def test_its_run_and_its_test_pass(repository, tmp_path):
    """``-P`` leaves the working directory out of the search for modules, as the command ``libra`` does."""
    libra = [sys.executable, "-P", "-m", "libra"]
    how = {"env": environment_of(repository), "capture_output": True, "text": True}
    made = subprocess.run([*libra, "init", "first"], cwd=tmp_path, **how)
    assert made.returncode == 0, made.stderr
    assert "cd first && libra run config.yaml" in made.stdout
    smaller = ["run.iterations=1", "run.name=one", "evaluation.prompts=0", "trainer.prompts=2", "trainer.group_size=2"]
    for command in (
        [*libra, "run", "config.yaml", "cluster.dashboard_port=0", *smaller],
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
    ):
        done = subprocess.run(command, cwd=tmp_path / "first", **how)
        assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    assert (tmp_path / "first" / "runs" / "one" / "trajectories.zarr").is_dir()


def test_files_that_are_there_stay(tmp_path):
    (tmp_path / "config.yaml").write_text("mine")
    with pytest.raises(ConfigError, match="config"):
        make_project(tmp_path)
    assert (tmp_path / "config.yaml").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]


@pytest.mark.live
@pytest.mark.parametrize("name", ["a; touch b", "it's", "-n"])
def test_what_it_says_to_type_enters_a_directory_of_any_name(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    entered = make_project(Path(name))[1].partition("type: ")[2].partition(" && ")[0]
    shell = subprocess.run(["sh", "-c", f"{entered} && pwd"], capture_output=True, text=True, check=False)
    assert shell.stdout.strip() == str(tmp_path / name), shell.stderr
    assert [path.name for path in tmp_path.iterdir()] == [name]

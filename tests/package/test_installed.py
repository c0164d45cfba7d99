"""What is published works without a checkout: the sdist, the wheel built from it, and an environment with that wheel alone."""

import json
import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
import yaml

pytestmark = pytest.mark.install

CHECKOUT = Path(__file__).resolve().parents[2]


def output_of(command, directory):
    """What a program prints that runs in ``directory``, without this environment's variables for Python."""
    ours = ("PYTHON", "LIBRA", "VIRTUAL")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    environment["OMP_NUM_THREADS"] = "1"
    done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
    return done.stdout


@pytest.fixture(name="sdist", scope="module")
def _sdist(tmp_path_factory):
    pytest.importorskip("hatchling", reason="the package is built with hatchling: pip install hatchling")
    place = tmp_path_factory.mktemp("sdist")
    output_of([sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", str(place)], CHECKOUT)
    (path,) = place.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        archive.extractall(place, filter="data")
    return next(path for path in place.iterdir() if path.is_dir())


@pytest.fixture(name="wheel", scope="module")
def _wheel(sdist, tmp_path_factory):
    place = tmp_path_factory.mktemp("wheel")
    output_of([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(place)], sdist)
    (path,) = place.glob("*.whl")
    return path


@pytest.fixture(name="installed", scope="module")
def _installed(wheel, tmp_path_factory):
    """Directory of programs of an environment that has the wheel, and Libra's dependencies from this environment."""
    place = tmp_path_factory.mktemp("installed") / "venv"
    venv.create(place, with_pip=False)
    python = place / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check"]
    output_of([*pip, "install", "-q", "--no-deps", "--no-index", str(wheel)], place)
    (site,) = (place / "lib").glob("python*/site-packages")
    # Packages of that directory are found; its .pth files, such as that of an editable Libra, are not read.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    return place / "bin"


def test_the_sdist_has_all_that_its_own_tests_and_commands_need(sdist):
    for name in ("Makefile", "README.md", "LICENSE", "constraints.txt", "tests/conftest.py", "docs/configuration.md"):
        assert (sdist / name).read_bytes() == (CHECKOUT / name).read_bytes(), name
    folders = ("libra", "tests", "docs", "benchmarks", "workflows", "configs", "examples", "docker", "requirements")
    assert not {f for f in folders if not any((sdist / f).iterdir())}


def test_the_wheel_has_every_module_and_file_of_the_package_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        shipped = {name for name in archive.namelist() if ".dist-info/" not in name}
    files = [p for p in (CHECKOUT / "libra").rglob("*") if p.is_file() and "__pycache__" not in p.parts]
    package = {str(p.relative_to(CHECKOUT)) for p in files}
    configs = {f"libra/assets/configs/{p.name}" for p in (CHECKOUT / "configs").iterdir()}
    assert shipped == package | configs
    parts = {path.stem: yaml.safe_load(path.read_text()) for path in (CHECKOUT / "configs").glob("*.yaml")}
    named = [each.get("environment", {}).get("name", "") for each in parts.values()]
    assert not [name for name in named if name.startswith("examples.")], "the wheel does not have examples/"


def test_an_installed_libra_is_the_wheels_and_runs_what_it_ships(installed, tmp_path):
    where = "import libra, json; print(json.dumps([libra.__file__, libra.__version__]))"
    file, version = json.loads(output_of([str(installed / "python"), "-c", where], tmp_path))
    assert Path(file).is_relative_to(installed.parent)
    assert output_of([str(installed / "libra"), "--version"], tmp_path).split()[-1] == version

    settings = ["run.iterations=1", "trainer.prompts=2", "trainer.group_size=2", "evaluation.prompts=0"]
    settings.append("cluster.dashboard_port=0")
    settings = [*settings, f"run.dir={tmp_path}", "run.name=first"]
    output_of([str(installed / "libra"), "run", "libra/quickstart", *settings], tmp_path)
    shown = output_of([str(installed / "libra"), "inspect", str(tmp_path / "first")], tmp_path)
    assert "trajectory  train-0-0-0  (1 of 4" in shown

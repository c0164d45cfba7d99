"""The command line: what it prints, to which stream, and its exit codes."""

import json
import os
import socket
import subprocess
import sys
from datetime import datetime
from types import SimpleNamespace

import pytest

from libra.cli.main import installed_version, main
from libra.cli.run import made_run_name
from libra.config import load_config
from libra.errors import ConfigError
from libra.keys import check_run_name


@pytest.fixture
def ran(monkeypatch, tmp_path):
    """Configurations that reach the driver, which is replaced."""
    seen = []

    def driver_run(config, *, resume, **begun):
        seen.append(config)
        calm = {"reward": 0.1, "trajectories": 8, "failures": 0, "left_out": 0, "failures/engine": 0, "resampled": 0}
        rough = {"failures": 1, "left_out": 1, "failures/tool": 1, "resampled": 2, "resampled/tool": 2}
        evaluations = [
            {"reward": 0.25, "num": 4, "failures": 0, "left_out": 0, "bins": {"1": [0.5, 2], "2": [0.0, 2]}},
            {"reward": 0.75, "num": 4, "failures": 2, "left_out": 1, "bins": {"1": [1.0, 2], "2": [0.5, 1]}},
        ]
        return SimpleNamespace(
            run=config.run.name, directory=tmp_path / "the run", iterations=[calm, calm | rough], evaluations=evaluations,
            reward_before=0.25, reward_after=0.75, checkpoint=None, best=None, wall_s=75.0,
        )  # fmt: skip

    monkeypatch.setattr("libra.driver.run_session.run", driver_run)
    return seen


CHECK = """
import sys, libra
assert not {"torch", "dask", "distributed", "transformers"} & set(sys.modules), "import libra loads them"
libra.errors, libra.Environment, libra.tool
assert not {"torch", "dask", "distributed", "transformers"} & set(sys.modules), "an environment does not need them"
assert set(libra.__all__) <= set(dir(libra))
import libra.train.losses
assert callable(libra.train) and callable(libra.Session) and libra.RunSummary
"""


@pytest.mark.live
def test_importing_libra_and_its_command_loads_nothing_heavy():
    heavy = "'torch', 'dask', 'distributed', 'transformers', 'zarr', 'pydantic', 'numpy', 'rich', 'bokeh'"
    command = f"import sys, libra.cli.main; assert not [name for name in ({heavy}) if name in sys.modules]"
    for code in (command, CHECK):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


EARLY = """
import sys
from libra.cli.main import main
try:
    main(["run", "libra/quickstart", *sys.argv[1:]])
except SystemExit as stopped:
    assert stopped.code == 2 and not {"torch", "dask", "transformers"} & set(sys.modules)
"""


@pytest.mark.live
@pytest.mark.parametrize(("typed", "field"), [
    (["model.path=/nowhere"], "model.path"), (["environment.name=tool_arithmetik"], "environment.name"),
    (["environment.name=nowhere:Env"], "environment.name"), (["run.dir=.", "run.name=taken"], "run.dir/run.name"),
    (["environment.name=jsonl", "environment.args={path: /nowhere, reward: gsm8k}"], "environment.args.path"),
    (["--scheduler", "tls://127.0.0.1:1"], "cluster.scheduler"),
])  # fmt: skip
def test_wrong_names_and_paths_are_refused_before_torch_is_imported(typed, field, tmp_path):
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    done = subprocess.run([sys.executable, "-c", EARLY, *typed], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0 and f"libra: {field}: " in done.stderr, done.stderr


def test_version_is_that_of_the_package(libra):
    assert libra("--version")[:2] == (0, f"libra, version {installed_version()}\n")


def test_config_prints_what_reads_back(libra, tmp_path):
    code, out, err = libra("config", "libra/quickstart", "run.seed=7", "trainer.lr=1e-5")
    assert (code, err) == (0, "")
    (tmp_path / "resolved.yaml").write_text(out)
    assert load_config(tmp_path / "resolved.yaml") == load_config("libra/quickstart", ["run.seed=7", "trainer.lr=1e-5"])


def test_the_traceback_is_there_for_who_asks(monkeypatch):
    monkeypatch.setenv("LIBRA_TRACEBACK", "1")
    with pytest.raises(ConfigError):
        main(["config", "nowhere.yaml"])


def test_run_hands_the_configuration_to_the_driver(libra, ran):
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"tls://127.0.0.1:{listening.getsockname()[1]}"
        code, _, _ = libra("run", "libra/quickstart", "run.name=mine", "run.seed=3", "--scheduler", address)
    assert code == 0
    assert ran == [load_config("libra/quickstart", ["run.name=mine", "run.seed=3", f"cluster.scheduler='{address}'"])]


def test_run_from_a_checkpoint_is_a_setting_that_the_run_directory_keeps(libra, ran, tmp_path):
    assert libra("run", "libra/quickstart", "run.name=mine", "--from", f"{tmp_path}/best")[0] == 0
    assert ran == [load_config("libra/quickstart", ["run.name=mine", f"run.from_checkpoint={tmp_path}/best"])]
    assert ran[0].run.from_checkpoint == tmp_path / "best"


def test_run_makes_a_name_from_the_file_and_the_time(libra, ran):
    assert libra("run", "libra/quickstart")[0] == 0
    name = ran[0].run.name
    assert name is not None
    assert name.startswith("quickstart_")
    assert check_run_name(name) == name


@pytest.mark.parametrize("config", ["a b.yaml", "x/-.yaml", "libra/quick-start", "é.yaml", f"{'y' * 80}.yaml"])
def test_a_made_name_always_fits_a_key(config):
    name = made_run_name(config, datetime(2026, 1, 31, 14, 25, 1))
    assert check_run_name(name).endswith("_0131_142501")


def test_run_closes_with_rewards_directory_and_what_to_type(libra, ran, tmp_path):
    _, out, _ = libra("run", "libra/quickstart")
    assert "1 min 15 s" in out and "0.250 before, 0.750 after (+0.500)" in out
    assert "1: 0.50 -> 1.00, 2: 0.00 -> 0.50" in out
    assert "tool 3: 2 tried again, 1 of 16" in out
    assert all(f"libra {command} '{tmp_path}/the run'" in out for command in ("report", "page", "inspect"))
    assert "libra/tiny-arithmetic (0.5 M parameters, made for arithmetic with a calculator" in out
    assert "tensorboard --logdir" in out
    assert "tensorboard" not in libra("run", "libra/quickstart", "observe.trackers=[]")[1]


def test_an_interrupted_run_is_exit_code_130(libra, monkeypatch):
    def interrupted(config, *, resume, **begun):
        raise KeyboardInterrupt

    monkeypatch.setattr("libra.driver.run_session.run", interrupted)
    code, _, err = libra("run", "libra/quickstart")
    assert code == 130
    assert "interrupted" in err


@pytest.mark.live
def test_a_reader_that_stops_reading_gets_no_traceback(repository):
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as nobody:
        command = [sys.executable, "-m", "libra", "config", "libra/quickstart"]
        done = subprocess.run(command, stdout=nobody, stderr=subprocess.PIPE, text=True, cwd=repository)
    assert done.stderr == ""


@pytest.mark.live
def test_doctor_of_a_sound_machine_ends_well(libra):
    code, out, _ = libra("doctor", "libra/quickstart", "cluster.dashboard_port=0", "cluster.threads=1", "--json")
    checks = json.loads(out)
    assert {check["name"] for check in checks} >= {"Python", "packages", "model", "environment", "dashboard port"}
    assert [check for check in checks if check["state"] == "fail"] == []
    assert code == 0


@pytest.mark.live
def test_doctor_fails_on_what_would_fail_a_run(libra):
    code, out, _ = libra("doctor", "libra/quickstart", "model.path=./gone", "cluster.dashboard_port=0")
    assert code == 1
    assert "./gone" in out and "type: model.path=libra/tiny-arithmetic" in out

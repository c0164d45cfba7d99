"""`libra doctor CONFIG` says in a line each what a run's start would refuse, in the words of that start."""

import json
import shutil
from contextlib import ExitStack

import pytest
from click.testing import CliRunner

from libra.cli.doctor import start_checks
from libra.cli.doctor_checks import environment_check
from libra.cli.main import cli
from libra.driver.run_start import RunRequest, prepare
from libra.errors import LibraError


def failed(config):
    """What fails, by its name: detail and advice."""
    _, environment = environment_check(config)
    found = [check for check in start_checks(config, environment, local_cluster=True) if check.state == "fail"]
    return {check.name: "; type ".join(filter(None, (check.detail, check.advice))) for check in found}


def refused(config):
    with ExitStack() as exits, ExitStack() as start, pytest.raises(LibraError) as caught:
        prepare(RunRequest(config), exits, start)
    return " ".join(str(caught.value).split())


def test_a_sound_configuration_passes(make_config):
    assert failed(make_config()) == {}


@pytest.mark.parametrize(("name", "sections"), [
    ("own parts", {"trainer": {"loss": "own_loss:cosine"}}),
    ("own parts", {"model": {"loader": "own_loss:cosine"}}),
    ("own parts", {"policy": {"name": "own_loss:cosine"}}),
    ("engine", {"rollout": {"engine": "own_engine:RemembersGreedy", "tp": 2}}),
    ("agent", {"agent": {"command": "python agent.py", "env": ["NOT_SET_HERE"]}, "rollout": {"ignore_eos": False}}),
    ("services", {"services": {"named": {"judge": {"model": "nowhere/at_all/here"}}}}),
    ("teacher", {"trainer": {"algorithm": "opd"}, "distil": {"teacher": "nowhere/at_all/here"}}),
    ("data", {"rollout": {"max_context_tokens": 10**7}, "trainer": {"micro_batch_tokens": 10**7}}),
    ("data", {"rollout": {"max_new_tokens": 1, "max_context_tokens": 2}}),
])  # fmt: skip
def test_what_a_start_refuses_is_a_failed_check(make_config, name, sections, monkeypatch):
    monkeypatch.setattr("libra.driver.run_start.check_main", lambda: None)
    config = make_config(**sections)
    (found,) = failed(config).items()
    assert found[0] == name
    assert found[1].replace("; type ", "; ") == refused(config).replace("; type ", "; ")


def test_a_damaged_model_and_a_taken_directory_are_named_with_what_to_type(make_config, random_model, tmp_path):
    cut = shutil.copytree(random_model, tmp_path / "cut")
    weights = cut / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    config = make_config(model={"path": str(cut)})
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "mine").write_text("")
    found = failed(config)
    assert set(found) == {"model files", "run name"}
    assert "model.safetensors: it is cut" in found["model files"] and "fetch it again" in found["model files"]
    assert "libra resume" in found["run name"] or "run.name=" in found["run name"]


def test_the_command_exits_with_1(random_model):
    arguments = ["doctor", "libra/quickstart", "model.loader=own_loss:cosine", "--json"]
    told = CliRunner().invoke(cli, arguments)
    assert told.exit_code == 1
    (check,) = (check for check in json.loads(told.output) if check["state"] == "fail")
    assert (check["name"], check["detail"]) == (
        "own parts", "model.loader: 'own_loss:cosine' has no method model(directory, dtype=..., attention=...)",
    )  # fmt: skip

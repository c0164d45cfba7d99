"""Dask's settings: stock ones are found wanting, Libra's are not, and the file says the same as the code."""

import dask.config
import distributed.scheduler
import distributed.worker_state_machine
import pytest
import yaml
from dask.utils import key_split
from distributed import Client, LocalCluster

from libra.cluster.local import preloads
from libra.cluster.settings import (
    DASK_SETTINGS,
    GUARD,
    KEPT_KEYS,
    SETTINGS,
    bound_key_cache,
    check_settings,
    cluster_setting_problems,
    settings_yaml,
)


def stock():
    """The settings Dask comes with, whatever this machine or an earlier test set."""
    config = {}
    dask.config.refresh(config=config, paths=[], env={})
    return config


def tree(**values):
    """Dask's configuration with Libra's settings, some of them changed (by the last part of their key)."""
    config = stock()
    dask.config.set(DASK_SETTINGS, config=config)
    for name, value in values.items():
        (key,) = (setting.key for setting in SETTINGS if setting.key.endswith(f".{name.replace('_', '-')}"))
        dask.config.set({key: value}, config=config)
    return config


def keys(process, in_force):
    return {problem.setting.key.removeprefix("distributed.") for problem in check_settings(in_force, process)}


def test_stock_settings_are_found_wanting_and_libras_are_not():
    assert "scheduler.work-stealing" in keys("scheduler", stock())
    assert {"worker.daemon", "worker.memory.spill", "worker.memory.pause"} <= keys("worker", stock())
    assert keys("scheduler", tree()) | keys("worker", tree()) == set()
    problems = check_settings({}, "worker")
    assert {problem.got for problem in problems} == {"not set"}
    assert len(problems) == sum(setting.process == "worker" for setting in SETTINGS)
    for value in ("30s", "10 minutes", 60, None):
        assert keys("scheduler", tree(worker_ttl=value)) == set()
    for value in ("5s", 29.9, "soon", True):
        assert keys("scheduler", tree(worker_ttl=value)) == {"scheduler.worker-ttl"}


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.key)
def test_every_setting_is_checked_in_its_process_and_explained(setting):
    wrongs = {False: True, None: "10s", "120s": "5s", 1.0: 1.5, 3: 1, 10_000: 10_001, 100: None, 600: 601}
    wrongs |= {"100ms": "20ms", "1s": "500ms"}
    changed = tree()
    dask.config.set({setting.key: wrongs[setting.value]}, config=changed)
    (problem,) = check_settings(changed, setting.process)
    assert problem.setting == setting
    assert setting.reason in problem.message
    assert "DASK_CONFIG" in problem.message
    other = "worker" if setting.process == "scheduler" else "scheduler"
    assert check_settings(changed, other) == ()


def test_dask_reads_the_file_as_the_settings():
    from_file = {}
    dask.config.update(from_file, yaml.safe_load(settings_yaml()))
    assert {key: dask.config.get(key, config=from_file) for key in DASK_SETTINGS} == DASK_SETTINGS


def test_a_running_cluster_is_asked_for_what_is_in_force_there():
    with (
        dask.config.set(DASK_SETTINGS),
        LocalCluster(n_workers=2, processes=False, threads_per_worker=1, dashboard_address=":0") as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        assert cluster_setting_problems(client) == ()
        with dask.config.set({"distributed.scheduler.work-stealing": True, "distributed.worker.daemon": True}):
            found = [problem.setting.key for problem in cluster_setting_problems(client)]
        assert found == ["distributed.scheduler.work-stealing", "distributed.worker.daemon"]


@pytest.mark.parametrize(
    ("configured", "expected"), [([], []), ("mine.py", ["mine.py"]), (["mine.py", GUARD], ["mine.py"])]
)
def test_preloads_of_the_users_settings_are_loaded_beside_ours(configured, expected):
    with dask.config.set({"distributed.worker.preload": configured}):
        assert preloads("worker") == [GUARD, *expected]


def test_the_cache_that_scheduler_and_workers_fill_is_emptied_when_it_is_large():
    assert distributed.scheduler.key_split is distributed.worker_state_machine.key_split is key_split
    key_split.cache_clear()
    for number in range(KEPT_KEYS):
        distributed.scheduler.key_split(f"trajectory-train-{number}-0-0-e0-demo")
    bound_key_cache()
    assert key_split.cache_info().currsize == KEPT_KEYS
    distributed.scheduler.key_split("one more")
    bound_key_cache()
    assert key_split.cache_info().currsize == 0

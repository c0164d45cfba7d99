"""`libra doctor --scheduler`: what a cluster lacks."""

import dask.config
import pytest
from distributed import LocalCluster

from libra.cli import doctor_checks as checks
from libra.cluster.settings import DASK_SETTINGS
from libra.config import config_from_dict


def versions(**changed):
    packages = {"python": "3.11.7", "dask": "1", "distributed": "1", "torch": "2.13.0"}
    same, other = {"packages": packages}, {"packages": packages | changed}
    return {"client": same, "scheduler": same, "workers": {"tcp://a": same, "tcp://b": other}}


def worker(name, nthreads, **resources):
    return {"name": name, "nthreads": nthreads, "resources": resources}


WORKERS = {
    "tcp://r": worker("rollout-0", 72, ROLLOUT=64),
    "tcp://t": worker("tool-0", 72, TOOL=64, GRADE=4, COMMIT=1),
    "tcp://g": worker("train-0", 9, TRAIN=1),
}


def test_a_worker_with_another_version_is_named():
    (check,) = checks.version_checks(versions(torch="2.12.0"))
    assert (check.name, check.state) == ("versions of torch", "fail")
    assert "2.12.0 on tcp://b" in check.detail
    assert "constraints.txt" in check.advice


@pytest.mark.parametrize("role", ["tcp://r", "tcp://t", "tcp://g"])
def test_a_missing_role_says_how_to_start_it(role):
    found = list(checks.role_checks({k: v for k, v in WORKERS.items() if k != role}, "tcp://s"))
    missing = WORKERS[role]["resources"]
    assert len(found) == len(missing)
    for check, resource in zip(found, missing, strict=True):
        assert check.state == "fail"
        assert resource in check.detail
        assert check.advice.startswith("dask worker tcp://s ")


def test_a_stock_cluster_is_told_what_it_lacks():
    with (
        dask.config.set(DASK_SETTINGS | {"distributed.scheduler.work-stealing": True}),
        LocalCluster(n_workers=1, processes=False, threads_per_worker=1, dashboard_address=":0") as cluster,
    ):
        found = {check.name: check for check in checks.cluster_checks(cluster.scheduler_address)}
    assert found["scheduler"].state == found["encryption"].state == "ok", "nothing leaves this process"
    assert found["versions"].state == "ok"
    stealing = found["distributed.scheduler.work-stealing"]
    assert stealing.state == "fail"
    assert stealing.advice.startswith("libra doctor --settings > libra-dask.yaml")
    assert found["workers"].state == "fail"


def test_an_open_scheduler_is_warned_of():
    check = checks.encryption_check("tcp://10.0.0.1:8786")
    assert check.state == "warn"
    assert "tcp://10.0.0.1:8786 is open: anyone who reaches this port can run code" in check.detail
    assert check.advice.startswith("libra cluster tls DIR && DASK_CONFIG=DIR/dask.yaml dask scheduler")
    assert checks.encryption_check("tls://10.0.0.1:8786").state == "ok"


def test_engines_that_a_configuration_lists_have_to_be_there():
    cluster = {"engines": [{"tp": 2, "slots": 8}], "threads": 4}
    listed = config_from_dict({"rollout": {"engine": "vllm"}, "cluster": cluster})
    found = [check.detail for check in checks.role_checks(WORKERS, "tcp://s", listed)]
    assert any("1 engines of TP 2, 4 threads, 8 slots are listed, the cluster has 0" in detail for detail in found)
    assert any("0 are listed" in detail for detail in found)
    (check,) = checks.role_checks(WORKERS, "tcp://s", config_from_dict({}))  # none is listed: whatever is there will do
    assert check.state == "ok"

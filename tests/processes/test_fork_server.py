"""Workers that are forked have what workers that are started have: environment, output, signals, random numbers of their own."""

import os
import select
import signal
import sys
from multiprocessing import forkserver
from pathlib import Path

import pytest
from distributed import Client

from libra import keys
from libra.cluster import hardware_inventory
from libra.cluster.connection import present_workers
from libra.cluster.local import local_cluster
from libra.cluster.worker_process import begin_forking
from libra.config import config_from_dict
from libra.processes import fork_server


def make(**sections):
    return config_from_dict({"cluster": {"dashboard_port": 0, "threads": 1}, **sections})


def as_it_is():
    """What a worker process has; runs on it."""
    import numpy as np

    return {
        "environment": dict(os.environ),
        "errors": str(Path("/proc/self/fd/2").readlink()),
        "blocked": signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ()),
        "random": np.random.random(),  # noqa: NPY002  what a user's reward may call
        "torch": "torch" in sys.modules,
        "parent": os.getppid(),
        "pid": os.getpid(),
    }


@pytest.mark.live  # clusters of their own: the fork server is what is tested
@pytest.mark.skipif(sys.platform != "linux" or hardware_inventory.may_have_gpu(), reason="workers are not forked here")
def test_a_forked_worker_is_like_one_that_was_started(tmp_path, monkeypatch):
    monkeypatch.setenv("A_USERS_OWN", "before the fork server")
    config = make()
    if not begin_forking(config):
        pytest.skip("a cluster of other settings is alive in this process")
    monkeypatch.setenv("A_USERS_OWN", "after it")
    with local_cluster(config, tmp_path) as cluster, Client(cluster) as client:
        workers = {info["name"]: address for address, info in present_workers(client).items()}
        found = client.run(as_it_is)
    assert sorted(workers) == ["rollout-0", "tool-0", "train-0"]
    for name, address in workers.items():
        worker = found[address]
        assert worker["torch"] and not worker["blocked"]
        assert worker["errors"] == str(tmp_path / f"{name}.log")
        variables = worker["environment"]
        assert variables["A_USERS_OWN"] == "after it"
        assert variables["OMP_NUM_THREADS"] == "1" and variables["MALLOC_ARENA_MAX"] == "1"
        for passing in ("PYTHONSAFEPATH", fork_server.OWN_PATH_VARIABLE):
            assert variables.get(passing) == os.environ.get(passing)
        assert variables.get("PYTHONPATH") == os.environ.get("PYTHONPATH")
    assert len({worker["random"] for worker in found.values()}) == 3
    parents = {worker["parent"] for worker in found.values()}
    assert len(parents | {os.getpid()}) == 2, "all of one parent, not the driver"


def the_server():
    return forkserver._forkserver._forkserver_pid


@pytest.mark.live  # clusters of their own: the fork server is what is tested
@pytest.mark.skipif(sys.platform != "linux" or hardware_inventory.may_have_gpu(), reason="workers are not forked here")
def test_a_worker_comes_back_after_the_fork_server_is_killed(tmp_path, monkeypatch):
    config = make()
    if not begin_forking(config):
        pytest.skip("a cluster of other settings is alive in this process")
    with local_cluster(config, tmp_path) as cluster, Client(cluster) as client:

        def on(resource):
            return client.submit(as_it_is, resources={resource: 1}, pure=False).result(timeout=90)

        trainer, tools, first = on(keys.TRAIN), on(keys.TOOL), the_server()
        monkeypatch.setenv("A_DRIVERS_OWN", "set after the fork server began")
        ended = os.pidfd_open(first)
        os.kill(first, signal.SIGKILL)
        select.select([ended], [], [])
        os.close(ended)
        os.kill(trainer["pid"], signal.SIGKILL)
        back = on(keys.TRAIN)
        server = the_server()
        assert back["parent"] == server != first
        assert not back["blocked"] and back["random"] not in (trainer["random"], tools["random"])
        variables = Path(f"/proc/{server}/environ").read_bytes().split(b"\0")
        names = [each.partition(b"=")[0].decode() for each in variables]
        assert fork_server.OWN_PATH_VARIABLE in names and b"MALLOC_ARENA_MAX=1" in variables
        assert "A_DRIVERS_OWN" not in names
        mask = Path(f"/proc/{server}/status").read_text().partition("SigBlk:")[2].split()[0]
        assert int(mask, 16) & 1 << signal.SIGINT - 1
        assert on(keys.TOOL)["pid"] == tools["pid"], "the others live on"


@pytest.mark.parametrize(
    ("had", "wanted", "fits"),
    [
        ({"A": "1"}, {"A": "2"}, True),  # given to each worker
        ({"A": "1"}, {"A": "1", "B": "2"}, True),
        ({"A": "1", "B": "2"}, {"A": "1"}, False),  # cannot be taken away
        ({"OMP_NUM_THREADS": "1"}, {"OMP_NUM_THREADS": "2"}, False),  # was read
        ({}, {"HF_HOME": "/models"}, False),
    ],
)
def test_only_an_environment_that_can_be_given_later_is_forked(had, wanted, fits):
    assert fork_server._fits(had, wanted) is fits


@pytest.mark.parametrize(
    "sections", [{"rollout": {"engine": "vllm"}}, {"cluster": {"scheduler": "tcp://127.0.0.1:1", "dashboard_port": 0}}]
)
def test_what_cannot_be_forked_is_not(sections, monkeypatch):
    config = make(**sections)
    assert not begin_forking(config)
    monkeypatch.setenv(fork_server.SWITCH, "0")
    assert not begin_forking(make())
    monkeypatch.delenv(fork_server.SWITCH)
    monkeypatch.setattr(hardware_inventory, "GPU_FILES", ("/dev/null",))
    assert not begin_forking(make()), "a machine with a GPU"

"""Workers that join, leave, come back, or cannot be set up: no run is held up, nothing is lost or done twice."""

import copy
import os
from concurrent.futures import ThreadPoolExecutor

import dask
import pytest
from distributed import Client
from whole_run import address_of, events_of, kill, named, once_each

from libra.cluster.connection import present_workers
from libra.cluster.local import local_cluster
from libra.cluster.readiness import check_cluster
from libra.config import config_from_dict
from libra.driver.run_session import Session
from libra.errors import ClusterError
from libra.scheduler import LibraPlugin
from libra.testing import FixedTurns
from libra.types import Phase

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def growing():
    """A client of a cluster to which tests add workers."""
    config = config_from_dict({"cluster": {"threads": 1, "dashboard_port": 0}, "rollout": {"slots": 2}})
    with local_cluster(config) as started, Client(started) as connected:
        yield connected


def add_worker(cluster, name, like, broken=None):
    """Start one more worker process, in which `NotEverywhere` cannot be set up while ``broken`` exists."""
    spec = cluster.worker_spec[name] = copy.deepcopy(cluster.worker_spec[like])
    spec["options"]["env"] = {**spec["options"]["env"], "LIBRA_TEST_BROKEN": str(broken or "not/set")}
    spec["options"]["resources"].pop("COMMIT", None)
    cluster.sync(cluster._correct_state)


def libra(scheduler):
    return scheduler.plugins[LibraPlugin.name]


def served(scheduler):
    """Version of each engine."""
    return libra(scheduler).runs["demo"].workers.served


def not_ready(scheduler):
    """Stage of each worker that takes no part in the run, as the page's JSON has it."""
    (snapshot,) = libra(scheduler).snapshots()
    return {row["worker"]: row["stage"] for row in snapshot["not_ready"]}


class Patient(FixedTurns):
    """Has its worker wait for weights as long as it takes: the test stops a transfer during a file."""

    async def setup(self):
        from libra.weights import transfer

        transfer.SILENCE_S = 600.0


def note_sends(held, dask_worker):
    """On a worker: note the versions it passes on. Of ``held``, two pipes, one is written during the first tensors, one read."""
    from libra.transport import Channel

    dask_worker.sends, send = [], Channel.send_file
    pipes = [held] if held is not None else []

    def noted(channel, file, offset, num_bytes):
        dask_worker.sends.append(int(file.name.split("/")[-2]))
        if pipes and file.name.endswith(".safetensors"):
            half, go = pipes.pop()
            send(channel, file, 0, 1000)
            half.write_text("half")
            go.read_text()
            offset, num_bytes = 1000, num_bytes - 1000
        send(channel, file, offset, num_bytes)

    Channel.send_file = noted


def sends(dask_worker):
    return list(dask_worker.sends)


async def stand_still(run, dask_worker):
    """On a worker: its engine takes no step any more, so that turns given to it never end."""
    await dask_worker.plugins[f"libra-{run}"].engine.serving.engine.pause()


class NotEverywhere(FixedTurns):
    """Cannot be set up in a process where a file of this name is there."""

    async def setup(self):
        if os.path.exists(os.environ.get("LIBRA_TEST_BROKEN", "not/set")):  # noqa: ASYNC240, PTH110
            raise OSError("no space left for scratch")


for _sent in (Patient, note_sends, sends, stand_still, NotEverywhere):
    _sent.__module__ = "__main__"  # by value to the workers, which cannot import this file


@pytest.mark.live
def test_a_worker_joins_with_weights_of_another_and_leaves_without_loss(make_config, growing, tmp_path, until):
    config = make_config(run={"iterations": 8}, weights={"transfer": "peer"}, store={"keep_journals": True})
    half, go = tmp_path / "half", tmp_path / "go"
    os.mkfifo(half)
    os.mkfifo(go)
    cluster = growing.cluster
    session = Session(config, environment=Patient(), client=growing)
    with session, ThreadPoolExecutor(1) as thread:
        iterations = session.iterations()
        next(iterations)
        # Iteration 1 is under way, and no other one is submitted: when it is over, version 2 is the newest.
        until(cluster, lambda it: served(it).get("rollout-0") == 2)
        trainer = address_of(growing, "train-0")
        growing.run(note_sends, (half, go), workers=[address_of(growing, "rollout-0")])
        growing.run(note_sends, None, workers=[trainer])
        joining = thread.submit(add_worker, cluster, "rollout-1", "rollout-0")
        assert half.read_text() == "half", "the worker that generates is asked, and has sent half of the version"
        # The joiner has not got its weights, and the run goes on: steps, versions, and the very worker it asked.
        assert [next(iterations)["iteration"] for _ in range(3)] == [1, 2, 3]
        until(cluster, lambda it: served(it).get("rollout-0") == 5)
        assert 2 not in growing.run(sends, workers=[trainer])[trainer], "the trainer was not asked"
        early = [event for event in events_of(session.directory) if event.get("worker") == "rollout-1"]
        assert not named(early, "version_served", "worker_capacity")
        go.write_text("go")
        joining.result()
        until(cluster, lambda it: served(it).get("rollout-1") == 5)

        leaver = address_of(growing, "rollout-1")
        growing.run(stand_still, "demo", workers=[leaver])
        taken = thread.submit(lambda: [next(iterations)["iteration"] for _ in range(2)])
        until(cluster, lambda it: libra(it).trajectories.dispatcher.running_on("rollout-1", Phase.ROLLOUT) == 2)
        growing.retire_workers([leaver])
        assert taken.result() == [4, 5], "its turns were generated by the other one"
        assert [values["iteration"] for values in iterations] == [6, 7]
    events = once_each(session.directory, 8, 2, 2)
    assert len(list((session.directory / "journal").glob("*.rec"))) == 8 * 4 * 5, "one record of each quantum"
    names = [(e["name"], e.get("worker")) for e in events]
    assert names.index(("version_served", "rollout-1")) < names.index(("quantum_dispatched", "rollout-1"))
    assert [e["address"] for e in named(events, "quantum_lost")] == [leaver] * 2
    left = next(n for n, e in enumerate(events) if e["name"] == "worker_lost" and e["address"] == leaver)
    assert {e["worker"] for e in named(events[left:], "quantum_dispatched") if e["phase"] == "ROLLOUT"} == {"rollout-0"}


@pytest.mark.live
def test_a_joiner_that_cannot_be_set_up_is_left_out(make_config, growing, until, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("libra.policy.liveness.RESTART_AFTER_S", (3600.0,))
    broken, joiner = tmp_path / "scratch", "tool-1"
    broken.touch()
    with Session(make_config(run={"iterations": 4}), environment=NotEverywhere(), client=growing) as session:
        iterations = session.iterations()
        next(iterations)
        with caplog.at_level("ERROR", "libra.scheduler.worker_watch"):
            add_worker(growing.cluster, joiner, "tool-0", broken)
            until(growing.cluster, lambda it: not_ready(it) == {joiner: "failed"})
        at = address_of(growing, joiner)
        assert any("type kill -9" in record.getMessage() and at in record.getMessage() for record in caplog.records)
        assert at not in growing.cluster.scheduler.resources["GRADE"]  # it is asked for nothing, by Dask neither
        assert [next(iterations)["iteration"] for _ in range(2)] == [1, 2]
        broken.unlink()
        kill(growing, joiner, until)
        until(growing.cluster, lambda it: joiner in libra(it).trajectories.workers.address and not not_ready(it))
        assert [values["iteration"] for values in iterations] == [3]
    events = once_each(session.directory, 4, 2, 2)
    (failed,) = named(events, "worker_setup_failed")
    assert (failed["worker"], failed["address"]) == (joiner, at)
    assert failed["detail"] == "OSError: no space left for scratch"
    lost = next(n for n, e in enumerate(events) if e["name"] == "worker_lost" and e["address"] == at)
    assert not [e for e in events[:lost] if e.get("worker") == joiner and e["name"].startswith(("quantum", "version"))]


def process(scheduler, name):
    return next((ws.pid for ws in scheduler.workers.values() if ws.name == name), None)


def test_a_lost_worker_comes_back_and_a_run_that_starts_waits_for_it(make_config, client, until, caplog):
    client.register_plugin(LibraPlugin())
    before = {worker["name"]: address for address, worker in present_workers(client).items()}
    with dask.config.set({"distributed.deploy.lost-worker-timeout": "1ms"}):
        kill(client, "rollout-0", until)
        with pytest.raises(ClusterError, match="ROLLOUT"):
            check_cluster(client, make_config(), wait_s=0)
        check_cluster(client, make_config())
    assert "waiting for rollout-0 to come back" in caplog.text
    after = {worker["name"]: address for address, worker in present_workers(client).items()}
    assert after.keys() == before.keys() == {"rollout-0", "tool-0", "train-0"}
    assert after["rollout-0"] != before["rollout-0"]
    asked = client.run(os.getpid, workers=[after["rollout-0"]])
    assert asked == {after["rollout-0"]: process(client.cluster.scheduler, "rollout-0")}


def test_a_nanny_that_ends_is_replaced_and_the_run_goes_on(make_config, client, caplog):
    """Its worker ends with it; the step that it had is taken by the next one."""
    cluster = client.cluster
    with Session(make_config(run={"iterations": 3}), client=client) as session:
        iterations = session.iterations()
        next(iterations)
        nanny, first = cluster.workers["train-0"], process(cluster.scheduler, "train-0")
        cluster.sync(nanny.close)
        assert [values["iteration"] for values in iterations] == [1, 2]
    assert cluster.workers["train-0"] is not nanny
    assert process(cluster.scheduler, "train-0") not in (None, first)
    assert "the nanny of worker train-0 has ended" in caplog.text

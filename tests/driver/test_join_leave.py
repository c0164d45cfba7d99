"""Rollout workers that join and leave while a run goes on: nobody waits for them, nothing is lost, nothing is done twice."""

from __future__ import annotations

import copy
import os
import signal
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import zarr
from distributed import Client, Scheduler

from libra.cluster.local import local_cluster
from libra.cluster.present_workers import present_workers
from libra.cluster.readiness import check_cluster
from libra.config import RunConfig
from libra.driver.session import Session
from libra.scheduler import LibraPlugin
from libra.store.event_log import read_events
from libra.testing import FixedTurns
from libra.types import Phase

pytestmark = pytest.mark.timeout(600)  # each cluster is four or five processes that load torch

Config = Callable[..., RunConfig]
Until = Callable[[Any, Callable[[Scheduler], bool]], None]
RUN = "demo"


class Patient(FixedTurns):
    """Has its worker wait for weights as long as it takes: the test stops a transfer during a file."""

    async def setup(self) -> None:
        from libra.weights import transfer

        transfer.SILENCE_S = 600.0


Patient.__module__ = "__main__"  # sent to the workers by value, which cannot import this file


def workers(session: Session) -> dict[str, str]:
    """Address of each worker by name."""
    found = present_workers(session.client)
    return {str(facts["name"]): address for address, facts in found.items()}


def add_worker(session: Session, name: str, like: str) -> None:
    """Start one more worker process, as somebody who types ``dask worker`` would; returns when Dask has started it."""
    cluster = session.cluster
    assert cluster is not None
    cluster.worker_spec[name] = copy.deepcopy(cluster.worker_spec[like])
    cluster.sync(cluster._correct_state)


def libra(scheduler: Scheduler) -> LibraPlugin:
    """Libra's plugin there."""
    plugin: LibraPlugin = scheduler.plugins[LibraPlugin.name]  # type: ignore[assignment]
    return plugin


def check_exactly_once(
    directory: Path, iterations: int, groups: int, samples: int, quanta: int
) -> list[dict[str, Any]]:
    """Every quantum has one record and counts once, every trajectory is stored once, every step was taken once; the events."""
    names = [f"train-{k}-{g}-{s}" for k in range(iterations) for g in range(groups) for s in range(samples)]
    records = sorted(path.name for path in (directory / "journal").glob("*.rec"))
    assert records == sorted(f"{name}.{quantum:04d}.rec" for name in names for quantum in range(quanta))
    events = list(read_events(directory / "events.jsonl").events)
    done = Counter((e["key"], e["quantum"]) for e in events if e["name"] == "quantum_finished")
    assert set(done.values()) == {1} and len(done) == len(records)
    assert {e["failure"] for e in events if e["name"] == "failure_classified"} <= {"policy"}, (
        "turns ran out, nothing failed"
    )
    columns = zarr.open_group(directory / "trajectories.zarr", mode="r")["trajectory"]
    ids = list(zip(*(columns[name][:].tolist() for name in ("iteration", "group", "sample")), strict=True))
    assert sorted(ids) == [(k, g, s) for k in range(iterations) for g in range(groups) for s in range(samples)]
    assert [e["step"] for e in events if e["name"] == "step_finished"] == list(range(iterations))
    assert [e["version"] for e in events if e["name"] == "version_published"] == list(range(iterations + 1))
    return events


def note_sends(held: tuple[Path, Path] | None, dask_worker: Any) -> None:
    """On a worker: note the versions it passes on. Of ``held``, two pipes, one is written during the first tensors, one read."""
    from libra.transport import Channel

    dask_worker.sends, send = [], Channel.send_file
    pipes = [held] if held is not None else []

    def noted(channel: Channel, file: Any, offset: int, num_bytes: int) -> None:
        dask_worker.sends.append(int(file.name.split("/")[-2]))
        if pipes and file.name.endswith(".safetensors"):
            half, go = pipes.pop()
            send(channel, file, 0, 1000)
            half.write_text("half")
            go.read_text()
            offset, num_bytes = 1000, num_bytes - 1000
        send(channel, file, offset, num_bytes)

    Channel.send_file = noted  # type: ignore[method-assign]


note_sends.__module__ = "__main__"


def sends(dask_worker: Any) -> list[int]:
    return list(dask_worker.sends)


sends.__module__ = "__main__"


def test_a_worker_that_joins_takes_weights_from_another_and_holds_up_nobody(
    make_config: Config, tmp_path: Path, until: Until
) -> None:
    config = make_config(
        run={"iterations": 8},
        weights={"transfer": "peer"},
        store={"keep_journals": True},
        rollout={"slots": 2},
    )
    half, go = tmp_path / "half", tmp_path / "go"
    os.mkfifo(half)
    os.mkfifo(go)
    with Session(config, environment=Patient()) as session, ThreadPoolExecutor(1) as thread:
        iterations = session.iterations()
        next(iterations)
        # Iteration 1 is under way, and no other one is submitted: when it is over, version 2 is the newest.
        until(session.cluster, lambda it: libra(it).runs[RUN].workers.served.get("rollout-0") == 2)
        at = workers(session)
        session.client.run(note_sends, (half, go), workers=[at["rollout-0"]])
        session.client.run(note_sends, None, workers=[at["train-0"]])
        joining = thread.submit(add_worker, session, "rollout-1", "rollout-0")
        assert half.read_text() == "half", "the worker that generates is asked, and has sent half of the version"
        # The joiner has not got its weights, and the run goes on: steps, versions, and the very worker it asked.
        assert [next(iterations)["iteration"] for _ in range(3)] == [1, 2, 3]
        until(session.cluster, lambda it: libra(it).runs[RUN].workers.served.get("rollout-0") == 5)
        assert 2 not in session.client.run(sends, workers=[at["train-0"]])[at["train-0"]], "the trainer was not asked"
        events = list(read_events(session.directory / "events.jsonl").events)
        assert not [
            e for e in events if e.get("worker") == "rollout-1" and e["name"] in ("version_served", "worker_capacity")
        ]
        go.write_text("go")
        joining.result()
        until(session.cluster, lambda it: "rollout-1" in libra(it).runs[RUN].workers.served)
        assert [values["iteration"] for values in iterations] == [4, 5, 6, 7]

    events = check_exactly_once(session.directory, iterations=8, groups=2, samples=2, quanta=5)
    names = [(e["name"], e.get("worker")) for e in events]
    assert names.index(("version_served", "rollout-1")) < names.index(("quantum_dispatched", "rollout-1"))


@pytest.mark.parametrize("how", ["planned", "killed"])
def test_a_worker_that_leaves_in_mid_turn_takes_nothing_along(make_config: Config, until: Until, how: str) -> None:
    config = make_config(
        run={"iterations": 6},
        weights={"transfer": "peer"},
        store={"keep_journals": True},
        rollout={"slots": 2},
        cluster={"rollout_workers": 2, "threads": 1, "dashboard_port": 0},
    )
    with Session(config) as session:
        iterations = session.iterations()
        next(iterations)
        until(session.cluster, lambda it: libra(it).runs[RUN].workers.served == {"rollout-0": 2, "rollout-1": 2})
        leaver = workers(session)["rollout-1"]
        (process,) = session.client.run(stand_still, RUN, workers=[leaver]).values()
        taken = ThreadPoolExecutor(1).submit(lambda: [next(iterations)["iteration"], next(iterations)["iteration"]])
        until(session.cluster, lambda it: libra(it).trajectories.dispatcher.running_on("rollout-1", Phase.ROLLOUT) == 2)
        if how == "planned":
            session.client.retire_workers([leaver])
            assert leaver not in workers(session).values()
        else:
            os.kill(process, signal.SIGKILL)
        assert taken.result() == [1, 2], "its turns were generated by the other one"
        if how == "killed":  # its nanny starts it again, and it takes up the newest version
            until(
                session.cluster, lambda it: libra(it).runs[RUN].workers.engines.get("rollout-1") not in (None, leaver)
            )
            until(session.cluster, lambda it: not libra(it).runs[RUN].workers.joining)
        assert [values["iteration"] for values in iterations] == [3, 4, 5]

    events = check_exactly_once(session.directory, iterations=6, groups=2, samples=2, quanta=5)
    lost = [e for e in events if e["name"] == "quantum_lost"]
    assert len(lost) == 2 and {e["address"] for e in lost} == {leaver}
    left = next(n for n, e in enumerate(events) if e["name"] == "worker_lost" and e["address"] == leaver)
    later = {e["worker"] for e in events[left:] if e["name"] == "quantum_dispatched" and e["phase"] == "ROLLOUT"}
    assert later == ({"rollout-0"} if how == "planned" else {"rollout-0", "rollout-1"})


async def stand_still(run: str, dask_worker: Any) -> int:
    """On a worker: its engine takes no step any more, so that turns given to it never end; returns the process."""
    await dask_worker.plugins[f"libra-{run}"].engine.serving.engine.pause()
    return os.getpid()


stand_still.__module__ = "__main__"


def check_scratch(broken: Path) -> None:
    if broken.exists():
        raise OSError(f"no space left for {broken.name}")


check_scratch.__module__ = "__main__"


class NotEverywhere(FixedTurns):
    """Cannot be set up in a process where a file of this name is there."""

    async def setup(self) -> None:
        check_scratch(Path(os.environ.get("LIBRA_TEST_BROKEN", "not/set")))


NotEverywhere.__module__ = "__main__"


def add_broken_worker(session: Session, name: str, like: str, broken: Path) -> None:
    """One more worker process, in which the environment cannot be set up while ``broken`` exists."""
    cluster = session.cluster
    assert cluster is not None
    spec = cluster.worker_spec[name] = copy.deepcopy(cluster.worker_spec[like])
    spec["options"]["env"] = {**spec["options"]["env"], "LIBRA_TEST_BROKEN": str(broken)}
    spec["options"]["resources"].pop("COMMIT", None)
    cluster.sync(cluster._correct_state)


def not_ready(scheduler: Scheduler) -> dict[str, str]:
    """Stage of each worker that takes no part in the run, as the page's JSON has it."""
    (snapshot,) = libra(scheduler).snapshots()
    return {row["worker"]: row["stage"] for row in snapshot["not_ready"]}


@pytest.mark.parametrize("kind", ["rollout", "tool"])
def test_a_joiner_that_cannot_be_set_up_is_told_of_and_takes_part_once_it_is_mended(
    make_config: Config,
    until: Until,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    monkeypatch.setattr("libra.scheduler.unready_workers.RETRY_AFTER_S", (3600.0,))
    config = make_config(run={"iterations": 5}, weights={"transfer": "peer"}, store={"keep_journals": True})
    broken, joiner = tmp_path / "scratch", f"{kind}-1"
    broken.touch()
    with Session(config, environment=NotEverywhere()) as session:
        iterations = session.iterations()
        next(iterations)
        with caplog.at_level("ERROR", "libra.scheduler.unready_workers"):
            add_broken_worker(session, joiner, f"{kind}-0", broken)
            until(session.cluster, lambda it: not_ready(it) == {joiner: "failed"})
        (line,) = (record.getMessage() for record in caplog.records if record.name == "libra.scheduler.unready_workers")
        at = workers(session)[joiner]
        for words in (f"run {RUN}: worker {joiner} ({at})", "OSError: no space left for scratch", "type kill -9"):
            assert words in line
        assert "the run goes on without it" in line
        # It is asked for nothing, by Dask neither: the run goes on.
        assert [next(iterations)["iteration"] for _ in range(2)] == [1, 2]

        broken.unlink()
        pid = session.client.run(os.getpid, workers=[at])[at]
        assert f"kill -9 {pid} on" in line
        os.kill(pid, signal.SIGKILL)
        until(session.cluster, lambda it: joiner in libra(it).trajectories.workers.address and not not_ready(it))
        assert [values["iteration"] for values in iterations] == [3, 4]

    events = check_exactly_once(session.directory, iterations=5, groups=2, samples=2, quanta=5)
    (failed,) = (e for e in events if e["name"] == "worker_setup_failed")
    assert (failed["worker"], failed["address"]) == (joiner, at)
    assert failed["detail"] == "OSError: no space left for scratch"
    lost = next(n for n, e in enumerate(events) if e["name"] == "worker_lost" and e["address"] == at)
    assert not [e for e in events[:lost] if e.get("worker") == joiner and e["name"].startswith(("quantum", "version"))]


def test_a_worker_that_alone_supplies_something_is_started_anew_until_it_can_be_set_up(
    make_config: Config, until: Until, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("libra.scheduler.unready_workers.RETRY_AFTER_S", (0.5, 0.5, 600.0))
    broken = tmp_path / "scratch"
    config = make_config(run={"iterations": 3}, store={"keep_journals": True})
    with Session(config, environment=NotEverywhere()) as session:
        iterations = session.iterations()
        next(iterations)
        assert session.cluster is not None
        (nanny,) = (nanny for name, nanny in session.cluster.workers.items() if name == "tool-0")
        nanny.env["LIBRA_TEST_BROKEN"] = str(broken)  # of the process that it starts next
        broken.touch()
        os.kill(nanny.pid, signal.SIGKILL)
        until(session.cluster, lambda it: not_ready(it) == {"tool-0": "failed"})
        check_cluster(
            session.client, session.config
        )  # a run that starts now is not told that nobody commits: it waits for it, too
        broken.unlink()
        assert [values["iteration"] for values in iterations] == [1, 2]
    events = check_exactly_once(session.directory, iterations=3, groups=2, samples=2, quanta=5)
    (failed,) = (e for e in events if e["name"] == "worker_setup_failed")
    assert (failed["worker"], failed["retry_after_s"]) == ("tool-0", 0.5)


def test_a_run_ends_well_beside_a_worker_that_could_not_be_set_up_which_then_supplies_again(
    make_config: Config, until: Until, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("libra.scheduler.unready_workers.RETRY_AFTER_S", (3600.0,))
    config = make_config(run={"iterations": 2})
    broken = tmp_path / "scratch"
    broken.touch()
    with local_cluster(config) as cluster, Client(cluster) as client:
        session = Session(config, environment=NotEverywhere(), client=client)
        with session:
            session.cluster = cluster
            add_broken_worker(session, "tool-1", "tool-0", broken)
            until(cluster, lambda it: not_ready(it) == {"tool-1": "failed"})
            session.cluster = None  # it is the caller's, who goes on with it
            at = workers(session)["tool-1"]
            assert at not in cluster.scheduler.resources["GRADE"]
            assert [values["iteration"] for values in session.iterations()] == [0, 1]
        assert cluster.scheduler.resources["GRADE"][at] == 4 == cluster.scheduler.workers[at].resources["GRADE"]
        broken.unlink()
        with Session(
            make_config(run={"iterations": 1, "name": "next"}), environment=NotEverywhere(), client=client
        ) as session:
            assert [values["iteration"] for values in session.iterations()] == [0]

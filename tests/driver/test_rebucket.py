"""Two workers of one machine give their cores to one engine of twice the tensor-parallel degree, and take them back, in mid-run."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import zarr
from distributed import Client, Scheduler

from libra.cluster.local import local_cluster
from libra.cluster.present_workers import present_workers
from libra.config import RunConfig, config_from_dict
from libra.driver.session import Session
from libra.rollout.vllm_settings import is_installed
from libra.store.event_log import read_events
from libra.worker.engine_factory import Share

Config = Callable[..., RunConfig]
Until = Callable[[Any, Callable[[Scheduler], bool]], None]
ONE = {"rollout-0": {"role": "rollout", "tp": 2}, "rollout-1": "lent"}
TWO = {"rollout-0": {"role": "rollout", "tp": 1}, "rollout-1": {"role": "rollout", "tp": 1}}


def test_an_engine_of_several_workers_has_all_their_cores_and_gpus() -> None:
    joined = Share.joined([Share("4-7", "1"), Share("0-3", "0")])
    assert joined == Share("4-7|0-3", "1,0"), "the ranks of the worker that leads come first"
    assert Share.joined([Share("0-3", ""), Share("", "")]) == Share("nobind", "")
    assert Share.joined([Share("0-3", "0"), Share("nobind", "1")]) == Share("nobind", "0,1")


@pytest.mark.skipif(not is_installed(), reason="vllm is not installed here: make setup-vllm")
@pytest.mark.timeout(900)
def test_two_vllm_engines_become_one_of_two_ranks_and_two_again(make_config: Config) -> None:
    config = make_config(
        run={"iterations": 6, "eta": 1},
        model={"path": "libra/tiny-arithmetic"},
        rollout={"engine": "vllm", "max_new_tokens": 16, "slots": 3},
        trainer={"prompts": 2, "group_size": 4, "lr": 1e-3},
        cluster={"rollout_workers": 2, "hybrid_workers": 2},
    )
    with Session(config) as session:
        iterations = session.iterations()
        rows = [next(iterations)]
        there = session.roles.change(ONE)
        assert session.roles.wait(there)
        engines = session.client.run(engine_of, "demo", workers=[address_of(session.client, "rollout-0")])
        ((tp, cores, processes),) = engines.values()
        assert tp == 2 and processes > 0
        if len(os.sched_getaffinity(0)) >= 2:
            first, second = sorted(os.sched_getaffinity(0))[:2]
            assert cores == f"{first}|{second}"
        rows += [next(iterations), next(iterations)]
        back = session.roles.change(TWO)
        assert session.roles.wait(back)
        rows += iterations

    events = each_trajectory_once(session, iterations=6, groups=2, samples=4)
    assert len(rows) == 6 and all(row["mismatch_max_abs"] < 1e-2 for row in rows if row["mismatch_tokens"])
    changed = [e for e in events if e["name"] == "role_changed"]
    assert {
        (e["worker"], e["generation"], e["from_role"], e["from_tp"], e["to_role"], e["to_tp"]) for e in changed
    } == {
        ("rollout-0", there, "rollout", 1, "rollout", 2),
        ("rollout-1", there, "rollout", 1, "lent", 1),
        ("rollout-0", back, "rollout", 2, "rollout", 1),
        ("rollout-1", back, "lent", 1, "rollout", 1),
    }
    check_places(events, there, back)
    assert not [e for e in events if e["name"] in ("engine_quarantined", "role_change_failed")]


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    """A client of rollout-0 and rollout-1, which can both change role_member, tool-0 and train-0."""
    cluster = {"rollout_workers": 2, "hybrid_workers": 2, "threads": 1, "dashboard_port": 0}
    config = config_from_dict({"cluster": cluster, "rollout": {"slots": 3}})
    with local_cluster(config) as started, Client(started) as connected:
        yield connected


@pytest.fixture
def start(make_config: Config, client: Client) -> Callable[..., Session]:
    """Maker of sessions on that cluster."""

    def make(iterations: int) -> Session:
        cluster = {"rollout_workers": 2, "hybrid_workers": 2}
        return Session(make_config(run={"iterations": iterations}, cluster=cluster), client=client)

    return make


@pytest.mark.timeout(600)
def test_an_engine_without_tensor_parallelism_is_not_even_put_to_sleep(start: Callable[..., Session]) -> None:
    with start(2) as session:
        iterations = session.iterations()
        next(iterations)
        assert session.roles.wait(session.roles.change(ONE)) is False
        list(iterations)
    events = each_trajectory_once(session, iterations=2, groups=2, samples=2)
    (failed,) = [e for e in events if e["name"] == "role_change_failed"]
    assert "TP=2" in failed["detail"] and "rollout.engine=vllm" in failed["detail"]
    assert "sleeping" not in {e["stage"] for e in events if e["name"] == "role_stage"}


def emulate_tensor_parallelism(dask_worker: Any) -> None:
    """On a worker: a declared emulation. Engines say that they have several ranks, and are transformers engines all the same."""
    from libra.worker import role_member

    role_member.check_parallel = lambda engine, tp: None


emulate_tensor_parallelism.__module__ = "__main__"


@pytest.mark.timeout(600)
def test_an_engine_of_two_workers_outlives_the_death_of_either(
    start: Callable[..., Session], client: Client, until: Until
) -> None:
    with start(8) as session:
        iterations = session.iterations()
        next(iterations)
        client.run(emulate_tensor_parallelism, workers=[address_of(client, f"rollout-{n}") for n in (0, 1)])
        there = session.roles.change(ONE)
        assert session.roles.wait(there)
        next(iterations)
        for victim in ("rollout-1", "rollout-0"):
            kill(client, victim, until)
            until_settled(session, 2)  # by name: it is lent again, or leads again
            has = {row["worker"]: (row["role"], row["tp"]) for row in session.roles.rows()}
            assert has == {"rollout-0": ("rollout", 2), "rollout-1": ("lent", 1)}
            next(iterations)
        back = session.roles.change(TWO)
        assert session.roles.wait(back)
        assert [row["iteration"] for row in iterations] == [4, 5, 6, 7]
    events = each_trajectory_once(session, iterations=8, groups=2, samples=2)
    check_places(events, there, back)


def kill(client: Client, name: str, until: Until) -> None:
    """Kill a worker's process, and wait until the scheduler knows it."""
    address = address_of(client, name)
    ((process),) = client.run(os.getpid, workers=[address]).values()

    os.kill(process, signal.SIGKILL)
    until(client.cluster, lambda scheduler: address not in scheduler.workers)


def until_settled(session: Session, count: int) -> None:
    """Wait until so many workers that can change roles are there and have one."""
    run = session.spec.run

    async def wait(dask_scheduler: Any) -> None:
        state = dask_scheduler.plugins["libra-roles"]._runs[run]
        while [row["stage"] for row in state.roles.rows()] != ["resupplied"] * count:
            await state.news.wait()

    session.client.run_on_scheduler(wait)


def check_places(events: list[dict[str, Any]], there: int, back: int) -> None:
    """In between, every generation ran on the one engine, whose versions passed their check; before and after on both."""
    ends = {e["generation"]: n for n, e in enumerate(events) if e["name"] == "role_changed"}
    begun = {e["generation"]: n for n, e in enumerate(events) if e["name"] == "role_change_started"}
    between = events[ends[there] : begun[back]]
    placed = [e["worker"] for e in between if e["name"] == "quantum_dispatched" and e["phase"] == "ROLLOUT"]
    assert placed and set(placed) == {"rollout-0"}
    after = [e for e in events[ends[back] :] if e["name"] == "quantum_dispatched" and e["phase"] == "ROLLOUT"]
    assert {e["worker"] for e in after} == {"rollout-0", "rollout-1"}
    served = [(e["worker"], e["tp"]) for e in events if e["name"] == "version_served"]
    woken = events[begun[there] : ends[there]]
    assert ("rollout-0", 2) in [(e["worker"], e["tp"]) for e in woken if e["name"] == "version_served"]
    assert {tp for worker, tp in served if worker == "rollout-1"} == {1}
    assert {e["method"] for e in woken if e["name"] == "version_checked"} == {"columns"}
    told = [(e["worker"], e["bucket"], e["rollout_slots"]) for e in events if e["name"] == "worker_capacity"]
    assert [
        True for worker, bucket, slots in told if worker == "rollout-0" and "tp2" in bucket.split("-") and slots == 6
    ]


def each_trajectory_once(session: Session, iterations: int, groups: int, samples: int) -> list[dict[str, Any]]:
    """Every trajectory is stored once, every quantum was committed once, and nothing failed; the events of the run."""
    events = list(read_events(session.directory / "events.jsonl").events)
    columns = zarr.open_group(session.directory / "trajectories.zarr", mode="r")["trajectory"]
    ids = list(zip(*(columns[name][:].tolist() for name in ("iteration", "group", "sample")), strict=True))
    assert sorted(ids) == [(k, g, s) for k in range(iterations) for g in range(groups) for s in range(samples)]
    done = Counter((e["key"], e["quantum"]) for e in events if e["name"] == "quantum_finished")
    assert set(done.values()) == {1}
    assert {e["failure"] for e in events if e["name"] == "failure_classified"} <= {"policy"}
    assert [e["version"] for e in events if e["name"] == "version_published"] == list(range(iterations + 1))
    return events


def address_of(client: Client, name: str) -> str:
    workers = present_workers(client)
    return next(address for address, worker in workers.items() if worker["name"] == name)


def engine_of(run: str, dask_worker: Any) -> tuple[int, str, int]:
    """On a worker: degree, cores and number of processes of its engine."""
    engine = dask_worker.plugins[f"libra-{run}"].engine.serving.engine
    return engine.settings.tp, engine.settings.cores, len(engine.process_ids)


engine_of.__module__ = "__main__"

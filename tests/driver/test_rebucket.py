"""Two workers of one machine give their cores to one engine of twice the tensor-parallel degree, and take them back, in mid-run."""

import os

import pytest
from distributed import Client
from whole_run import address_of, kill, named, once_each

from libra.cluster.local import local_cluster
from libra.config import config_from_dict
from libra.config.sections import vllm_is_installed
from libra.driver.run_session import Session
from libra.worker.engine.engine_factory import Share

ONE = {"rollout-0": {"role": "rollout", "tp": 2}, "rollout-1": "lent"}
TWO = {"rollout-0": {"role": "rollout", "tp": 1}, "rollout-1": {"role": "rollout", "tp": 1}}


def test_an_engine_of_several_workers_has_all_their_cores_and_gpus():
    joined = Share.joined([Share("4-7", "1"), Share("0-3", "0")])
    assert joined == Share("4-7|0-3", "1,0"), "the ranks of the worker that leads come first"
    assert Share.joined([Share("0-3", ""), Share("", "")]) == Share("nobind", "")
    assert Share.joined([Share("0-3", "0"), Share("nobind", "1")]) == Share("nobind", "0,1")


@pytest.mark.vllm
@pytest.mark.skipif(not vllm_is_installed(), reason="vllm is not installed here: make setup-vllm")
@pytest.mark.timeout(900)
def test_two_vllm_engines_become_one_of_two_ranks_and_two_again(make_config):
    config = make_config(
        run={"iterations": 6, "eta": 1}, model={"path": "libra/tiny-arithmetic"}, rollout={"engine": "vllm",
        "max_new_tokens": 16, "slots": 3}, trainer={"prompts": 2, "group_size": 4, "lr": 1e-3},
        cluster={"rollout_workers": 2, "hybrid_workers": 2},
    )  # fmt: skip
    with Session(config) as session:
        iterations = session.iterations()
        rows = [next(iterations)]
        there = session.scheduler.change_roles(ONE)
        assert session.scheduler.wait_for_roles(there)
        engines = session.client.run(engine_of, "demo", workers=[address_of(session.client, "rollout-0")])
        ((tp, cores, processes),) = engines.values()
        assert tp == 2 and processes > 0
        if len(os.sched_getaffinity(0)) >= 2:
            first, second = sorted(os.sched_getaffinity(0))[:2]
            assert cores == f"{first}|{second}"
        rows += [next(iterations), next(iterations)]
        back = session.scheduler.change_roles(TWO)
        assert session.scheduler.wait_for_roles(back)
        rows += iterations

    events = once_each(session.directory, 6, 2, 4)
    assert len(rows) == 6 and all(row["mismatch_max_abs"] < 1e-2 for row in rows if row["mismatch_tokens"])
    fields = ("worker", "generation", "from_role", "from_tp", "to_role", "to_tp")
    assert {tuple(event[name] for name in fields) for event in named(events, "role_changed")} == {
        ("rollout-0", there, "rollout", 1, "rollout", 2), ("rollout-1", there, "rollout", 1, "lent", 1),
        ("rollout-0", back, "rollout", 2, "rollout", 1), ("rollout-1", back, "lent", 1, "rollout", 1),
    }  # fmt: skip
    check_places(events, there, back)
    assert not named(events, "engine_quarantined", "role_change_failed")


@pytest.fixture(scope="module")
def two_hybrids():
    """A client of rollout-0 and rollout-1, which can both change roles (of the shared ones one can), tool-0 and train-0."""
    cluster = {"rollout_workers": 2, "hybrid_workers": 2, "threads": 1, "dashboard_port": 0}
    config = config_from_dict({"cluster": cluster, "rollout": {"slots": 3}})
    with local_cluster(config) as started, Client(started) as connected:
        yield connected


def emulate_tensor_parallelism(dask_worker):
    """On a worker: a declared emulation. Engines say that they have several ranks, and are transformers engines all the same."""
    from libra.worker import role_member

    role_member.check_parallel = lambda engine, tp: None


emulate_tensor_parallelism.__module__ = "__main__"


@pytest.mark.live
@pytest.mark.timeout(600)
def test_an_engine_of_two_workers_is_refused_or_outlives_the_death_of_either(make_config, two_hybrids, until):
    cluster = {"rollout_workers": 2, "hybrid_workers": 2}
    with Session(make_config(run={"iterations": 7}, cluster=cluster), client=two_hybrids) as session:
        iterations = session.iterations()
        next(iterations)
        refused = session.scheduler.change_roles(ONE)  # no tensor parallelism here
        assert session.scheduler.wait_for_roles(refused) is False
        two_hybrids.run(emulate_tensor_parallelism, workers=[address_of(two_hybrids, f"rollout-{n}") for n in (0, 1)])
        there = session.scheduler.change_roles(ONE)
        assert session.scheduler.wait_for_roles(there)
        next(iterations)
        for victim in ("rollout-1", "rollout-0"):
            kill(two_hybrids, victim, until)
            until_settled(session, 2)  # by name: it is lent again, or leads again
            has = {row["worker"]: (row["role"], row["tp"]) for row in session.scheduler.roles()}
            assert has == {"rollout-0": ("rollout", 2), "rollout-1": ("lent", 1)}
            next(iterations)
        back = session.scheduler.change_roles(TWO)
        assert session.scheduler.wait_for_roles(back)
        list(iterations)
    events = once_each(session.directory, 7, 2, 2)
    (failed,) = named(events, "role_change_failed")
    assert "TP=2" in failed["detail"]
    assert "sleeping" not in {e["stage"] for e in named(events[: events.index(failed)], "role_stage")}
    check_places(events, there, back)


def until_settled(session, count):
    """Wait until so many workers that can change roles are there and have one."""

    async def wait(dask_scheduler):
        state = dask_scheduler.plugins["libra"].roles._run
        while [row["stage"] for row in state.roles.rows()] != ["resupplied"] * count:
            await state.news.wait()

    session.client.run_on_scheduler(wait)


def check_places(events, there, back):
    """In between, every generation ran on the one engine, whose versions passed their check; before and after on both."""
    ends = {e["generation"]: n for n, e in enumerate(events) if e["name"] == "role_changed"}
    begun = {e["generation"]: n for n, e in enumerate(events) if e["name"] == "role_change_started"}
    between = named(events[ends[there] : begun[back]], "quantum_dispatched")
    assert {e["worker"] for e in between if e["phase"] == "ROLLOUT"} == {"rollout-0"}
    after = [e for e in named(events[ends[back] :], "quantum_dispatched") if e["phase"] == "ROLLOUT"]
    assert {e["worker"] for e in after} == {"rollout-0", "rollout-1"}
    assert {e["tp"] for e in named(events, "version_served") if e["worker"] == "rollout-1"} == {1}
    woken = events[begun[there] : ends[there]]
    assert ("rollout-0", 2) in [(e["worker"], e["tp"]) for e in named(woken, "version_served")]
    assert {e["method"] for e in named(woken, "version_checked")} == {"columns"}
    joined = [e for e in named(events, "worker_capacity") if "tp2" in e["bucket"].split("-")]
    assert ("rollout-0", 6) in {(e["worker"], e["rollout_slots"]) for e in joined}


def engine_of(run, dask_worker):
    """On a worker: degree, cores and number of processes of its engine."""
    engine = dask_worker.plugins[f"libra-{run}"].engine.serving.engine
    return engine.settings.tp, engine.settings.cores, len(engine.process_ids)


engine_of.__module__ = "__main__"

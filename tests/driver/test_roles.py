"""Changes of roles that are cancelled, too slow, killed or fail: nothing is lost, nothing runs twice, nobody waits for a joiner.

A change that succeeds, and back, is in tests/core/test_scheduling.py.
"""

import asyncio
import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import whole_run
from distributed import Scheduler
from whole_run import WIDE, address_of, kill

from libra.cluster.present_workers import present_workers
from libra.driver.session import Session
from libra.policy.role_messages import Stage

STAGES = [str(stage) for stage in Stage if stage is not Stage.RESUPPLIED]


@pytest.fixture
def start(make_config, client_wide):
    """Maker of sessions in which rollout-0 can change its role."""

    def make(
        iterations: int, *, drain_timeout_s: float | None = None, environment: Any = None, **rollout: Any
    ) -> Session:
        config = make_config(
            run={"iterations": iterations}, cluster={**WIDE, "drain_timeout_s": drain_timeout_s}, rollout=rollout,
            checkpoint={"every": 1},
        )  # fmt: skip
        return Session(config, client=client_wide, environment=environment)

    return make


@pytest.fixture
def pipe(tmp_path):
    """Maker of named pipes: opening one end waits for the other, so nobody polls."""

    def make(name: str) -> Path:
        os.mkfifo(tmp_path / name)
        return tmp_path / name

    return make


def events(session: Session, *names: str) -> list[dict[str, Any]]:
    return whole_run.events_of(session.directory, *names)


def check(session: Session, iterations: int) -> None:
    """Nothing was lost, and nobody's trajectory failed."""
    whole_run.check_once(session.directory, iterations)
    assert {event["failure"] for event in events(session, "failure_classified")} <= {"policy"}


def hold(run: str, stage: str, entered: Path, go: Path, dask_worker: Any) -> None:
    """Hold up one stage, once, before its work is done: say which process it is, and wait for a word."""
    member = dask_worker.plugins[f"libra-{run}"].roles
    name = {"draining": "_drain", "sleeping": "_sleep", "taking_up": "_take_up"}[stage]
    work = getattr(member, name)

    async def held(*arguments: Any) -> None:
        setattr(member, name, work)
        await asyncio.to_thread(entered.write_text, str(os.getpid()))
        await asyncio.to_thread(go.read_text)
        await work(*arguments)

    setattr(member, name, held)


def roles_of(scheduler: Scheduler) -> list[dict[str, Any]]:
    (snapshot,) = scheduler.plugins["libra"].snapshots()  # type: ignore[attr-defined]
    return list(snapshot["roles"])


def settled(role: str, after: int) -> Callable[[Scheduler], bool]:
    """Whether rollout-0 is in a role, taken there by a change later than ``after``."""
    return lambda scheduler: any(
        row["generation"] > after and (row["role"], row["stage"]) == (role, "resupplied") for row in roles_of(scheduler)
    )


def test_a_change_is_cancelled_at_each_stage(start, pipe):
    with start(4) as session:
        iterations = session.iterations()
        next(iterations)
        for stage in STAGES:
            entered, go = pipe(f"entered-{stage}"), pipe(f"go-{stage}")
            where = [address_of(session.client, "rollout-0")]
            session.client.run(hold, session.spec.run, stage, entered, go, workers=where)
            there = session.roles.change({"rollout-0": "train"})
            entered.read_text()
            assert session.roles.rows()[0]["stage"] == stage
            back = session.roles.cancel(there)
            go.write_text("go")
            assert session.roles.wait(there) is False
            row = session.roles.rows()[0]
            assert (row["role"], row["stage"], row["generation"]) == ("rollout", "resupplied", back)
            next(iterations)
    check(session, 4)
    assert [e["generation"] for e in events(session, "role_change_cancelled")] == [1, 3, 5]
    assert [(e["generation"], e["role"]) for e in events(session, "role_restored")] == [
        (2, "rollout"), (4, "rollout"), (6, "rollout"),
    ]  # fmt: skip
    assert not events(session, "role_changed", "role_member_failed")


def test_who_drains_too_long_gives_its_generations_to_others(start, pipe):
    began = pipe("began")
    with start(2, drain_timeout_s=0.01, max_new_tokens=300, max_turns=1) as session:

        def tell(run: str, dask_worker: Any) -> None:
            engine = dask_worker.plugins[f"libra-{run}"].engine.serving.engine
            generate = engine.generate

            async def told(request: Any) -> Any:
                engine.generate = generate
                asyncio.get_running_loop().run_in_executor(None, began.write_text, "began")
                return await generate(request)

            engine.generate = told

        session.client.run(tell, session.spec.run, workers=[address_of(session.client, "rollout-0")])
        iterations = session.iterations()

        def change() -> int:
            began.read_text()
            return session.roles.change({"rollout-0": "train"})

        with ThreadPoolExecutor(1) as thread:
            asked = thread.submit(change)
            next(iterations)
            assert session.roles.wait(asked.result())
        list(iterations)
    given_back = events(session, "quantum_given_back")
    assert given_back and not events(session, "quantum_lost")
    check(session, 2)
    retaken = {e["key"] for e in events(session, "quantum_finished") if e["worker"] == "rollout-1"}
    assert {e["key"] for e in given_back} <= retaken


def test_a_worker_killed_while_it_changes_comes_back_as_it_was(start, pipe, until):
    with start(3) as session:
        iterations = session.iterations()
        next(iterations)
        entered, go = pipe("entered"), pipe("go")
        where = [address_of(session.client, "rollout-0")]
        session.client.run(hold, session.spec.run, "taking_up", entered, go, workers=where)
        there = session.roles.change({"rollout-0": "train"})
        os.kill(int(entered.read_text()), signal.SIGKILL)
        assert session.roles.wait(there) is False
        next(iterations)  # the run goes on without it
        until(session.client.cluster, settled("rollout", there + 1))
        list(iterations)
    check(session, 3)
    (failed,) = events(session, "role_change_failed")
    assert failed["detail"] == "rollout-0 left the cluster"
    restored = events(session, "role_restored")[-1]
    assert (restored["worker"], restored["role"]) == ("rollout-0", "rollout")


def test_who_trains_gets_its_role_back_by_name_and_finds_a_core_that_was_restarted(start, until):
    with start(6) as session:
        iterations = session.iterations()
        rows = [next(iterations)]
        there = session.roles.change({"rollout-0": "train"})
        assert session.roles.wait(there)
        for victim in ("rollout-0", "train-0"):
            kill(session.client, victim, until)
            if victim == "rollout-0":
                until(session.client.cluster, settled("train", there))
            rows += [next(iterations) for _ in range(2)]
        rows += iterations
    check(session, 6)
    restored = events(session, "role_restored")[-1]
    assert (restored["worker"], restored["role"]) == ("rollout-0", "train")
    assert "reconnected" in {e["stage"] for e in events(session, "role_stage")}
    assert rows[-1]["hybrids"] == 1


def break_training(run: str, dask_worker: Any) -> None:
    """On a worker: its replica computes nothing, once."""

    def fails(*arguments: Any, **options: Any) -> Any:
        gradient.accumulate = works
        raise RuntimeError("no memory is left")

    gradient = dask_worker.plugins[f"libra-{run}"].roles.training._replica.gradient
    works, gradient.accumulate = gradient.accumulate, fails


break_training.__module__ = "__main__"


def test_who_cannot_train_generates_again_and_it_is_said_why(start, until):
    with start(5) as session:
        iterations = session.iterations()
        next(iterations)
        where = [address_of(session.client, "rollout-0")]
        there = session.roles.change({"rollout-0": "train"})
        assert session.roles.wait(there)
        session.client.run(break_training, session.spec.run, workers=where)
        rows = [next(iterations) for _ in range(2)]
        until(session.client.cluster, settled("rollout", there))
        (row,) = session.roles.rows()
        workers = present_workers(session.client)
        assert workers[where[0]]["resources"]["ROLLOUT"] == 8, "it is given turns again"
        rows += iterations
    assert "RuntimeError: no memory is left" in row["reason"]
    assert (row["role"], row["stage"]) == ("rollout", "resupplied") and row["for_s"] >= 0
    assert rows[-1]["hybrids"] == 0
    check(session, 5)
    reasons = [e["reason"] for e in events(session, "role_change_started")]
    assert reasons[0] == "asked for" and "RuntimeError: no memory is left" in reasons[1]

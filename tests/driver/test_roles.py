"""Workers that change roles in mid-run, with real processes: nothing is lost, nothing runs twice, nobody waits for a joiner."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import zarr
from distributed import Client, Scheduler

from libra.cli.replay import replay_run
from libra.cluster.local import local_cluster
from libra.cluster.present_workers import present_workers
from libra.config import RunConfig, config_from_dict
from libra.driver.session import Session
from libra.errors import ClusterError
from libra.policy.role_messages import Stage
from libra.store.event_log import read_events
from libra.testing import FixedTurns

pytestmark = pytest.mark.timeout(600)  # the cluster's five processes load torch, and so does each that is killed

Config = Callable[..., RunConfig]
STAGES = [str(stage) for stage in Stage if stage is not Stage.RESUPPLIED]


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    """A client of rollout-0 and rollout-1, of which the first can change role_member, tool-0 and train-0."""
    cluster = {"rollout_workers": 2, "hybrid_workers": 1, "threads": 1, "dashboard_port": 0}
    config = config_from_dict({"cluster": cluster, "rollout": {"slots": 8}})
    with local_cluster(config) as started, Client(started) as connected:
        yield connected


@pytest.fixture
def start(make_config: Config, client: Client) -> Callable[..., Session]:
    """Maker of sessions on that cluster."""

    def make(iterations: int, *, drain_timeout_s: float | None = None, **rollout: Any) -> Session:
        config = make_config(
            run={"iterations": iterations},
            cluster={"hybrid_workers": 1, "drain_timeout_s": drain_timeout_s},
            rollout=rollout,
            checkpoint={"every": 1},
        )
        return Session(config, client=client)

    return make


@pytest.fixture
def pipe(tmp_path: Path) -> Callable[[str], Path]:
    """Maker of named pipes: opening one end waits for the other, so nobody polls."""

    def make(name: str) -> Path:
        os.mkfifo(tmp_path / name)
        return tmp_path / name

    return make


def events(session: Session, *names: str) -> list[dict[str, Any]]:
    return [event for event in read_events(session.directory / "events.jsonl").events if event["name"] in names]


def each_trajectory_once(session: Session, iterations: int) -> None:
    """Every trajectory is in the store once, and each of its quanta was committed once."""
    columns = zarr.open_group(session.directory / "trajectories.zarr", mode="r")["trajectory"]
    ids = list(zip(*(columns[name][:].tolist() for name in ("iteration", "group", "sample")), strict=True))
    assert sorted(ids) == [(k, g, s) for k in range(iterations) for g in (0, 1) for s in (0, 1)]
    done = Counter((event["key"], event["quantum"]) for event in events(session, "quantum_finished"))
    assert set(done.values()) == {1}
    assert {event["failure"] for event in events(session, "failure_classified")} <= {"policy"}
    assert replay_run(session.directory, from_snapshot=False, keys=(), decisions=(), as_json=True)


def address_of(session: Session, name: str) -> str:
    workers = present_workers(session.client)
    (address,) = (address for address, worker in workers.items() if worker["name"] == name)
    return address


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


def settled(session: Session, role: str, after: int) -> None:
    """Wait until rollout-0 is in a role, taken there by a change later than ``after``."""
    run = session.spec.run

    async def wait(dask_scheduler: Scheduler) -> None:
        plugin: Any = dask_scheduler.plugins["libra-roles"]
        state = plugin._runs[run]
        while not any(
            row["generation"] > after and (row["role"], row["stage"]) == (role, "resupplied")
            for row in state.roles.rows()
        ):
            await state.news.wait()

    session.client.run_on_scheduler(wait)


def test_a_worker_trains_for_a_while_and_generates_again(start: Callable[..., Session]) -> None:
    with start(6) as session:
        iterations = session.iterations()
        rows = [next(iterations)]
        there = session.roles.change({"rollout-0": "train"})
        assert session.roles.wait(there)
        rows += [next(iterations) for _ in range(3)]
        assert session.roles.rows()[0]["role"] == "train"
        with pytest.raises(ClusterError, match="nothing changes"):
            session.roles.change({"rollout-0": "train"})
        back = session.roles.change({"rollout-0": {"role": "rollout", "tp": 1}})
        assert session.roles.wait(back)
        rows += iterations
    assert max(row["hybrids"] for row in rows[1:4]) == 1
    assert rows[0]["hybrids"] == rows[-1]["hybrids"] == 0
    assert all(row["hybrids_lost"] == 0 for row in rows)
    # A step that gave the joiner no slice never looked at it: it waited for nothing.
    assert all(row["hybrid_wait_s"] == 0 for row in rows if row["hybrids"] == 0)
    each_trajectory_once(session, 6)
    changed = events(session, "role_changed")
    assert [(e["worker"], e["generation"], e["from_role"], e["to_role"]) for e in changed] == [
        ("rollout-0", there, "rollout", "train"),
        ("rollout-0", back, "train", "rollout"),
    ]
    assert all(list(e["stage_s"]) == STAGES for e in changed)
    stages = [(e["generation"], e["stage"]) for e in events(session, "role_stage") if e["stage"] != "state"]
    assert stages == [(generation, stage) for generation in (there, back) for stage in STAGES]
    at = [(e["t_s"], e["worker"]) for e in events(session, "quantum_dispatched") if e["phase"] == "ROLLOUT"]
    away, again = (e["t_s"] for e in changed)
    assert "rollout-0" not in {worker for t_s, worker in at if away < t_s < again}
    assert "rollout-0" in {worker for t_s, worker in at if t_s > again}


def test_a_change_is_cancelled_at_each_stage(start: Callable[..., Session], pipe: Callable[[str], Path]) -> None:
    with start(4) as session:
        iterations = session.iterations()
        next(iterations)
        for stage in STAGES:
            entered, go = pipe(f"entered-{stage}"), pipe(f"go-{stage}")
            where = [address_of(session, "rollout-0")]
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
    each_trajectory_once(session, 4)
    assert [e["generation"] for e in events(session, "role_change_cancelled")] == [1, 3, 5]
    assert [(e["generation"], e["role"]) for e in events(session, "role_restored")] == [
        (2, "rollout"), (4, "rollout"), (6, "rollout"),
    ]  # fmt: skip
    assert not events(session, "role_changed", "role_member_failed")


def test_who_drains_too_long_gives_its_generations_to_others(
    start: Callable[..., Session], pipe: Callable[[str], Path]
) -> None:
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

        session.client.run(tell, session.spec.run, workers=[address_of(session, "rollout-0")])
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
    each_trajectory_once(session, 2)
    retaken = {e["key"] for e in events(session, "quantum_finished") if e["worker"] == "rollout-1"}
    assert {e["key"] for e in given_back} <= retaken


def test_a_worker_killed_while_it_changes_comes_back_as_it_was(
    start: Callable[..., Session], pipe: Callable[[str], Path]
) -> None:
    with start(3) as session:
        iterations = session.iterations()
        next(iterations)
        entered, go = pipe("entered"), pipe("go")
        where = [address_of(session, "rollout-0")]
        session.client.run(hold, session.spec.run, "taking_up", entered, go, workers=where)
        there = session.roles.change({"rollout-0": "train"})
        os.kill(int(entered.read_text()), signal.SIGKILL)
        assert session.roles.wait(there) is False
        next(iterations)  # the run goes on without it
        settled(session, "rollout", there + 1)
        list(iterations)
    each_trajectory_once(session, 3)
    (failed,) = events(session, "role_change_failed")
    assert failed["detail"] == "rollout-0 left the cluster"
    restored = events(session, "role_restored")[-1]
    assert (restored["worker"], restored["role"]) == ("rollout-0", "rollout")


def test_who_trains_gets_its_role_back_by_name_and_finds_a_core_that_was_restarted(
    start: Callable[..., Session],
) -> None:
    def process(dask_worker: Any) -> int:
        return os.getpid()

    with start(6) as session:
        iterations = session.iterations()
        rows = [next(iterations)]
        there = session.roles.change({"rollout-0": "train"})
        assert session.roles.wait(there)
        for victim in ("rollout-0", "train-0"):
            where = address_of(session, victim)
            (pid,) = session.client.run(process, workers=[where]).values()
            os.kill(pid, signal.SIGKILL)
            if victim == "rollout-0":
                settled(session, "train", there)
            rows += [next(iterations) for _ in range(2)]
        rows += iterations
    each_trajectory_once(session, 6)
    restored = events(session, "role_restored")[-1]
    assert (restored["worker"], restored["role"]) == ("rollout-0", "train")
    assert "reconnected" in {e["stage"] for e in events(session, "role_stage")}
    assert rows[-1]["hybrids"] == 1


def break_training(run: str, when: str, dask_worker: Any) -> None:
    """On a worker: its next replica cannot be made, or computes nothing; once."""
    from libra.worker import hybrid_training

    def fails(*arguments: Any, **options: Any) -> Any:
        setattr(where, name, works)
        raise RuntimeError("no memory is left")

    member = dask_worker.plugins[f"libra-{run}"].roles
    replica = member.training._replica
    where, name = (hybrid_training, "make_replica") if when == "taking up" else (replica.gradient, "accumulate")
    works = getattr(where, name)
    setattr(where, name, fails)


break_training.__module__ = "__main__"


@pytest.mark.parametrize("when", ["taking up", "training"])
def test_who_cannot_train_generates_again_and_it_is_said_why(start: Callable[..., Session], when: str) -> None:
    with start(5) as session:
        iterations = session.iterations()
        next(iterations)
        where = [address_of(session, "rollout-0")]
        if when == "taking up":
            session.client.run(break_training, session.spec.run, when, workers=where)
        there = session.roles.change({"rollout-0": "train"})
        assert session.roles.wait(there) is (when == "training")
        if when == "training":
            session.client.run(break_training, session.spec.run, when, workers=where)
        rows = [next(iterations) for _ in range(2)]
        settled(session, "rollout", there)
        (row,) = session.roles.rows()
        workers = present_workers(session.client)
        assert workers[where[0]]["resources"]["ROLLOUT"] == 8, "it is given turns again"
        rows += iterations
    assert "RuntimeError: no memory is left" in row["reason"]
    assert (row["role"], row["stage"]) == ("rollout", "resupplied") and row["for_s"] >= 0
    assert rows[-1]["hybrids"] == 0
    each_trajectory_once(session, 5)
    reasons = [e["reason"] for e in events(session, "role_change_started")]
    assert reasons[0] == "asked for" and "RuntimeError: no memory is left" in reasons[1]
    assert bool(events(session, "role_change_failed")) == (when == "taking up")


class Scratch(FixedTurns):
    """Cannot be set up while there is a file."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    async def setup(self) -> None:
        self.check()

    def check(self) -> None:
        if self.path.exists():
            raise OSError("no space is left")


Scratch.__module__ = "__main__"


def test_who_comes_back_and_cannot_be_set_up_is_failed_until_it_is_mended(
    make_config: Config, client: Client, tmp_path: Path, until: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("libra.scheduler.unready_workers.RETRY_AFTER_S", (3600.0,))
    full = tmp_path / "full"

    def seen(scheduler: Scheduler) -> tuple[list[tuple[str, str, str]], list[str]]:
        (snapshot,) = scheduler.plugins["libra"].snapshots()  # type: ignore[attr-defined]
        roles = [(row["role"], row["stage"], row["reason"]) for row in snapshot["roles"]]
        return roles, [row["worker"] for row in snapshot["not_ready"] if row["stage"] == "failed"]

    def kill() -> None:
        (pid,) = session.client.run(os.getpid, workers=[address_of(session, "rollout-0")]).values()
        os.kill(pid, signal.SIGKILL)

    config = make_config(run={"iterations": 4}, cluster={"hybrid_workers": 1}, checkpoint={"every": 1})
    with Session(config, client=client, environment=Scratch(full)) as session:
        iterations = session.iterations()
        next(iterations)
        there = session.roles.change({"rollout-0": "train"})
        assert session.roles.wait(there)
        full.touch()
        kill()
        failed = [("train", "failed", "OSError: no space is left")]
        until(client.cluster, lambda scheduler: seen(scheduler) == (failed, ["rollout-0"]))
        with pytest.raises(ClusterError, match="not in the cluster now"):
            session.roles.change({"rollout-0": "rollout"})
        next(iterations)
        full.unlink()
        kill()
        settled(session, "train", there)
        assert client.cluster is not None
        until(
            client.cluster, lambda scheduler: seen(scheduler) == ([("train", "resupplied", "rollout-0 came back")], [])
        )
        rows = list(iterations)
    assert rows[-1]["hybrids"] <= 1
    each_trajectory_once(session, 4)
    (event,) = events(session, "worker_setup_failed")
    assert (event["worker"], event["detail"]) == ("rollout-0", "OSError: no space is left")

"""Engines that train while the tail of a rollout runs, live: turns and returns, and nothing lost or repeated by a kill.

The tail is held: one group of each iteration waits in a tool, for a lock that the test has, until something happened.
"""

import asyncio
import fcntl
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from distributed import Client, Scheduler
from streamed_runs import check_taken_again, check_whole, events_of
from whole_run import address_of, keep_groups

from libra import facts
from libra.cli.replay import replay_run
from libra.cluster.local import local_cluster
from libra.config import config_from_dict
from libra.driver.run_session import Session
from libra.envs import tool
from libra.policy import tail
from libra.testing import FixedTurns
from libra.types import Prompt

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]

PROMPTS = 6
ENGINES = {"engines": [{"count": 2, "threads": 1, "min_pass_s": 0.05}], "hybrid_workers": 1}
"""A pass takes as long for eight trajectories as for one: whatever a busy machine measures, the held ones fit on one engine."""


class HeldTail(FixedTurns):
    """`FixedTurns` whose last group of an iteration waits for a lock in its first call."""

    def __init__(self, lock: Path) -> None:
        super().__init__()
        self.lock = lock
        self.tools = (tool(self.echo, timeout_s=300.0),)

    def reset(self, prompt: Prompt) -> dict[str, int]:
        return {"group": int(prompt.prompt_id.split("-")[1]) % PROMPTS}

    async def echo(self, text: str, *, trajectory_state: dict[str, int]) -> str:  # type: ignore[override]
        """Return the text.

        Args:
            text: The text.
        """
        if trajectory_state["group"] == PROMPTS - 1:
            await asyncio.to_thread(self._pass)
        return text

    def _pass(self) -> None:
        with self.lock.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_SH)


HeldTail.__module__ = "__main__"


@pytest.fixture(scope="module")
def slow_client():
    """A client of rollout-0, which can change its role, rollout-1, tool-0 and train-0."""
    workers = {"threads": 1, "dashboard_port": 0}
    config = config_from_dict({"cluster": ENGINES | workers, "rollout": {"slots": 8}})
    with local_cluster(config) as started, Client(started) as connected:
        yield connected


class Held:
    """A run whose tail is held by a lock."""

    def __init__(self, session: Session, lock: Path, until: Callable[..., None]) -> None:
        self.session, self._lock, self._until = session, lock, until

    @contextmanager
    def tail(self) -> Iterator[None]:
        """Within it, the last group of an iteration waits."""
        with self._lock.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def wait_for(self, kind: type[facts.Fact], count: int = 1, **fields: Any) -> None:
        def there(scheduler: Scheduler) -> bool:
            scheduler.plugins["libra"].runs["demo"].log.flush()  # type: ignore[attr-defined]
            return len(self.found(kind, **fields)) >= count

        self._until(self.session.client.cluster, there)

    def found(self, kind: type[facts.Fact], **fields: Any) -> list[Any]:
        events = [event for event in events_of(self.session.directory) if isinstance(event, kind)]
        return [event for event in events if all(getattr(event, name) == fields[name] for name in fields)]


def dies_in_a_slice(run: str, dask_worker: Any) -> None:
    """This worker is killed as soon as it computes a slice for the core."""
    gradient = dask_worker.plugins[f"libra-{run}"].roles.training._replica.gradient
    gradient.accumulate = lambda *arguments: os.kill(os.getpid(), signal.SIGKILL)


dies_in_a_slice.__module__ = "__main__"


def test_an_engine_that_turns_loses_nothing_when_it_is_killed(make_config, slow_client, tmp_path, until, monkeypatch):
    """With parts of turns, a pool of KV, and another old policy; in the second tail it is killed, and the core has its slice."""
    monkeypatch.setattr(tail, "price_s", lambda stage_s: 0.0)  # free: engines turn whatever the backlog
    keep_groups(monkeypatch)
    trainer = {"prompts": PROMPTS, "group_size": 2, "lr": 1e-4, "streaming": "on", "turning": "on", "old_logp": "ewma"}
    config = make_config(
        run={"iterations": 4}, trainer=trainer, rollout={"chunk_tokens": 3, "kv_host_gib": 0.1}, cluster=ENGINES,
        planner={"change_cost_s": 0.0}, store={"keep_versions": 9}, checkpoint={"every": 0},
    )  # fmt: skip
    lock = tmp_path / "lock"
    run = Held(Session(config, client=slow_client, environment=HeldTail(lock)), lock, until)
    with run.session as session, ThreadPoolExecutor(1) as thread:
        iterations = session.iterations()
        with run.tail():
            first = thread.submit(next, iterations)
            run.wait_for(facts.RoleStage, stage="state")
            run.wait_for(facts.WaveTrained, batch=0, missing=1)
        rows = [first.result()]
        with run.tail():
            second = thread.submit(next, iterations)
            run.wait_for(facts.RoleStage, count=2, stage="state")
            session.client.run(dies_in_a_slice, "demo", workers=[address_of(session.client, "rollout-0")])
        rows += [second.result(), *iterations]
    assert rows[0]["hybrids"] == 1 and [row["hybrids_lost"] for row in rows[:2]] == [0, 1]
    assert [event.worker for event in run.found(facts.WorkerLost)] == ["rollout-0"]
    turned = run.found(facts.Turn)
    assert [(event.worker, event.to) for event in turned[:2]] == [("rollout-0", "training"), ("rollout-0", "rollout")]
    (started, *_) = run.found(facts.RoleChangeStarted)
    assert started.reason.endswith(turned[0].reason)
    assert run.found(facts.WaveTrained, batch=0)[-1].hybrids == 1
    told = events_of(run.session.directory)
    after = told[told.index(turned[0]) :]
    moved = [(event.home, event.worker) for event in after if isinstance(event, facts.HomeChanged)]
    assert ("rollout-0", "rollout-1") in moved  # from the pool of the engine that has turned
    check_whole(run.session.directory, 4, config)
    assert replay_run(run.session.directory, from_snapshot=False, keys=(), decisions=(), as_json=True)
    check_taken_again(run.session.directory, config, 4, alone=False)

"""Twenty tool workers are killed in the middle of an action: no lease outlives its worker, and every action runs in the end."""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from distributed import Client

from libra import events
from libra.cluster.local import local_cluster
from libra.config import config_from_dict
from libra.driver.session import Session
from libra.envs import tool
from libra.store.event_log import EventReader
from libra.store.trajectories import TrajectoryStore
from libra.testing import FixedTurns
from libra.types import ToolCall

KILLS = 20
GROUPS, GROUP_SIZE, TURNS = 4, 6, 4


class Killing(FixedTurns):
    """An action's process kills the worker that it belongs to, the first time it runs, until that has happened often enough."""

    def __init__(self, *, path: str, seed: int = 0) -> None:
        super().__init__(seed=seed)
        self.path = path
        self.tools = (tool(self.work, cores=1, memory_gib=0.25, timeout_s=60),)

    def parse(self, text: str) -> tuple[ToolCall, ...]:
        return (ToolCall("work", {"text": "y"}),)

    def work(self, text: str, action_id: str) -> str:
        """Work.

        Args:
            text: Anything.
        """
        mine = Path(self.path) / action_id.replace("/", "-")
        if not mine.exists() and _is_one_of_the_kills(Path(self.path)):
            mine.touch()
            os.kill(_parent(os.getppid()), signal.SIGKILL)  # the starter's parent is the worker
        return text


def _is_one_of_the_kills(directory: Path) -> bool:
    """Whether there are fewer than `KILLS` so far; counts this one."""
    for number in range(KILLS):
        try:
            (directory / f"kill-{number}").touch(exist_ok=False)
        except FileExistsError:
            continue
        return True
    return False


def _parent(pid: int) -> int:
    """The parent of a process."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def left_of_leases(dask_scheduler: Any = None) -> tuple[list[str], int, list[int]]:
    """Holders of leases, requests that wait, and cores that are held of each present worker; runs on the scheduler."""
    table = dask_scheduler.plugins["libra"].trajectories.dispatcher.leases.table
    return (
        [lease.holder for lease in table.leases()],
        table.num_waiting(),
        [table.held(worker).cores for worker in table.capacity()],
    )


@pytest.mark.timeout(600)
def test_no_lease_outlives_its_worker(random_model: Path, tmp_path: Path) -> None:
    killed = tmp_path / "killed"
    killed.mkdir()
    config = config_from_dict(
        {
            "run": {"name": "kills", "dir": str(tmp_path), "iterations": 1},
            "model": {"path": str(random_model)},
            "environment": {"name": f"{__name__}:Killing", "args": {"path": str(killed)}},
            "rollout": {"slots": 32, "max_turns": TURNS, "max_new_tokens": 4, "ignore_eos": True},
            "trainer": {"prompts": GROUPS, "group_size": GROUP_SIZE, "lr": 0.0},
            "observe": {"progress": False, "tensorboard": False},
            "cluster": {"dashboard_port": 0, "threads": 1, "tool_workers": 2, "tool_cores": 1},
        }
    )
    with local_cluster(config) as cluster, Client(cluster) as client, Session(config, client=client) as session:
        assert [values["iteration"] for values in session.iterations()] == [0]
        holders, waiting, held = client.run_on_scheduler(left_of_leases)
    assert (holders, waiting, set(held)) == ([], 0, {0})
    assert len(list(killed.glob("kill-*"))) == KILLS
    log = [events.from_dict(line) for _, line in EventReader(session.directory / "events.jsonl")]
    lost = Counter(event.phase for event in log if isinstance(event, events.QuantumLost))
    assert lost["TOOL"] >= KILLS
    void = sum(isinstance(event, events.PlacementVoid) and event.phase == "TOOL" for event in log)
    ended = Counter(type(event).__name__ for event in log)
    # each lease ended with its action, or with its worker
    assert ended["LeaseGranted"] == ended["ActionFinished"] + lost["TOOL"] + void
    with TrajectoryStore.open(session.spec.store_path) as store:
        rows = store.columns("trajectory")
    assert len(rows["reward"]) == GROUPS * GROUP_SIZE
    assert not any(str(failure) == "worker" for failure in rows["failure"])

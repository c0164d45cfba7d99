"""Tool workers that come where actions wait, and go where they idle, on a local cluster of real processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from distributed import Client, Scheduler

from libra import events
from libra.cluster import elastic_tools, local
from libra.cluster.local import local_cluster
from libra.config import config_from_dict
from libra.driver.session import Session
from libra.envs import session
from libra.errors import ConfigError
from libra.orderings import blank
from libra.policy import tool_fleet
from libra.policy.log_replay import replay
from libra.store.event_log import EventReader
from libra.testing import FixedTurns


class WithSession(FixedTurns):
    """Its trajectories have sessions."""

    session = session(dict)


def config(directory: Path, model: Path, **cluster: Any) -> Any:
    return config_from_dict(
        {
            "run": {"name": "elastic", "dir": str(directory), "iterations": 1},
            "model": {"path": str(model)},
            "environment": {"name": "wants_two:WantsTwo", "args": {"path": str(directory / "workers")}},
            "rollout": {"slots": 8, "max_turns": 2, "max_new_tokens": 4, "ignore_eos": True},
            "trainer": {"prompts": 2, "group_size": 3, "lr": 0.0},
            "observe": {"progress": False, "tensorboard": False},
            "cluster": {"dashboard_port": 0, "threads": 1, "tool_cores": 1, "tool_workers_most": 2} | cluster,
        }
    )


@pytest.mark.timeout(300)
def test_a_worker_comes_where_actions_wait_and_goes_where_it_idles(
    random_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, until: Callable[..., None]
) -> None:
    monkeypatch.setattr(tool_fleet, "START_S", 0.01)  # as if workers had always started at once
    monkeypatch.setattr(tool_fleet, "IDLE_S", 0.2)
    monkeypatch.setattr(local, "LOOK_S", 0.05)
    (tmp_path / "workers").mkdir()
    made = config(tmp_path, random_model)

    def tools(scheduler: Scheduler) -> set[str]:
        return {str(ws.name) for ws in scheduler.workers.values() if str(ws.name).startswith("tool-")}

    with local_cluster(made) as cluster, Client(cluster) as client:
        assert tools(cluster.scheduler) == {"tool-0"}
        with Session(made, client=client) as run:
            assert [values["iteration"] for values in run.iterations()] == [0]
            until(cluster, lambda scheduler: tools(scheduler) == {"tool-0"})
    assert len(list((tmp_path / "workers").iterdir())) == 2
    lines = [(line, events.from_dict(values)) for line, values in EventReader(run.directory / "events.jsonl")]
    orders = [event for _, event in lines if isinstance(event, events.ToolWorkersOrdered)]
    assert (orders[0].wanted, orders[0].ordered, orders[0].give_up) == (1, 2, "")
    assert (orders[1].wanted, orders[1].ordered, orders[1].give_up) == (2, 1, "tool-1")
    told = list(replay(lines, blank))
    assert [each.difference for each in told if each.difference] == []
    changed = [
        (line, event)
        if not isinstance(event, events.ToolWorkersOrdered)
        else (line, events.from_dict(events.to_dict(event) | {"waiting": 0}))
        for line, event in lines
    ]
    assert any("tool workers were ordered" in each.difference for each in replay(changed, blank))


def test_what_cannot_change_is_refused(random_model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tool_workers_most: 2, and there are cluster.tool_workers=3 to begin with"):
        config(tmp_path, random_model, tool_workers=3)
    values = config(tmp_path, random_model).model_dump(mode="json")
    sessions = config_from_dict({**values, "environment": {"name": f"{__name__}:WithSession"}})
    with pytest.raises(ConfigError, match="have sessions, which live on their tool worker"), Session(sessions):
        pass
    assert not (tmp_path / "elastic").exists()


def test_descriptions_are_split_by_number() -> None:
    specs = {"tool-0": 0, "rollout-0": 1, "tool-1": 2, "tool-10": 3}
    assert elastic_tools.split_off(specs, 1) == {"tool-1": 2, "tool-10": 3}
    assert specs == {"tool-0": 0, "rollout-0": 1}

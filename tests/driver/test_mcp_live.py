"""A run whose calculator is behind an MCP server: the model calls it, and it ends with the workers."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from distributed import Client

pytest.importorskip("mcp", reason="pip install 'libra-rl[mcp]'")

from libra.cluster.local import local_cluster
from libra.config import config_from_dict
from libra.driver.session import Session
from libra.store.trajectories import TrajectoryStore


def test_the_shipped_model_calls_a_tool_of_a_server(repository: Path, tmp_path: Path) -> None:
    server = f"{sys.executable} {repository / 'workflows' / 'mcp_tools.py'} serve"
    made = config_from_dict(
        {
            "run": {"name": "served", "dir": str(tmp_path), "iterations": 1},
            "model": {"path": "libra/tiny-arithmetic"},
            "environment": {"args": {"calculator": False, "max_operations": 2}, "tools": {"mcp": server}},
            "rollout": {"slots": 16, "max_context_tokens": 512, "max_turns": 6, "max_new_tokens": 24},
            "trainer": {"prompts": 4, "group_size": 4, "max_row_tokens": 512},
            "evaluation": {"prompts": 0},
            "checkpoint": {"every": 0},
            "observe": {"progress": False, "tensorboard": False},
            "cluster": {"dashboard_port": 0, "threads": 1},
        }
    )
    with local_cluster(made) as cluster, Client(cluster) as client, Session(made, client=client) as session:
        (values,) = session.iterations()
        served = client.run(_servers, session.spec.config.environment.tools["mcp"])
    assert values["reward"] > 0
    assert all(1 <= starts <= 2 for starts in served.values()), (
        "to list its tools, and again if that was a minute before a call"
    )
    with TrajectoryStore.open(session.directory / "trajectories.zarr") as store:
        turns = store.columns("turn")
    assert "calculator" in set(turns["tool"])


def _servers(command: str) -> int:
    from libra.envs import mcp_tools

    server = mcp_tools._servers.get((command, ()))
    return 0 if server is None else server.starts

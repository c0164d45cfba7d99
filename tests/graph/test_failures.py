"""Whose fault it was: bad rewards, tools, environments, engines and workers become classes, never a silent reward 0."""

from __future__ import annotations

import math
import os
import signal
import socket
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from distributed import Client

from libra.config import RunConfig
from libra.envs import Environment, FunctionEnvironment, tool
from libra.errors import ClusterError, ConfigError, LibraError, ModelError
from libra.graph.driver import RunSummary, Session, run
from libra.store.event_log import read_events
from libra.testing import FixedTurns
from libra.types import Episode, Prompt, ToolCall

Config = Callable[..., RunConfig]
ONE_ITERATION = {"run": {"iterations": 1}, "trainer": {"prompts": 2, "group_size": 4}}


def stored(summary: RunSummary, level: str = "trajectory") -> dict[str, np.ndarray]:
    group = zarr.open_group(summary.directory / "trajectories.zarr", mode="r")
    return {name: array[:] for name, array in group[level].arrays()}


def address_of(client: Client, name: str) -> str:
    (address,) = (a for a, worker in client.scheduler_info(n_workers=-1)["workers"].items() if worker["name"] == name)
    return address


def test_a_nan_reward_is_a_failure_of_the_reward_and_not_zero(make_config: Config, cluster_client: Client) -> None:
    class Broken(FixedTurns):
        def grade(self, episode: Episode) -> float:
            return math.nan if episode.trajectory_id.endswith("-1") else super().grade(episode)

    summary = run(make_config(**ONE_ITERATION), environment=Broken(), client=cluster_client)
    columns = stored(summary)
    bad = columns["sample"] == 1
    assert set(columns["failure"][bad]) == {"reward"} and np.isnan(columns["reward"][bad]).all()
    assert (columns["advantage"][bad] == 0).all() and np.isfinite(columns["reward"][~bad]).all()
    assert all("nan" in detail for detail in columns["failure_detail"][bad])
    assert summary.iterations[0]["failures"] == 2
    for group in (0, 1):  # the others of a group are compared with each other only
        rows = (columns["group"] == group) & ~bad
        assert abs(columns["advantage"][rows].sum()) < 1e-5


@pytest.mark.parametrize(
    ("case", "status"), [("raises", "error"), ("hangs", "timeout"), ("floods", "truncated"), ("unknown", "malformed")]
)
def test_what_a_tool_does_is_a_status_the_model_reads(
    case: str, status: str, make_config: Config, cluster_client: Client
) -> None:
    class OneTool(FixedTurns):
        def __init__(self) -> None:
            super().__init__()

            async def act(how: str) -> str:
                """Do something.

                Args:
                    how: What.
                """
                import asyncio

                if how == "hangs":
                    await asyncio.Event().wait()
                if how == "raises":
                    raise RuntimeError("the tool broke")
                return "z" * 10_000_000

            self.tools = (tool(act, timeout_s=0.05, max_payload_chars=20),)

        def parse(self, text: str) -> tuple[ToolCall, ...]:
            return (ToolCall("nothing" if case == "unknown" else "act", {"how": case}),)

    config = make_config(**ONE_ITERATION, rollout={"max_context_tokens": 1024, "max_turns": 2})
    summary = run(config, environment=OneTool(), client=cluster_client)
    turns = stored(summary, "turn")
    assert set(turns["status"][turns["turn"] == 0]) == {status}
    assert turns["observation_tokens"].max() < 300
    assert set(stored(summary)["failure"]) == {"policy"}  # ended by max_turns, still trained on


def test_a_prompt_that_cannot_be_made_fails_its_group_only(make_config: Config, cluster_client: Client) -> None:
    class OddOnes(FixedTurns):
        def prompt(self, split: str, index: int) -> Prompt:
            if index % 2:
                raise KeyError(f"row {index}")
            return super().prompt(split, index)

    summary = run(make_config(**ONE_ITERATION), environment=OddOnes(), client=cluster_client)
    columns = stored(summary)
    assert Counter(map(str, columns["failure"])) == {"environment": 4, "policy": 4}
    assert set(columns["group"][columns["failure"] == "environment"]) == {1}


def test_an_environment_without_any_prompt_is_one_clear_error(make_config: Config, cluster_client: Client) -> None:
    class Empty(FixedTurns):
        def prompt(self, split: str, index: int) -> Prompt:
            raise KeyError("no rows")

    with pytest.raises(LibraError, match=r"Empty.prompt\('train', 0\) raised KeyError"):
        run(make_config(**ONE_ITERATION), environment=Empty(), client=cluster_client)


def test_a_failing_engine_fails_its_trajectories_and_the_run_goes_on(
    make_config: Config, cluster_client: Client
) -> None:
    async def break_engine(run: str, dask_worker: Any) -> None:
        engine = dask_worker.plugins[f"libra-{run}"].engine
        generate = engine.generate

        async def sometimes(request: Any) -> Any:
            from libra.errors import EngineError

            if request.trajectory_id.endswith("-3") and request.turn == 1:
                raise EngineError("injected: out of memory")
            return await generate(request)

        engine.generate = sometimes

    with Session(make_config(**ONE_ITERATION), client=cluster_client) as session:
        cluster_client.run(break_engine, "demo", workers=[address_of(cluster_client, "rollout-0")])
        (values,) = session.iterations()
    assert values["failures"] == 2
    columns = zarr.open_group(session.directory / "trajectories.zarr", mode="r")["trajectory"]
    bad = columns["failure"][:] == "engine"
    assert set(columns["sample"][:][bad]) == {3} and all(
        "out of memory" in d for d in columns["failure_detail"][:][bad]
    )


def test_a_worker_that_dies_three_times_under_a_quantum_ends_that_trajectory(
    make_config: Config, cluster_client: Client
) -> None:
    class Deadly(FixedTurns):
        def __init__(self) -> None:
            super().__init__()

            async def kill(text: str) -> str:
                """Kill the worker process.

                Args:
                    text: Whose.
                """
                os.kill(os.getpid(), signal.SIGKILL)
                return text

            self.tools = (*self.tools, tool(kill))

        def parse(self, text: str) -> tuple[ToolCall, ...]:
            return (ToolCall("kill", {"text": text}),)

    config = make_config(run={"iterations": 1}, trainer={"prompts": 1, "group_size": 1, "normalize_std": False})
    summary = run(config, environment=Deadly(), client=cluster_client)
    columns = stored(summary)
    assert list(columns["failure"]) == ["worker"] and "lost 3 times" in columns["failure_detail"][0]
    events = list(read_events(summary.directory / "events.jsonl").events)
    assert sum(e["name"] == "quantum_lost" for e in events) == 3


def test_wrong_input_is_told_before_anything_starts(make_config: Config, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"model\.path"):
        run(make_config(model={"path": str(tmp_path / "nowhere")}))
    with pytest.raises(ConfigError, match="tool_arithmetic"):
        run(make_config(environment={"name": "tool_aritmetic"}))
    assert not (tmp_path / "demo").exists()


def test_a_busy_dashboard_port_is_named_and_leaves_no_directory(make_config: Config, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ClusterError, match=f"port {port} .* type cluster.dashboard_port=0"):
            run(make_config(cluster={"dashboard_port": port}))
    assert not (tmp_path / "demo").exists()


def test_a_scheduler_that_does_not_answer_is_named(make_config: Config) -> None:
    with pytest.raises(ClusterError, match=r"tcp://127.0.0.1:9"):
        run(make_config(cluster={"scheduler": "tcp://127.0.0.1:9"}))


def test_a_reward_without_prompts_is_refused() -> None:
    import libra

    with pytest.raises(ConfigError, match="prompts is missing"):
        libra.train(reward=lambda completion: 0.0)
    with pytest.raises(ConfigError, match="section__name"):
        libra.train(lr=1e-3)
    with pytest.raises(ConfigError, match="no section"):
        libra.train(trainr__lr=1e-3)


def test_function_environments_travel_to_the_workers(make_config: Config, cluster_client: Client) -> None:
    def reward(completion: str, bonus: float) -> float:
        return bonus

    rows = [{"prompt": f"question {i}", "bonus": float(i)} for i in range(4)]
    environment: Environment = FunctionEnvironment(prompts=rows, reward=reward, seed=0)
    summary = run(make_config(**ONE_ITERATION), environment=environment, client=cluster_client)
    columns = stored(summary)
    for group in (0, 1):
        (value,) = set(columns["reward"][columns["group"] == group])
        assert value in {0.0, 1.0, 2.0, 3.0}

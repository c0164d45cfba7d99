import asyncio
import math
import runpy
from collections import Counter
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import dask
import numpy as np
import pytest
import zarr
from dask import delayed

import factories
from libra import keys
from libra.config import config_from_dict
from libra.driver.run_session import run
from libra.envs.tool_arithmetic import ToolArithmetic
from libra.errors import ServiceFault, ServiceTimeout
from libra.graph import rollout_nodes
from libra.graph.batch_nodes import evaluation_outcome
from libra.graph.iteration import evaluation_graph, iteration_graph
from libra.testing import FixedTurns
from libra.types import EndReason, Episode, FailureClass, Prompt, ToolReturn, ToolStatus, TrajectoryId, Turn
from libra.worker.run_spec import RunSpec


def spec(**trainer):
    config = config_from_dict({"trainer": {"prompts": 2, "group_size": 3} | trainer, "evaluation": {"prompts": 4}})
    return RunSpec("demo", 7, Path("nowhere"), "model", config)


def layers(node):
    """Annotations and dependencies of every task below a node, by key."""
    graph = node.__dask_graph__()
    found = {}
    for layer in graph.layers.values():
        for key in layer:
            notes = {k: v(key) if callable(v) else v for k, v in (layer.annotations or {}).items()}
            found[key] = (notes, set(graph.get_all_dependencies()[key]))
    return found


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize(("tool_format", "expected"), [(None, "hermes"), ("qwen3_coder", "qwen3_coder")])
def test_the_run_says_how_calls_are_written(given, tool_format, expected):
    config = config_from_dict({"rollout": {"tool_format": tool_format}})
    environment = ToolArithmetic() if given else None
    assert RunSpec("demo", 7, Path("nowhere"), "m", config, environment).make_environment().tool_format == expected


def test_the_nodes_of_an_iteration_and_their_keys():
    graph = iteration_graph(spec(), 5)
    tasks = layers(graph.end)
    for group in graph.groups:
        tasks |= layers(group)
    once = ("gate", "prompts", "batch", "store", "step", "update", "publish", "summary")
    assert Counter(keys.parse(key).node for key in tasks) == {"trajectory": 6, "group": 2} | dict.fromkeys(once, 1)
    assert all(keys.parse(key)[3:] == (7, "demo") for key in tasks)
    assert all(keys.parse(key).indices[0] == 5 for key in tasks)


def test_a_streamed_step_is_waves_that_wait_for_no_group_and_an_end():
    waves = 3
    graph = iteration_graph(spec(prompts=waves, streaming="on"), 5)
    tasks = layers(graph.end)
    for group in graph.groups:
        tasks |= layers(group)
    assert not any(key.startswith("step") for key in tasks)
    for j in range(waves):
        assert tasks[f"wave-train-5-{j}-e7-demo"] == ({"resources": {keys.PARK: 1}}, set())
        notes, needs = tasks[f"accumulate-train-5-{j}-0-e7-demo"]
        assert notes["resources"] == {keys.TRAIN: 1} and needs == {f"wave-train-5-{j}-e7-demo"}
    assert tasks["batch-train-5-e7-demo"][1] == {f"wave-train-5-{j}-e7-demo" for j in range(waves)}
    added = {f"accumulate-train-5-{j}-0-e7-demo" for j in range(waves)}
    assert tasks["close-train-5-0-e7-demo"][1] == {"batch-train-5-e7-demo", *added}
    assert tasks["update-train-5-e7-demo"][1] == {"close-train-5-0-e7-demo"}


def test_no_iteration_depends_on_another_and_the_batch_on_no_group():
    tasks = layers(iteration_graph(spec(), 5).end)
    assert "batch-train-5-e7-demo" in tasks and tasks["batch-train-5-e7-demo"][1] == set()
    assert not any(key.startswith(("group", "trajectory", "gate")) for key in tasks)


def test_gates_trajectories_and_batches_are_parked_and_others_take_a_slot_of_their_kind():
    graph = iteration_graph(spec(), 5)
    tasks = layers(graph.end) | layers(graph.groups[0])
    parked = dict.fromkeys(("gate-train-5", "trajectory-train-5-0-2", "batch-train-5"), keys.PARK)
    others = {"group-train-5-0": "GRADE", "step-train-5-0": "TRAIN", "store-train-5": "COMMIT"}
    for node, resource in (parked | others).items():
        assert tasks[f"{node}-e7-demo"][0]["resources"] == {resource: 1}


def test_a_node_of_the_users_stands_between_trajectories_and_group():
    def judge(episodes):
        return [0.0] * len(episodes)

    tasks = layers(iteration_graph(spec(), 0, score=lambda episodes: delayed(judge)(episodes)).groups[0])
    (mine,) = [key for key in tasks if key.startswith("judge")]
    assert mine in tasks["group-train-0-0-e7-demo"][1]
    assert tasks[mine][1] == {"episodes-train-0-0-e7-demo"}
    assert {f"trajectory-train-0-0-{s}-e7-demo" for s in range(3)} <= tasks["episodes-train-0-0-e7-demo"][1]


def test_an_evaluation_asks_each_question_once_and_steps_nowhere():
    tasks = layers(evaluation_graph(spec(), 3).end)
    assert sorted({keys.parse(key).node for key in tasks}) == ["evaluation", "gate", "group", "prompts", "trajectory"]
    assert sum(key.startswith("trajectory-eval-3") for key in tasks) == 4


def test_turn_seeds_differ_by_position_and_evaluations_repeat_theirs():
    run = spec()
    seeds = {run.turn_seed(TrajectoryId(*at), t) for *at, t in product(range(3), repeat=4)}
    assert len(seeds) == 81
    assert run.turn_seed(TrajectoryId(0, 4, 0, "eval"), 2) == run.turn_seed(TrajectoryId(50, 4, 0, "eval"), 2)
    assert run.turn_seed(TrajectoryId(0, 4, 0, "eval"), 2) != run.turn_seed(TrajectoryId(0, 4, 0), 2)
    draws = {run.turn_seed(TrajectoryId(0, 0, 0), turn, draw) for turn in range(3) for draw in range(3)}
    assert len(draws) == 9 and len(draws & seeds) == 3


@pytest.mark.parametrize("key", ["trajectory-eval-3-0-7-e12-a_run.2", "publish-train-e0-demo", "batch-train-10-e1-x"])
def test_keys_parse_to_what_they_were_made_from(key):
    parsed = keys.parse(key)
    assert keys.make(parsed.node, parsed.indices, epoch=parsed.epoch, run=parsed.run, split=parsed.split) == key
    for other in ("sum-123", ("x", 0, 0), "trajectory-train-1-2", "gate-other-1-e0-run"):
        assert keys.parse(other) is None  # keys of others are not ours


def test_a_group_that_is_not_scored_in_time_ends_no_run(tmp_path, monkeypatch, caplog):
    faults = [ServiceTimeout("service teach: a batch of 4 did not return within 600 s"), ServiceFault("out of memory")]

    async def scored(*_):
        raise faults.pop(0)

    host = SimpleNamespace(spec=SimpleNamespace(groups_dir=tmp_path))
    monkeypatch.setattr(rollout_nodes, "runtime_here", lambda run: host)
    monkeypatch.setattr(rollout_nodes, "read_group", lambda path: [])
    monkeypatch.setattr(rollout_nodes, "_scored", scored)
    assert asyncio.run(rollout_nodes.teach("demo", None, 3, 7))["group"] == 7
    assert "group 7 of iteration 3" in caplog.text
    with pytest.raises(ServiceFault, match="out of memory"):
        asyncio.run(rollout_nodes.teach("demo", None, 3, 8))


def test_the_judge_docks_each_call_that_did_not_come_back_ok(repository):
    judge = runpy.run_path(str(repository / "workflows" / "custom_reward.py"))["judge"]
    returns = tuple(ToolReturn("t", status, "") for status in (ToolStatus.OK, ToolStatus.TIMEOUT, ToolStatus.ERROR))
    episode = Episode("x", Prompt("p", ()), (Turn("", (), returns), Turn("")), EndReason.ANSWERED)
    assert judge([episode]) == [pytest.approx(-0.2)]


def test_extra_rewards_reach_the_store(make_config, client):
    class Constant(FixedTurns):
        def grade(self, episode):
            return 1.0

    def by_position(episodes):
        return [10.0 * index for index in range(len(episodes))]

    score = lambda episodes: dask.delayed(by_position)(episodes)  # noqa: E731
    summary = run(make_config(run={"iterations": 1}), environment=Constant(), client=client, score=score)
    columns = zarr.open_group(summary.directory / "trajectories.zarr", mode="r")["trajectory"]
    assert np.array_equal(columns["reward"][:], 1.0 + 10.0 * columns["sample"][:])


def test_failures_are_trajectories_that_ended_so_and_left_out_those_without_a_reward():
    ended = {FailureClass.NONE: 1.0, FailureClass.POLICY: 0.0, FailureClass.TOOL: math.nan}
    trajectories = [factories.trajectory(failure=failure, reward=reward) for failure, reward in ended.items()]
    outcome = evaluation_outcome(3, trajectories)
    assert (outcome["num"], outcome["failures"], outcome["left_out"], outcome["reward"]) == (3, 2, 1, 0.5)

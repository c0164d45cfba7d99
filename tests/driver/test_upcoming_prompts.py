"""Which questions come again is told to the scheduler before an iteration begins; an environment's fault there stops nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from distributed import Client

import libra
from libra.driver.upcoming_prompts import UpcomingPrompts
from libra.envs import FunctionEnvironment
from libra.observe.metrics import read_metrics
from libra.sim.from_run import workload_of_run
from libra.store.event_log import read_events
from libra.testing.environments import FixedTurns


def rated(completion: str) -> float:
    return float(len(completion) % 3)


class Faulty(FixedTurns):
    def prompt_id(self, split: str, index: int) -> str:
        raise OSError("the list of questions is elsewhere")


def trained(environment: Any, client: Client, directory: Path, model: Path) -> list[dict[str, Any]]:
    summary = libra.train(
        model=str(model),
        environment=environment,
        client=client,
        run__dir=str(directory),
        run__name="named",
        run__iterations=3,
        rollout__max_new_tokens=4,
        rollout__max_turns=2,
        trainer__prompts=2,
        trainer__group_size=2,
        evaluation__prompts=0,
        observe__progress=False,
    )
    assert {row["step"] for row in read_metrics(summary.directory) if "reward" in row} == {0, 1, 2}
    assert all("forecast_weight_history" in row for row in read_metrics(summary.directory) if "reward" in row)
    return list(read_events(summary.directory / "events.jsonl").events)


def test_a_run_names_the_prompts_of_each_iteration_before_it_begins(
    client: Client, tmp_path: Path, random_model: Path
) -> None:
    environment = FunctionEnvironment(prompts=["a", "b", "c"], eval_prompts=["d"], reward=rated)
    events = trained(environment, client, tmp_path, random_model)
    named = {event["iteration"]: event["prompts"] for event in events if event["name"] == "prompts_named"}
    asked = [environment.prompt("train", index).prompt_id for index in range(6)]
    assert named == {k: asked[2 * k : 2 * k + 2] for k in range(3)}
    assert set(asked[:3]) == set(asked[3:])
    work = workload_of_run(tmp_path / "named")
    assert [plan.prompt for plan in work.trajectories] == [name for name in asked for _ in range(2)]
    for k in range(3):
        order = [event["name"] for event in events if event.get("iteration") == k]
        assert order.index("prompts_named") < order.index("gate_parked")


@pytest.mark.parametrize("environment", [FixedTurns(), Faulty()], ids=["nothing comes again", "faulty"])
def test_nothing_is_named_where_nothing_comes_again_or_nobody_knows(
    environment: FixedTurns, client: Client, tmp_path: Path, random_model: Path
) -> None:
    events = trained(environment, client, tmp_path, random_model)
    assert not [event for event in events if event["name"] == "prompts_named"]


def test_a_fault_is_asked_for_once() -> None:
    prompts = UpcomingPrompts(Faulty(), 2)
    assert prompts.names(0) is prompts.names(1) is None

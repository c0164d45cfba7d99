"""Planning beside a run: it hears each iteration, its numbers are in metrics and event log, and it changes nothing."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from distributed import Client

from libra.config import RunConfig
from libra.events import from_dict
from libra.graph.driver import Session
from libra.graph.planning import batch_workload, realised_seconds
from libra.policy.replay import replay
from libra.store.event_log import read_events
from libra.store.line_log import LineReader

Config = Callable[..., RunConfig]


def test_plans_are_in_the_log_and_change_nothing(make_config: Config, cluster_client: Client) -> None:
    config = make_config(run={"iterations": 3}, planner={"replan": True})
    with Session(config, client=cluster_client) as session:
        values = list(session.iterations())
        workload = batch_workload(session.spec, 1)
    assert workload.generated_tokens.tolist() == [12.0] * 4  # three turns of four tokens
    assert workload.num_turns.tolist() == [3.0] * 4
    assert (workload.observation_tokens > 0).all()
    assert (workload.prompt_tokens > 0).all()

    events = list(read_events(session.directory / "events.jsonl").events)
    considered = [event for event in events if event["name"] == "plan_considered"]
    lines = [json.loads(line) for line in (session.directory / "metrics.jsonl").read_text().splitlines()]
    measured = {line["step"]: line for line in lines if "plan/error_frac" in line}
    assert considered
    assert {event["iteration"] for event in considered} == set(measured) <= {0, 1, 2}
    for event in considered:
        assert event["realised_step_s"] == pytest.approx(values[event["iteration"]]["iteration_s"])
        assert (event["train_gpus"], event["engines"], event["accepted"]) == (1, [[1, 1]], False)
        assert event["run"] == "demo"
    log = LineReader(session.directory / "events.jsonl")
    assert all(told.difference == "" for told in replay((line, from_dict(event)) for line, event in log))


def test_what_is_no_training_is_rollout_unless_steps_overlap(make_config: Config) -> None:
    values = {"iteration_s": 10.0, "train_s": 4.0}
    assert realised_seconds(values, make_config()).rollout_s == pytest.approx(6.0)
    assert realised_seconds(values, make_config(run={"eta": 1})).rollout_s == pytest.approx(10.0)

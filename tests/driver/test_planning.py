"""Planning beside a run: it hears each iteration, its numbers are in metrics and event log, and it changes nothing."""

import json

import pytest
from whole_run import events_of, named

from libra.driver.planning import UpcomingPrompts, realised_seconds, taken, workload_of
from libra.driver.run_session import Session
from libra.envs import FunctionEnvironment
from libra.facts import from_dict
from libra.observe.metrics import read_metrics
from libra.policy.log_replay import replay
from libra.sim.from_run import workload_of_run


def test_each_iteration_is_predicted_before_it_compared_after_it_and_changed_by_neither(make_config, client):
    config = make_config(run={"iterations": 4}, planner={"replan": "advise"}, evaluation={"prompts": 2, "every": 2})
    predictions, values = [], []
    with Session(config, client=client) as session:
        planning = session.planning
        assert planning is not None
        for row in session.iterations():
            values.append(row)
            assert planning.forecast.num_steps == len(values)
            predictions.append(planning.predicted)
            if row["iteration"] == 1:
                session.evaluate(2)
    workload = workload_of(values[1]["trajectory_lengths"])
    assert workload is not None
    assert workload.generated_tokens.tolist() == [12.0] * 4 and workload.num_turns.tolist() == [3.0] * 4
    assert (workload.observation_tokens > 0).all() and (workload.prompt_tokens > 0).all()
    assert values[2]["worker_tokens"] == {"rollout-0": 48}
    assert [tokens for _, tokens in values[2]["question_tokens"]] == [24, 24]

    lines = [json.loads(line) for line in (session.directory / "metrics.jsonl").read_text().splitlines()]
    (evaluation_s,) = {row["evaluation/wall_s"] for row in lines if row.get("evaluation/wall_s") and row["step"] == 2}
    compared = {row["step"]: row for row in lines if "plan/realised_s" in row}
    assert sorted(compared) == [0, 1, 2, 3] and "plan/predicted_s" not in compared[0]  # nothing was measured before
    for k in (1, 2, 3):
        predicted = predictions[k - 1]  # as it stood before the iteration began
        assert predicted is not None
        assert compared[k]["plan/predicted_s"] == predicted.step_s
        assert compared[k]["plan/error_frac"] == pytest.approx(predicted.step_s / compared[k]["plan/realised_s"] - 1)
        assert predicted.step_s == pytest.approx(predicted.rollout_s + predicted.train_s + predicted.rest_s)
        assert predicted.tokens == pytest.approx(48.0)  # four trajectories of three turns of four tokens
    assert compared[1]["plan/realised_s"] == pytest.approx(values[1]["iteration_s"])
    assert compared[2]["plan/realised_s"] == pytest.approx(values[2]["iteration_s"] - evaluation_s)
    memory = [row for row in lines if "plan/train_peak_bytes" in row]
    assert [row["step"] for row in memory] == [0, 1, 2, 3]
    for row in memory:
        measured, wanted = row["plan/train_peak_bytes"], row["plan/predicted_train_peak_bytes"]
        assert measured == values[row["step"]]["train_peak_bytes"] > 0
        assert wanted > 12 * 1000  # a model of some thousand parameters, with its gradient and AdamW's two moments
        assert row["plan/train_peak_error_frac"] == pytest.approx(wanted / measured - 1)

    events = events_of(session.directory)
    considered = named(events, "plan_considered")
    assert considered
    for event in considered:
        assert event["predicted_step_s"] == compared[event["iteration"]].get("plan/predicted_s")
        assert (event["train_gpus"], event["engines"], event["accepted"]) == (1, [[1, 1]], False)
    assert all(told.difference == "" for told in replay(enumerate(from_dict(event).fact for event in events)))


def test_what_is_no_training_is_rollout_unless_steps_overlap(make_config):
    values = {"iteration_s": 11.0, "evaluation_s": 0.5, "train_s": 4.0, "publish_s": 0.5}
    assert realised_seconds(values, make_config()).rollout_s == pytest.approx(6.0)
    assert realised_seconds(values, make_config()).step_s == pytest.approx(10.5)
    assert realised_seconds(values, make_config(run={"eta": 1})).rollout_s == pytest.approx(10.5)
    assert realised_seconds(values, make_config(run={"eta": 1}), alone=True).rollout_s == pytest.approx(6.0)
    values |= {"worker_tokens": {}, "question_tokens": ()}
    for publish_s, exceeds_s in ((0.5, 0.0), (6.0, 2.0)):  # publication time beyond the next step counts
        values["publish_s"] = publish_s
        realised = realised_seconds(values, make_config(run={"eta": 1}))
        assert taken(values, realised, {}, beside=True).rest_s == pytest.approx(exceeds_s)
        assert taken(values, realised, {}).rest_s == publish_s


class Elsewhere:
    """An environment whose questions are only where its workers are."""

    asked = 0

    def prompt(self, split, index):
        self.asked += 1
        raise OSError("no such file")

    prompt_id = prompt


def test_a_run_names_the_prompts_of_each_iteration_before_it_begins(make_config, client):
    environment = FunctionEnvironment(prompts=["a", "b", "c"], eval_prompts=["d"], reward=lambda completion: 1.0)
    with Session(make_config(run={"iterations": 3}), environment=environment, client=client) as session:
        list(session.iterations())
    rows = [row for row in read_metrics(session.directory) if "reward" in row]
    assert len(rows) == 3 and all("forecast_weight_history" in row for row in rows)
    events = events_of(session.directory)
    asked = [environment.prompt("train", index).prompt_id for index in range(6)]
    expected = [[[f"train-{k}-{g}", asked[2 * k + g]] for g in range(2)] for k in range(3)]
    assert [e["groups"] for e in named(events, "prompts_named")] == expected
    assert set(asked[:3]) == set(asked[3:])
    work = workload_of_run(session.directory)
    assert [plan.prompt for plan in work.trajectories] == [name for name in asked for _ in range(2)]
    for k in range(3):
        order = [event["name"] for event in events if event.get("iteration", k) == k]
        assert order.index("prompts_named") < order.index("gate_parked")


def test_an_environment_that_fails_here_is_asked_once_and_done_without():
    for name in ("lengths", "names"):
        environment = Elsewhere()
        read = getattr(UpcomingPrompts(environment, 2), name)
        assert read(0) is None and read(1) is None and environment.asked == 1

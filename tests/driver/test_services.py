"""Services of a run on real workers: restored bit for bit, asked by tools and rewards, waited for or not, refused beforehand."""

from collections import Counter

import asked_services
import numpy as np
import pytest

import factories
from libra import facts
from libra.driver.part_checks import check_services, check_tools
from libra.driver.run_session import Session
from libra.envs import FunctionEnvironment, tool
from libra.errors import BatchFailed, ConfigError, LibraError, ModelError
from libra.store.event_log import EventReader
from libra.store.trajectory_store import TrajectoryStore
from libra.worker.services.service_functions import FUNCTIONS
from libra.worker.services.service_models import HostModel

HERE = "asked_services"


def prompts():
    return [{"prompt": f"question {number}", "answer": str(number)} for number in range(20)]


def test_three_models_on_a_device_for_one_answer_alike_however_often_restored(make_config, client, tmp_path):
    answers = tmp_path / "answers.txt"
    models = {n: factories.save_chat_model(tmp_path / n, seed=ord(n), matrix_std=0.1) for n in "abc"}
    hosts = {name: HostModel(path) for name, path in models.items()}
    one = max(host.num_bytes for host in hosts.values()) / 2**30
    config = make_config(
        run={"iterations": 1}, environment={"name": f"{HERE}:ThreeAsked", "args": {"path": str(answers)}},
        services={"named": {name: {"model": str(path), "function": "logprob"} for name, path in models.items()},
        "device_gib": 1.5 * one},
    )  # fmt: skip
    with Session(config, client=client) as session:
        list(session.iterations())
    told = Counter(tuple(line.split()) for line in answers.read_text().splitlines())
    expected = {
        (name, FUNCTIONS["logprob"](host.restored("cpu")[0], host.tokenizer, [asked_services.ASKED])[0].hex())
        for name, host in hosts.items()
    }
    assert set(told) == expected and len(expected) == 3
    log = [facts.from_dict(line).fact for _, line in EventReader(session.directory / "events.jsonl")]
    batches = [event for event in log if isinstance(event, facts.ServiceAnswered)]
    assert sum(event.requests for event in batches) == told.total()
    restored = Counter(event.service for event in batches if event.restored)
    assert all(restored[name] >= 2 for name in "abc")  # each was evicted, and came back
    assert all(event.evicted == 1 for event in batches if event.restored and event is not batches[0])


def test_a_slow_judge_is_waited_for_by_no_step(make_config, client, tmp_path):
    gate = tmp_path / "gate"
    config = make_config(
        run={"iterations": 3}, rollout={"max_turns": 1}, trainer={"late": "correct"},
        services={"named": {"judge": {"function": f"{HERE}:gated", "args": {"gate": str(gate)}, "max_wait_s": 0.0}}},
    )  # fmt: skip
    reward = {"service": "judge", "late": True, "fast": 0.0}
    environment = FunctionEnvironment(prompts=prompts(), reward=reward)
    with Session(config, environment=environment, client=client) as session:
        rows = []
        for row in session.iterations():
            rows.append(row)
            if row["iteration"] == 0:  # it was trained although no judge has said anything
                assert (row["late_came"], row["late_waiting"]) == (0, 4)
                gate.touch()
    assert sum(row["late_came"] for row in rows) + len(list(session.spec.late_dir.glob("train-2-*"))) >= 4
    assert {path.read_text().count('"value": 0.5') for path in session.spec.late_dir.iterdir()} == {1}


def test_a_service_that_fails_is_a_failure_of_the_reward_and_no_reward(make_config, client):
    config = make_config(
        run={"iterations": 1}, rollout={"max_turns": 1}, trainer={"resample": 0},
        services={"named": {"short": {"function": f"{HERE}:short"}}},
    )  # fmt: skip
    environment = FunctionEnvironment(prompts=prompts(), reward={"service": "short"})
    with Session(config, environment=environment, client=client) as session:
        iterations = session.iterations()
        assert next(iterations)["failures/reward"] == 4
        with pytest.raises(BatchFailed):
            next(iterations)
    with TrajectoryStore.open(session.spec.store_path) as store:
        assert np.isnan(store.columns("trajectory")["reward"]).all()


@pytest.mark.parametrize(("reward", "judge", "kind", "word"), [
    ({"service": "judg"}, {}, ConfigError, "did you mean 'judge'"),
    ({"service": "judge", "late": True}, {}, ConfigError, r"trainer\.late=correct"),
    ({"service": "judge"}, {"function": f"{HERE}:lengths", "args": {"mor": 1}}, ConfigError, "mor"),
    ({"service": "judge"}, {"model": "MODEL", "function": "score"}, ModelError, "reward model"),
    ({"service": "judge"}, {"model": "MODEL", "function": "teach"}, ConfigError, r"distil\.teacher"),
    ({"service": "judge"}, {"model": "/no/where"}, LibraError, "judge"),
])  # fmt: skip
def test_what_can_never_be_asked_is_refused(make_config, random_model, tmp_path, reward, judge, kind, word):
    entry = judge or {"model": "MODEL"}
    if entry.get("model") == "MODEL":
        entry = entry | {"model": str(random_model)}
    environment = FunctionEnvironment(prompts=prompts(), reward=reward)
    with pytest.raises(kind, match=word):
        Session(make_config(services={"named": {"judge": entry}}), environment=environment).__enter__()
    assert not (tmp_path / "demo").exists()


def test_a_late_answer_needs_a_worker_that_stays_and_a_model_somebody_who_asks_it(make_config, random_model, caplog):
    named = {"judge": {"model": str(random_model)}}
    made = make_config(services={"named": named}, trainer={"late": "correct"}, cluster={"tool_workers_most": 4})
    rewards = ({"service": "judge"}, {"service": "judge", "late": True})
    asks, late = (FunctionEnvironment(prompts=prompts(), reward=reward) for reward in rewards)
    with pytest.raises(ConfigError, match=r"cluster\.tool_workers_most"):
        check_services(made, late)
    check_services(made, asks)
    assert not caplog.records
    named["spare"] = {"model": str(random_model), "function": "logprob"}
    check_services(make_config(services={"named": named}), asks)
    (line,) = [record.getMessage() for record in caplog.records]
    assert "'spare'" in line
    named["spare"]["function"] = "teach"
    with pytest.raises(ConfigError, match="spare"):
        check_services(make_config(services={"named": named}), asks)


def test_limits_that_no_tool_takes_are_named(make_config, caplog):
    def look_up() -> str:
        """Look something up."""
        return ""

    config = make_config(environment={"quotas": {"search": "10/s", "other": 2}}, cluster={"tool_supply": {"cores": 1}})
    for limits, named in (
        ({}, {"quotas.search", "quotas.other", "tool_supply.cores"}),
        ({"cores": 1, "quota": "search"}, {"quotas.other"}),
    ):
        caplog.clear()
        tools = [tool(look_up, **limits)]
        environment = FunctionEnvironment(prompts=["a"] * 3, reward=lambda completion: 0.0, tools=tools)
        check_tools(config, environment, started_here=False)
        told = [record.getMessage().partition(" ")[0].partition(".")[2] for record in caplog.records]
        assert set(told) == named and len(told) == len(named)
